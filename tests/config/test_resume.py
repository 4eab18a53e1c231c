"""`resume=RUN` becomes the run's own command line."""

import os

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from tinyformer.config.folder import is_first_process
from tinyformer.config.resume import expand_resume


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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
def test_saved_overrides_come_before_new_ones(tmp_path, saved, arguments, expanded):
    make_run(tmp_path / "run", saved)
    for unchanged in ([], ["a=1", "-m"], ["resume=null"], ["resume="]):
        assert expand_resume(unchanged) == unchanged
    assert expand_resume(arguments) == [*expanded, "hydra.run.dir='run'", "hydra.output_subdir=null"]


@pytest.mark.parametrize("name", ["a run", "a{b}", "$x, it's", 'end "x"\\', "a\\\\'b"])
def test_paths_are_quoted_as_hydra_reads_them(tmp_path, name):
    make_run(tmp_path / name)
    (run_dir,) = [word for word in expand_resume([f"resume={name}"]) if word.startswith("hydra.run.dir=")]
    assert OverridesParser.create().parse_override(run_dir).value() == name


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^resume=none: the folder does not exist\.$"):
        expand_resume(["resume=none"])
    make_run(tmp_path / "outputs" / "2026-01-30" / "12-00-00")
    make_run(tmp_path / "outputs" / "2026-01-31" / "11-00-00")
    newest = os.path.join("outputs", "2026-01-31", "11-00-00")
    with pytest.raises(ValueError, match=rf"does not exist\. The newest run is resume={newest}\.$"):
        expand_resume(["resume=none"])
    for part, message in {
        "checkpoint": r"the folder contains no run; .*outputs/",
        "overrides": "wrote a checkpoint",
    }.items():
        make_run(tmp_path / part, parts=[part])
        with pytest.raises(ValueError, match=rf"^resume={part}: .*{message}"):
            expand_resume([f"resume={part}"])


RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")


@pytest.mark.parametrize(
    ("ranks", "is_first"),
    [("", True), ("0 0", True), ("1 0 0", False), ("0 2", False), ("- 0 1", False), ("- - - 3", False)],
)
def test_one_process_of_a_run_writes(ranks, is_first, monkeypatch):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, rank in zip(RANKS, ranks.split(), strict=False):
        if rank != "-":
            monkeypatch.setenv(name, rank)
    assert is_first_process() is is_first
