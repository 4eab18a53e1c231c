"""Files of strangers run nothing: checkpoints and run folders that try to start a shell command."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from commands import ROOT, SMALL, TEXT, Program, Trained

import tinyformer
from tinyformer.checkpoint.file import load_raw
from tinyformer.checkpoint.format import write_raw
from tinyformer.config.admission import register_score
from tinyformer.errors import ArgumentError
from tinyformer.programs.compare import main as compare_runs
from tinyformer.programs.convert.conversion import export_model
from tinyformer.run import network


def require_refusal(program: Program, said: str, script: str, *words: str) -> str:
    """A program ends with an error that says something; what it says."""
    ended = program(script, *words)
    assert (ended.code, said in ended.err.replace("'", "")) == (2, True), ended.err
    return ended.err


RESUME = ("train.py", "resume=run trainer.max_steps=6")


def test_a_checkpoint_runs_nothing(program: Program, trained: Trained, book: Path) -> None:
    """By whichever way it is read; what else it may not say is in `tests/config/test_admission.py`."""
    raw = load_raw(trained.last)
    create = "{oc.create:{_target_: torch.utils.collect_env.run, _args_: ['touch it-ran']}}"
    raw["tinyformer"]["overrides"] |= {"x1": "$", "x2": create, "network._args_": ["${x1}${x2}"]}  # joined by Hydra
    write_raw(Path("evil.ckpt"), raw)
    for script, words in (
        ("evaluate.py", "checkpoint=evil.ckpt data.files=book.txt"),
        ("train.py", f"{SMALL} {TEXT} init_from=evil.ckpt hydra.run.dir=next"),
    ):
        require_refusal(program, f"Error: {words.split('evil')[0].split()[-1]}evil.ckpt: ", script, words)
    with pytest.raises(ArgumentError, match=r"^checkpoint='evil\.ckpt': "):
        tinyformer.load("evil.ckpt")
    with pytest.raises(ValueError, match=r"its |counterpart"):
        export_model(Path("evil.ckpt"), Path("exported"))
    assert not Path("it-ran").exists()


def test_the_overrides_of_a_run_folder_are_data(program: Program, trained: Trained, book: Path) -> None:
    shutil.copytree(trained.folder, "run")
    hydra = Path("run/.hydra")
    hydra.mkdir(exist_ok=True)
    stored = [*SMALL.split(), *TEXT.split()]
    evil = "+callbacks.e={_target_:torch.utils.collect_env.run,_args_:[touch it-ran]}"
    (hydra / "overrides.yaml").write_text(yaml.safe_dump([*stored, evil]))
    said = require_refusal(program, f"Error: resume=run: run/.hydra/overrides.yaml says {evil}", *RESUME)
    assert "if you trust it, add it to the command." in said
    assert not Path("it-ran").exists()
    (hydra / "overrides.yaml").write_text("!!python/object/apply:os.system [touch it-ran]")
    assert program(*RESUME).code == 1
    assert not Path("it-ran").exists()


LINKS = "wandb/run_id wandb/latest-run config.yaml .hydra/overrides.yaml.link checkpoints/last.ckpt.partial snapshots"


@pytest.mark.slow
def test_a_run_folder_with_links_is_refused(program: Program, trained: Trained, book: Path) -> None:
    assert program("train.py", SMALL, TEXT, "hydra.run.dir=run").code == 0
    Path("victim").write_text("mine")
    # wandb's own links, of which this one leads to the user's cache.
    Path("run/wandb/run-1/logs").mkdir(parents=True)
    Path("run/wandb/run-1/logs/debug-core.log").symlink_to(Path("victim").absolute())
    Path("run/wandb/debug-internal.log").symlink_to("run-1")
    assert "is a symbolic link" not in program("train.py", "resume=run trainer.max_steps=6").err
    for name in LINKS.split():
        Path("run", name).unlink(missing_ok=True)
        Path("run", name).symlink_to(Path("victim").absolute())
        require_refusal(program, "is a symbolic link", *RESUME)
        Path("run", name).unlink()
    # A folder for new files, which Hydra would write its own into.
    shutil.copytree(trained.folder, "planted")
    Path("planted/compare_val_loss.csv").symlink_to(Path("victim").absolute())
    shutil.rmtree("planted/checkpoints")
    for script, words in (
        ("train.py", f"{SMALL} {TEXT} hydra.run.dir=planted"),
        ("train.py", f"-m {SMALL} {TEXT} hydra.sweep.dir=planted"),
        ("evaluate.py", f"checkpoint={trained.last} data.files=book.txt hydra.run.dir=planted"),
    ):
        require_refusal(program, "planted/compare_val_loss.csv is a symbolic link", script, words)
    assert compare_runs(["planted"]) == 2
    assert Path("victim").read_text() == "mine"
    Path("run/wandb/run_id").write_text("../../elsewhere")
    longer = "resume=run trainer.max_steps=8 logger=wandb"
    require_refusal(program, "run/wandb/run_id contains no id of a wandb run", "train.py", longer)


@pytest.mark.slow
def test_a_state_of_another_shape_is_refused(program: Program, book: Path) -> None:
    """A fused kernel would read and write past its end."""
    assert program("train.py", SMALL, TEXT, "optimizer=adamw hydra.run.dir=run").code == 0
    last = Path("run/checkpoints/last.ckpt")
    raw = load_raw(last)
    raw["optimizer_states"][0]["state"][0]["exp_avg"] = torch.zeros(3)
    write_raw(last, raw)
    said = require_refusal(
        program, "Error: resume=run: the optimizer, trainer and callbacks must be the same as in", *RESUME
    )
    assert "exp_avg does not fit a parameter" in said


def test_a_score_is_imported_by_its_own_name_alone() -> None:
    """Hydra resolves nodes in place when it makes others, so that a reference looks like a name afterwards."""
    register_score({"attention": {"score": "${evil}"}, "evil": "no_such_package.Score"})
    with pytest.raises(ArgumentError, match="of a subclass of"):
        register_score({"attention": {"score": "no_such_package.Score"}})


def test_a_run_starts_from_no_sizes_that_the_weights_lack(
    program: Program, trained: Trained, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = load_raw(trained.last)
    raw["tinyformer"]["overrides"] |= {"attention.head_dim": 2**20, "model.num_heads": 8}
    write_raw(Path("large.ckpt"), raw)
    monkeypatch.setattr(network.L, "seed_everything", None)  # which would allocate them
    words = f"init_from=large.ckpt {TEXT} trainer.max_steps=2 trainer.precision=32-true"
    require_refusal(program, "init_from=large.ckpt: ", "train.py", words)


@pytest.mark.slow
def test_a_strangers_repository_and_settings_are_not_read(program: Program, book: Path, tmp_path: Path) -> None:
    """In a Git repository whose configuration names a command; resumed within the run, by a user who saves code."""
    assert program("train.py", SMALL, TEXT, "logger=wandb hydra.run.dir=run").code == 0
    commit = "git init && git add book.txt && git -c user.name=a -c user.email=a@b commit -m first"
    configure = f"git config diff.external 'touch {tmp_path / 'mark'}; true'"
    change = "echo changed >> book.txt && git diff"
    subprocess.run(f"{commit} && {configure} && {change}", shell=True, check=True, capture_output=True)
    (tmp_path / "mark").unlink()  # which Git's own command makes
    Path("run/wandb/settings").write_text(
        "[default]\nbase_url = http://127.0.0.1:1\nproject = theirs\nsave_code = true\n"
    )
    Path("run/config-defaults.yaml").write_text("a: '")
    Path("run/book.txt").write_text(book.read_text().removesuffix("changed\n"))
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SAVE_CODE": "true", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "train.py"), "resume=.", "trainer.max_steps=6"]
    ended = subprocess.run(command, cwd="run", env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "mark").exists()
    (newest,) = Path("run/wandb/latest-run").resolve().glob("*.wandb")
    assert b"theirs" not in newest.read_bytes()
