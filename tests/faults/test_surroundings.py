"""Weights & Biases without a network or a key, and what it is not told."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import SMALL, TEXT, Program, ran, results_of
from omegaconf import OmegaConf
from wandb_file import read_config_and_summary

from tinyformer.run.trainer import make_loggers
from tinyformer.training import loggers

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
    assert loggers.RunWandbLogger(tmp_path, "id").is_offline is offline


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
