"""Values and texts as the user types them, in a shell and for Hydra; `resume=RUN`, which becomes its own words."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import ROOT
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from tinyformer.checkpoint.file import at_step, load_checkpoint
from tinyformer.checkpoint.paths import find_checkpoint
from tinyformer.config.conf import (
    config_dir,
    default_num_kv_heads,
    format_value,
    hydra_value,
    readable,
    text_of,
)
from tinyformer.config.folder import is_first_process
from tinyformer.config.launch import compose_run, with_last
from tinyformer.config.resume import expand_resume
from tinyformer.errors import ArgumentError
from tinyformer.run.pipeline import keep_overrides

SHOWN = {
    "outputs/2026-01-31/last.ckpt": "outputs/2026-01-31/last.ckpt",
    "book (1).txt": "'book (1).txt'",
    "a, b": """ "'a, b'" """.strip(),
    "it's": '"it\'s"',
    "": "''",
    "true": "\"'true'\"",
    "1e-3": "\"'1e-3'\"",
    "é": "é",
}


def test_a_value_is_shown_as_it_is_typed():
    values = [*SHOWN, "9.", "-nan", "\\\n", "null", *WORDS, True, None, [16, 16, None], [[0, 1], [1, 0]]]
    values += [["a b", "c, d", "it's", "é"], {"a": [1], "b": "x y"}, ["'", '"'], " ", "a`b` $(c) $HOME !x"]
    assert [format_value(text) for text in SHOWN] == list(SHOWN.values())
    assert format_value(((0, 1), (1, 0))) == "[[0,1],[1,0]]"
    # What is told is pasted into a shell, for a run and for a sweep.
    command = "printf '%s\\0' " + " ".join(f"key={format_value(value)}" for value in values)
    pasted = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    for is_sweep in (False, True):
        assert [read(word, is_sweep) for word in pasted] == values
    assert [override(f"key={hydra_value(value)}").value() for value in values] == values


WITHOUT_SPACES = """
    café.txt book(1).txt epoch=0-step=10.ckpt a,b.txt [draft].txt {a} {a:1} $5 it's 'Tis 007 1e3 2024 true a#b ~a
    a&b;c|d <|endoftext|> range(3) choice(a,b) Ωμέγα *.txt a! say`x` 100% a\\b end\\
"""
WORDS = [
    *WITHOUT_SPACES.split(),
    *("book (1).txt", "a, b: (c)", "[draft] a.txt", '"So," he said', " a ", "a\nb", "a\tb", "a\u00a0b"),
]
"""Texts and names of files, many of which Hydra's grammar cannot read, or reads as something else."""


@pytest.mark.parametrize("key", ["data.files", "generate.prompt", "analysis.text", "resume", "++hydra.run.dir"])
def test_a_path_and_a_text_need_no_quotes_beside_those_of_the_shell(key):
    assert [read(f"{key}={text}") for text in WORDS] == WORDS
    for text in [*WORDS, "[a]"]:
        (word,) = readable([f"{key}={text}"])
        assert readable([word]) == [word]
        assert text_of(word) == text or text == "[a]"
    is_list = key in ("data.files", "generate.prompt", "analysis.text")
    assert read(f"{key}=[a, é (1)]") == (["a", "é (1)"] if is_list else "[a, é (1)]")
    words = ["Bären", "aren't", "null", "1e3", "'Tis", "a, b"]
    assert not is_list or read(f"{key}=[Bären, aren't,null,1e3,'Tis,'a, b']") == words
    assert read(f"analysis.pairs=[[{','.join(words[:2])}],[{','.join(words[2:4])}]]") == [words[:2], words[2:4]]
    assert read(f"{key}=null") is None
    assert read(f"{key}=${{oc.env:HOME}}/é") == "${oc.env:HOME}/é"


def test_what_hydra_reads_is_left_alone():
    words = ["-m", "--cfg", "job", "model.num_heads=1,2", "seed=range(3)", "~norm", "model=nano", "data.columns=[a,b]"]
    words += ["callbacks.finite={action:skip}", "data.files=a.txt,b.txt", "generate.prompt='a, b'"]
    words += ["attention=glob(m*)", "analysis.columns={a:b.csv}"]
    assert readable(words, is_sweep=True) == words
    swept = ["data.files=é.txt,'a,b.txt',c", "task.labels=[a,é],[b,c]"]
    assert readable(swept, is_sweep=True) == ["data.files='é.txt','a,b.txt',c", "task.labels=[a,'é'],[b,c]"]


def override(word):
    return OverridesParser.create().parse_override(word)


def read(word, is_sweep=False):
    (one,) = readable([word], is_sweep)
    return override(one).value()


# `resume=`.


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_run(folder, overrides=(), parts=("overrides", "checkpoint")):
    (folder / ".hydra").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    if "overrides" in parts:
        (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
    if "checkpoint" in parts:
        (folder / "checkpoints" / "last.ckpt").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("saved", "arguments", "expanded"),
    [
        (["seed=1"], ["seed=2", "resume=run", "+c=1"], ["seed=1", "seed=2", "+c=1", "resume=run"]),
        (["seed=1", "resume=elsewhere"], ["resume=other", "resume='run'"], ["seed=1", "resume='run'"]),
        (["+callbacks.a._target_=os.mkdir", "+callbacks.a.b=1"], ["resume=run", "~callbacks.a"], ["resume=run"]),
        (["logger.project=a"], ["resume=run", "~logger"], ["~logger", "resume=run"]),
    ],
    ids=["new-ones-win", "last-counts", "an-addition-deleted", "one-of-ours-deleted"],
)
def test_saved_overrides_come_before_new_ones(here, saved, arguments, expanded):
    make_run(here / "run", saved)
    for unchanged in ([], ["a=1", "-m"], ["resume=null"], ["resume="]):
        assert expand_resume(unchanged) == unchanged
    assert expand_resume(arguments) == [*expanded, "hydra.run.dir='run'", "hydra.output_subdir=null"]


def test_a_folder_without_a_run_is_refused(here):
    make_run(here / "outputs" / "2026-01-31" / "11-00-00")
    newest = os.path.join("outputs", "2026-01-31", "11-00-00")
    with pytest.raises(ValueError, match=rf"folder does not exist\. The newest run is resume={newest}\.$"):
        expand_resume(["resume=none"])
    for part, message in {
        "checkpoint": r"the folder contains no run; ",
        "overrides": "wrote a checkpoint",
    }.items():
        make_run(here / part, parts=[part])
        with pytest.raises(ValueError, match=rf"^resume={part}: .*{message}"):
            expand_resume([f"resume={part}"])


def started_run(*words):
    """The folder of a run with these overrides, as it is once it has saved its first checkpoint."""
    config, invocation = compose_run("train", words)
    keep_overrides(config, config, make_run(Path("run"), parts=["checkpoint"]), invocation)


CHANGED = {
    "train.yaml": "position: rotary->position: none|optimizer: muon->optimizer: adamw|seed: 0->seed: 7",
    "norm/layer_norm.yaml": "eps: 1.0e-5->eps: 1.0e-3",
    "model/_shared.yaml": "embedding_dropout: ${model.dropout}->embedding_dropout: 0.1",
    "attention/_shared.yaml": "dropout: 0.0->dropout: ${model.dropout}",
    "optimizer/muon.yaml": "momentum: 0.95->other: 1",
}
"""Defaults of a newer version, by file: choices, values, one that was computed, one that now is, and a key less."""

EXPANDED = """
import json, sys
from omegaconf import OmegaConf
from tinyformer.config.launch import compose_run
from tinyformer.config.resume import expand_resume
config, _ = compose_run("train", [word for word in expand_resume(sys.argv[1:]) if not word.startswith("hydra")])
print(json.dumps(OmegaConf.to_container(config)))
"""
KEPT = "position=rotary optimizer=muon model.embedding_dropout=0.0 attention.dropout=0.0 norm.eps=1e-05 seed=0"


@pytest.mark.parametrize(
    ("command", "given", "kept"),
    [
        ("resume=run", {}, KEPT),
        ("resume=run trainer=cpu", {"trainer": {"strategy": "auto", "devices": 1, "accelerator": "cpu"}}, KEPT),
        (
            "resume=run seed=3 norm.eps=0.5",
            {"seed": 3, "norm": {"eps": 0.5}},
            KEPT.replace(" norm.eps=1e-05 seed=0", ""),
        ),
    ],
)
def test_a_run_keeps_its_values_when_defaults_change(here, command, given, kept):
    started_run("attention=gqa", "data.batch_size=5", "trainer=cpu", "trainer=ddp")
    was = OmegaConf.load("run/.hydra/config.yaml")
    shutil.copytree(config_dir(), "newer/conf")
    Path("newer/tinyformer").symlink_to(ROOT / "tinyformer")
    for name, changes in CHANGED.items():
        file = Path("newer/conf", name)
        for before, after in (change.split("->") for change in changes.split("|")):
            text = file.read_text()
            assert text.count(before) == 1, (name, before)
            file.write_text(text.replace(before, after))
    process = [sys.executable, "-c", EXPANDED, *command.split()]
    ended = subprocess.run(
        process, env=os.environ | {"PYTHONPATH": "newer"}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    *told, config = ended.stdout.splitlines()
    assert told[-2:] == [
        "run had values that this version has no keys for: optimizer.momentum=0.95",
        f"run keeps values that are no longer the defaults: {kept}",
    ]
    del was.optimizer.momentum
    of_command = {"resume": command.split()[0].removeprefix("resume="), "optimizer": {"other": 1}}
    was = OmegaConf.merge(was, {"model": {"embedding_dropout": 0.0}}, of_command, given)
    assert json.loads(config) == OmegaConf.to_container(was)


def test_auto_tells_how_its_settings_differ_from_those_of_the_run(here, capsys):
    command = ["resume=auto", "hydra.run.dir='${data.seq_len}'", "seed=1", "data=induction", "data.seq_len=16"]
    assert expand_resume(command) == command
    started_run(*command[2:], "optimizer.lr=0.5", "resume=auto")
    Path("run").rename("16")
    assert capsys.readouterr().out == ""
    words = expand_resume([*command, "optimizer.lr=0.5"])
    assert (words[-3:], capsys.readouterr().out) == (["resume=auto", "hydra.run.dir='16'", words[-1]], "")
    assert "optimizer.lr=0.5" in expand_resume([command[0], command[1], "seed=2", *command[3:]])
    assert capsys.readouterr().out.splitlines() == [
        "16, with other settings: seed=2",
        "16 was started with these settings, which are kept unless they are given again: seed=1 optimizer.lr=0.5",
    ]


REFUSED = {"seed=${oc.env:HOME}": "give seed= again"}
REFUSED |= dict.fromkeys(("data.cache_dir=x", "norm._target_=mine.Norm"), "add it to the command")


@pytest.mark.parametrize(("stored", "cure"), REFUSED.items())
def test_what_is_not_read_from_a_run_is_typed_again(here, stored, cure):
    make_run(here / "run", [stored])
    with pytest.raises(
        ValueError, match=rf"^resume=run: run/\.hydra/overrides\.yaml says {re.escape(stored)}, .*{cure}\.$"
    ):
        expand_resume(["resume=run"])
    for typed in (stored, f"{stored.partition('=')[0]}=2"):
        assert expand_resume(["resume=run", typed])[0] == typed


RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")


@pytest.mark.parametrize(
    ("ranks", "is_first"),
    [
        ("", True),
        ("1 0 0", False),
        ("0 0 0 1", True),
        ("- 0 1", False),
        ("- - - 3", False),
    ],
)
def test_one_process_of_a_run_writes(ranks, is_first, monkeypatch):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    for name in ("MASTER_ADDR", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "4")
    for name, rank in zip(RANKS, ranks.split(), strict=False):
        if rank != "-":
            monkeypatch.setenv(name, rank)
    assert is_first_process() is is_first


# What config files compute.


def test_kv_heads_are_the_largest_divisor_up_to_half():
    sizes = {1: 1, 2: 1, 3: 1, 4: 2, 6: 3, 7: 1, 9: 3, 12: 6, 16: 8}
    assert {num_heads: default_num_kv_heads(num_heads) for num_heads in sizes} == sizes
    for invalid in (0, -4, "abc", None):  # left for the check of num_heads
        assert default_num_kv_heads(invalid) == invalid


def test_last_is_the_newest_checkpoint_and_a_folder_that_of_its_run(here, capsys):
    runs = [make_run(Path("outputs", "2026-01-31", name)) / "checkpoints/last.ckpt" for name in ("09-30-00", "11-00")]
    os.utime(runs[1], (1, 1))  # the other was resumed
    given = ["checkpoint=last", "init_from=last", "data.files=last", "seed=1"]
    named = with_last(given)
    assert named == [f"checkpoint={runs[0]}", f"init_from={runs[0]}", *given[2:]]
    assert capsys.readouterr().out == 2 * f"The last checkpoint is {runs[0]}.\n"
    for path in (runs[1], "none.ckpt"):
        assert find_checkpoint(path) == at_step(path, None) == Path(path)
    with pytest.raises(ArgumentError, match=rf"^path='{runs[1]}': cannot be read"):
        load_checkpoint(runs[1].parents[1])
    make_run(Path("last"))
    assert find_checkpoint("last") == Path("last/checkpoints/last.ckpt")
    Path("last/checkpoints/last.ckpt").unlink()
    assert find_checkpoint("last") == Path("last")
    assert capsys.readouterr().out == ""
    shutil.rmtree("outputs")
    shutil.rmtree("last")
    assert with_last(given) == given
