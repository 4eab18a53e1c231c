"""`tinyformer.load` of Hugging Face folders and of names on the Hub: an import in the cache."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hub_server import HubServer

import tinyformer
from interop.models import VOCAB, change_config, change_weights, model_of, saved, their_logits, tokens
from tinyformer.errors import ArgumentError


def test_a_folder_is_imported_once_and_again_after_an_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINYFORMER_CACHE", str(tmp_path / "cache"))
    folder = saved("gpt2", Path("owner/model"))  # a local folder wins over a name of the Hub
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda _: tinyformer.load("owner/model"), range(4)))
    for model in models:
        torch.testing.assert_close(model.logits(tokens()), their_logits(model_of("gpt2"), tokens()), atol=1e-5, rtol=0)
    (file,) = (tmp_path / "cache" / "imported" / "model").glob("*.ckpt")
    size = f"{file.stat().st_size / 1e6:,.1f} MB"
    assert capsys.readouterr().out == f"Imported owner/model to {file}, {size}; TINYFORMER_CACHE moves the cache.\n"
    change_config(folder, layer_norm_epsilon=0.1)
    other = tinyformer.load(folder).logits(tokens())
    assert not torch.allclose(other, models[0].logits(tokens()))
    change_weights(folder, **{"transformer.ln_f.bias": torch.ones(42)})
    assert not torch.allclose(tinyformer.load(folder).logits(tokens()), other)
    for name in ("owner/model", str(file)):
        with pytest.raises(
            ArgumentError, match=r"revision='step1': selects a commit of a model on the Hub, and .* is here"
        ):
            tinyformer.load(name, revision="step1")
    change_config(folder, model_type="bloom")
    with pytest.raises(ArgumentError, match=r"^checkpoint=.*: config.json says model_type=bloom; supported types "):
        tinyformer.load("owner/model")


LOADED = """
import json, sys, tinyformer
for arguments in json.loads(sys.argv[1]):
    try:
        print("LOADED", float(tinyformer.load(**arguments).network.readout.proj.weight.sum()))
    except tinyformer.errors.ArgumentError as error:
        print("REFUSED", error)
"""


@pytest.mark.slow
def test_a_name_of_the_hub_at_a_revision_with_and_without_a_network(tmp_path: Path) -> None:
    def files(*edits: float) -> dict[str, bytes]:
        for value in edits:
            change_weights(tmp_path / "model", **{"transformer.wte.weight": torch.full((VOCAB, 42), value)})
        return {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}

    saved("gpt2", tmp_path / "model")
    change_weights(tmp_path / "model", **{"lm_head.weight": None})
    main, step = files(1.0), files(2.0)
    names = {"models/owner/model": main, "models/owner/model@step1000": step, "models/owner/gated": main}
    model, one_step = {"checkpoint": "owner/model"}, {"checkpoint": "owner/model", "revision": "step1000"}
    unknown = [{"checkpoint": "owner/modle"}, model | {"revision": "step100"}, {"checkpoint": "owner/gated"}]
    with HubServer(names, gated="models/owner/gated") as hub:
        environment = hub.environment(tmp_path / "hf") | {"TINYFORMER_CACHE": str(tmp_path / "cache")}

        def loaded(*calls: dict[str, str]) -> list[str]:
            command = [sys.executable, "-c", LOADED, json.dumps(calls)]
            ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert ended.returncode == 0, ended.stderr
            return ended.stdout.splitlines()

        with ThreadPoolExecutor(2) as pool:  # two processes at once
            outs = list(pool.map(lambda _: loaded(model, one_step, model), range(2)))
        told = [line for out in outs for line in out if line.startswith("Imported")]
        values = [[line for line in out if line.startswith("LOADED")] for out in outs]
        assert values == [["LOADED 4074.0", "LOADED 8148.0", "LOADED 4074.0"]] * 2
        assert len(told) == 2, told
        modle, revision, gated = loaded(*unknown)
        assert modle.startswith(
            "REFUSED checkpoint='owner/modle': is no file or folder here, and the Hub has no such model"
        )
        assert modle.endswith("; owner has owner/model, owner/gated.")
        assert revision.startswith("REFUSED revision='step100': owner/model has no such commit")
        assert revision.endswith(": step1000, main.")
        assert "Cannot access gated repo for url http" in gated, gated
        hub.repositories["models/owner/model"] = files(3.0)
        assert loaded(model)[-1] == "LOADED 12222.0"
    assert loaded(model, one_step, unknown[0])[:2] == ["LOADED 12222.0", "LOADED 8148.0"]
    assert "the Hugging Face Hub cannot be reached" in loaded(unknown[0])[0]
