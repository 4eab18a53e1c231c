"""Full disks, folders that cannot be made, closed pipes, early Ctrl-C, no network, any overrides: never a traceback."""

import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, SMALL, TEXT, Program, ran, results_of
from omegaconf import OmegaConf
from wandb_file import read_config_and_summary

from tinyformer.config.conf import config_dir, register_resolvers, values_of_keys
from tinyformer.run.trainer import make_loggers
from tinyformer.training import loggers

TRAIN = [str(ROOT / "train.py"), *f"{SMALL} {TEXT} hydra.run.dir=run trainer.max_steps=30".split()]
FINDINGS = ["-m", "tinyformer", "findings"]

LONG = "a" * 252
PLACES = [
    (f"data.files={LONG}.text", "data.files=a+…: the file does not exist"),
    *(
        (f"hydra.run.dir={place}", "hydra.run.dir=.*: it cannot be made .*; hydra.run.dir=.* works")
        for place in ("/proc/run", "/sys/run", "book.txt/run", LONG)
    ),
    *(
        (
            f"data.cache_dir={place}",
            ".*: .* The file was not modified",
        )
        for place in ("/proc/x/y", "/sys/x", "x/" + 2 * LONG)
    ),
    (f"init_from={2 * LONG}/last.ckpt", "init_from=a+…: does not exist"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("word", "sentence"), PLACES)
def test_a_place_that_cannot_be_written_is_named_with_what_moves_it(
    word: str, sentence: str, program: Program, book: Path
) -> None:
    ended = program("train.py", SMALL, TEXT, word)
    assert (ended.code, bool(re.fullmatch(f"Error: {sentence}.*\n", ended.err))) == (2, True), ended.err


FILES = (
    *("config.yaml", "metrics.csv", "events.csv", "results.json", "attention/heads.csv", "attention/step_000004.png"),
    *("checkpoints/best.ckpt", "checkpoints/previous.ckpt", "fit-profile.txt", "snapshots/step_000002.ckpt"),
)
FOLDERS = ("attention", "checkpoints", "snapshots", ".hydra")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_a_file_that_cannot_be_written_is_reported(name: str, program: Program, book: Path) -> None:
    """A folder is in its place, or a file in that of a folder: rights would not stop root."""
    path = Path("run", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if name in FOLDERS:
        path.write_text("here first")
    else:
        (path / "here first").mkdir(parents=True)
    settings = "trainer.profiler=simple trainer.val_check_interval=2 hydra.run.dir=run"
    ended = program("train.py", SMALL, TEXT, settings, "callbacks.snapshots.every_n_steps=2")
    assert (ended.code, len(ended.err.strip().splitlines())) == (2, 1), ended.err
    assert "/run/" + name.replace("previous", "last") in ended.err
    assert path.read_text() == "here first" if name in FOLDERS else (path / "here first").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("words", [TRAIN, FINDINGS], ids=["train", "findings"])
def test_nobody_reads_the_output(words: list[str], tmp_path: Path, book: Path) -> None:
    command = ["bash", "-c", f"{shlex.join([sys.executable, *words])} | true; exit ${{PIPESTATUS[0]}}"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


ENCODINGS = {
    "C locale": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ASCII output": {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
}
IN_PYTHON = ["-c", "import sys, tinyformer; tinyformer.train(sys.argv[1:]); assert sys.stdout.errors == 'strict'"]


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_a_terminal_cannot_encode_is_escaped_and_results_are_utf_8(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("中文\n大天地的é" * 300, encoding="utf-8")
    command = [sys.executable, *(TRAIN[:1] if encoding == "C locale" else IN_PYTHON), *TRAIN[1:]]
    environment = os.environ | ENCODINGS[encoding]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert (ended.returncode, b"Traceback" in ended.stderr) == (0, False), ended.stderr
    last = results_of(tmp_path / "run")["sample"].splitlines()[-1]
    assert (last.isascii(), ascii(last)[1:-1].encode() in ended.stdout) == (False, True)


# Weights & Biases without a network.

OURS = "https://wandb.example.org:8080"


@pytest.mark.parametrize(
    ("mode", "key", "server", "netrc", "offline"),
    [
        ("", "", "", "", True),
        ("", "x" * 40, "", "", False),
        ("offline", "x" * 40, "", "", True),
        ("online", "", "", "", False),
        ("", "", "", "machine api.wandb.ai login user password secret", False),
        ("", "", OURS, "machine api.wandb.ai login user password secret", True),
        ("", "", OURS, "machine wandb.example.org login user password secret", False),
        ("", "", "", "machine", True),
    ],
)
def test_online_only_with_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, key: str, server: str, netrc: str, offline: bool
) -> None:
    """A key of the server in use, in the environment or in netrc."""
    path = tmp_path / "netrc"
    path.write_text(netrc)
    path.chmod(0o600)
    for name, value in (("MODE", mode), ("API_KEY", key), ("BASE_URL", server)):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
        if value:
            monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("NETRC", str(path))
    monkeypatch.setattr(loggers, "unreachable", lambda url, seconds: None)
    assert loggers.RunWandbLogger(tmp_path, "id").is_offline is offline


@pytest.mark.parametrize("is_silent", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_run_continues_offline(
    is_silent: bool, program: Program, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server that accepts connections and never answers, or accepts none."""
    assert loggers.WAIT_SECONDS <= 10  # twice: for a connection, and for an answer
    monkeypatch.setattr(loggers, "WAIT_SECONDS", 1.0)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if is_silent:
            server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", url)
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
        monkeypatch.delenv("WANDB_MODE", raising=False)
        started = time.perf_counter()
        ended = program("train.py", SMALL, TEXT, "logger=wandb hydra.run.dir=run")
    assert ended.code == 0, ended.err
    assert time.perf_counter() - started < 60
    assert ended.out.count("the run is logged offline.") == 1
    assert f"{url} cannot be reached (" in ended.out
    assert list(Path("run/wandb").glob("offline-run-*/run-*.wandb"))


def logged(run: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The configuration and the summary of the newest run of a folder, and all that wandb stores of it as text."""
    (file,) = (run / "wandb/latest-run").resolve().glob("run-*.wandb")
    config, summary = read_config_and_summary(file)
    return config, summary, file.read_text(errors="replace")


@pytest.mark.slow
def test_a_sweep_and_a_resumed_run_log_theirs_without_paths_and_secrets(
    program: Program, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_mine")
    own = f"data.files={book} logger=wandb logger.tags=[hf_of_mine] hydra.sweep.dir={Path.cwd() / 'sweep'}"
    assert program("train.py", "-m", SMALL, TEXT, own, "seed=3,4").code == 0
    for job, seed in enumerate((3, 4)):
        config, summary, text = logged(Path(f"sweep/{job}"))
        assert (config["seed"], config["data"]["files"], config["logger"]["tags"]) == (seed, "book.txt", ["…"])
        assert config["costs"]["num_parameters"] == summary["num_parameters"]
        assert str(book.parent) not in text
        assert results_of(f"sweep/{job}").items() <= summary.items()
    ended = program("train.py", f"resume={Path.cwd() / 'sweep/0'} trainer.max_steps=6 optimizer.lr=0.5")
    assert ended.code == 0, ended.err
    config, summary, text = logged(Path("sweep/0"))
    assert (config["trainer"]["max_steps"], config["optimizer"]["lr"], summary["steps"]) == (6, 0.5, 6)
    assert (config["resume"], config["seed"]) == ("0", 3)
    assert results_of("sweep/0").items() <= summary.items()


def test_a_value_of_a_variable_is_neither_stored_nor_sent(
    program: Program, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is called, and also where another key takes it; typed by the shell, or within another text."""
    monkeypatch.setenv("SIZE", "16")
    monkeypatch.setenv("MINE", "the cat sees me")
    own = [
        "model.d_model=${oc.decode:${oc.env:SIZE}}",
        "generate.prompt=${oc.env:MINE}",
        "logger.tags=[the cat sees me]",
    ]
    words = [*SMALL.split(), *TEXT.split(), "callbacks.attention=null", "logger=wandb", "hydra.run.dir=run", *own]
    ran(program, "train.py", *words, split=False)
    typed = Path("run/.hydra/overrides.yaml").read_text()
    assert "the cat" not in typed.replace(own[2], "")
    assert all(f"${{oc.env:{name}}}" in typed for name in ("SIZE", "MINE"))
    config, summary, _ = logged(Path("run"))
    size = "${oc.decode:${oc.env:SIZE}}"
    assert (config["model"]["d_model"], config["attention"]["d_model"], config["model"]["num_heads"]) == (size, size, 2)
    assert (config["generate"]["prompt"], config["logger"]["tags"]) == ("${oc.env:MINE}", ["…"])
    assert (summary["sample"], config["norm"]["_target_"]) == ("…", "tinyformer.nn.LayerNorm")


def test_a_copy_of_a_run_is_another_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    node = OmegaConf.create({"_target_": "tinyformer.training.RunWandbLogger"})

    def id_of(name: str) -> str | int | None:
        return make_loggers(node, tmp_path / name)[1].version

    run = id_of("run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert (id_of("run"), id_of("link")) == (run, run)
    assert run != (copy := id_of("copy")) == id_of("copy")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert id_of("run") not in (run, copy)  # a new run, in the place of the one that was moved
    assert (id_of("moved"), id_of("moved")) == (run, run)


# Overrides drawn at random: a run, or one sentence, within a minute.

NUMBER, BLOCK, LIMIT_SECONDS = 2000, 100, 60

SANE = "0 1 2 3 4 8 16 0.1 0.5 1.0 true false null auto"
HOSTILE = """
    -1 1e30 -1e30 1e-30 inf -inf nan abc '' [] {} [1,2] [[0]] {a:1} 1.5 1000000000000000000 100000
    00:00:00:00 '${model.d_model}' '${nope}' mine.Nope torch.nn.Linear é a/b [null] [abc]
"""
UNBOUNDED = ("max_steps", "max_epochs", "num_tokens", "max_seq_len", "_sequences", "num_windows")
"""Keys whose large values mean a long run."""

OUTSIDE = ("hydra", "trainer.devices", "trainer.num_nodes")
"""Keys that start other processes, or wait for other machines."""

BASES = (
    "data=text data.files=book.txt tokenizer=char",
    "data=text data.files=book.txt tokenizer=byte task=masked_lm",
    "data=text data.files=reviews.csv data.label_column=label tokenizer=byte task=classification",
    "data=induction data.seq_len=16 data.max_period=4",
)


def drawn_override(draw: random.Random) -> str:
    """A change, of any key or of the choice of any group."""
    if draw.random() < 1 / 3:
        files = sorted(config_dir().glob("*/[!_]*.yaml"))
        chosen = draw.choice([file for file in files if file.parent.name not in ("experiment", "analysis")])
        return f"{chosen.parent.name}={chosen.stem}"
    key = draw.choice([key for key in values_of_keys() if not key.startswith(OUTSIDE)])
    values = SANE if draw.random() < 1 / 2 or any(name in key for name in UNBOUNDED) else HOSTILE
    return draw.choice(["", "", "", "", "++", "+", "~"]) + f"{key}={draw.choice(values.split())}"


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("seed", range(NUMBER // BLOCK))
def test_no_override_ends_in_a_traceback(seed: int, tmp_path: Path, book: Path, program: Program) -> None:
    register_resolvers()
    rows = (f"film {n} is {('dull', 'fine')[n % 2]},{n % 2}\n" for n in range(99))
    (tmp_path / "reviews.csv").write_text("text,label\n" + "".join(rows))
    draw, bad = random.Random(seed), []
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # what takes too long ends as after Ctrl-C
    for number in range(BLOCK):
        base, words = draw.choice(BASES), [drawn_override(draw) for _ in range(draw.choice([1, 1, 1, 2, 3]))]
        settings = f"{SMALL} {base} trainer.limit_val_batches=2 hydra.run.dir=run-{number}"
        signal.alarm(LIMIT_SECONDS)
        ended = program("train.py", *settings.split(), *words, split=False)
        signal.alarm(0)
        if ended.code not in (0, 2) or "Traceback" in ended.err:
            last = (ended.err.strip().splitlines() or ["nothing was said"])[-1]
            bad.append(f"{ended.code}, {base} {words}: {last[:200]}")
    assert not bad, "\n".join(bad)
