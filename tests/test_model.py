"""`tinyformer.load`: a checkpoint as a model in Python."""

import subprocess
import sys
import time

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from programs import ROOT
from torch.nn.attention import flex_attention

import tinyformer
from tinyformer.app.build import make_network
from tinyformer.app.config import register_resolvers
from tinyformer.checkpoint import KEY
from tinyformer.data import ByteTokenizer, CharTokenizer

TINY = (
    *("model.num_layers=2", "model.num_heads=4", "model.d_model=32", "model.max_seq_len=24", "model.init_std=0.3"),
    *("attention=gqa", "position=rotary"),
)
TEXTS = ["The cat", "", "x", "naïve Ελ 中", "👋🏽 wave", "a" * 23]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Writes a checkpoint with random weights, as a run with these overrides would."""
    register_resolvers(ROOT / "conf")
    numbers = iter(range(1000))

    def write(*overrides, tokenizer=None, dtype=torch.float32, change=lambda config: None):
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(ROOT / "conf"), version_base=None):
            config = OmegaConf.to_container(compose("train", overrides=[*TINY, *overrides]), resolve=False)
        change(config)
        tokenizer = tokenizer or ByteTokenizer().build([])
        torch.manual_seed(0)
        weights = make_network(OmegaConf.create(config), tokenizer).to(dtype).state_dict()
        contents = {"config": config, "tokenizer": tokenizer.to_json(), "facts": {}}
        path = tmp_path_factory.mktemp("run") / f"{next(numbers)}.ckpt"
        state = {f"network.{name}": tensor for name, tensor in weights.items()}
        torch.save({"state_dict": state, "global_step": 1, KEY: contents}, path)
        return path

    return write


@pytest.fixture(scope="module")
def paths(store):
    return {
        "causal": store("attention.window=[5,null]"),
        "masked": store("task=masked_lm", tokenizer=ByteTokenizer().build([]).with_mask()),
        "classifier": store(
            "task=classification", change=lambda config: config["task"].update(labels=["no", "yes", "maybe"])
        ),
    }


@pytest.fixture(scope="module")
def model(paths):
    return tinyformer.load(paths["causal"])


# What it gives.


def test_tokens_begin_with_the_one_that_begins_a_text_and_are_padded_at_the_right(model):
    tokens, lengths = model.tokenize(["ab", "", "👋"])
    assert lengths.tolist() == [3, 1, 5]
    assert tokens.tolist() == [[256, 97, 98, 256, 256], [256] * 5, [256, 240, 159, 145, 139]]


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa", "flash", "flex"])
@pytest.mark.parametrize("kind", ["causal", "masked", "classifier"])
def test_padding_changes_nothing(paths, kind, backend, monkeypatch):
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # see tests/nn/conftest.py
    model = tinyformer.load(paths[kind], backend=backend)
    vectors, scores, (_, lengths) = model.encode(TEXTS), model.logits(TEXTS), model.tokenize(TEXTS)
    assert vectors.shape == (6, 24, 32)
    assert scores.shape == {"causal": (6, 24, 257), "masked": (6, 24, 258), "classifier": (6, 3)}[kind]
    for index, (text, length) in enumerate(zip(TEXTS, lengths.tolist(), strict=True)):
        torch.testing.assert_close(vectors[index, :length], model.encode([text])[0], atol=1e-5, rtol=1e-5)
        assert (vectors[index, length:] == 0).all()
        own = model.logits([text])[0]
        torch.testing.assert_close(scores[index, : len(own)], own, atol=1e-5, rtol=1e-5)
        assert kind == "classifier" or (scores[index, length:] == 0).all()
    assert not vectors.requires_grad


def test_they_are_those_of_the_network(paths, model):
    raw = torch.load(paths["causal"], weights_only=True)["state_dict"]
    assert {f"network.{name}" for name in model.network.state_dict()} == set(raw)
    tokens, _ = model.tokenize(["The cat"])
    mask = tinyformer.nn.AttentionMask(causal=True)
    with torch.no_grad():
        torch.testing.assert_close(model.encode(["The cat"]), model.network.encoder(tokens, mask))
        torch.testing.assert_close(model.logits(["The cat"]), model.network(tokens, mask))
    both = tinyformer.load(paths["masked"])
    with torch.no_grad():
        torch.testing.assert_close(both.encode(["The cat"]), both.network.encoder(tokens))


def test_token_ids_are_taken_as_they_are(model):
    tokens, _ = model.tokenize(["The cat"])
    assert torch.equal(model.encode(tokens), model.encode(["The cat"]))
    assert torch.equal(model.logits(tokens[:, 1:].int()), model.logits(tokens[:, 1:]))
    assert model.tokenize(tokens[:, 1:])[1].tolist() == [7]


def test_one_text_is_a_batch_of_one(model):
    assert torch.equal(model.encode("cat"), model.encode(["cat"]))
    assert model.generate("cat", num_tokens=5) == model.generate(["cat"], num_tokens=5)


def test_the_weights_keep_their_dtype(store):
    model = tinyformer.load(store(dtype=torch.bfloat16))
    assert model.encode(["cat"]).dtype == model.logits(["cat"]).dtype == torch.bfloat16
    assert model.generate(["cat"], num_tokens=4)[0].startswith("cat")


def test_nothing_outside_is_changed(paths):
    state = torch.get_rng_state()
    model = tinyformer.load(str(paths["causal"]))
    model.generate(["a"], num_tokens=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.network.training


def test_characters_that_are_unknown(store):
    model = tinyformer.load(store(tokenizer=CharTokenizer().build(["abc "])))
    assert model.tokenize(["a👋b"])[0].tolist() == [[1, 3, 0, 4]]
    assert model.generate(["a👋b"], num_tokens=3)[0].startswith("a👋b")


# Text.


def test_a_text_goes_on_from_its_prompt_as_if_alone(model):
    prompts = ["The cat", "", "👋🏽", "a long prompt, longer than what fits"]
    for settings in ({"temperature": 0}, {"top_p": 0.9, "temperature": 1.5}):
        texts = model.generate(prompts, num_tokens=6, seed=2, **settings)
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            assert text.startswith(prompt)
            assert [text] == model.generate([prompt], num_tokens=6, seed=2 + index, **settings)
    assert model.generate([], num_tokens=8) == []
    assert model.generate(["a", "a"], num_tokens=8)[0] != model.generate(["a", "a"], num_tokens=8)[1]


def test_another_document_is_another_text(store):
    """`<eos>` is the likeliest token of all."""
    path = store()
    model = tinyformer.load(path)
    model.network.readout.proj.weight = torch.nn.Parameter(torch.zeros(257, 32))
    model.network.readout.proj.weight.data[256] = model.encode(["ab"])[0, -1]
    assert model.generate(["ab"], num_tokens=8, temperature=0) == ["ab"]


@pytest.mark.parametrize(("kind", "task"), [("masked", "MaskedLM"), ("classifier", "Classification")])
def test_what_sees_both_sides_goes_on_from_nothing(paths, kind, task):
    with pytest.raises(ValueError, match=rf"^A model of {task} .*; one trained with task=causal_lm does\.$"):
        tinyformer.load(paths[kind]).generate(["a"])


# Mistakes.


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a", "b" * 24], r"^texts\[1\] has 25 tokens; from 1 to model\.max_seq_len=24 work, the one that begins"),
        (torch.zeros(2, 25, dtype=torch.long), r"^texts\[0\] has 25 tokens"),
        (torch.zeros(2, 0, dtype=torch.long), r"^texts\[0\] has 0 tokens"),
        ([], r"^texts has to be a text, a list of one or more, or a tensor"),
        (torch.zeros(3, dtype=torch.long), r"int64 and shape \[3\]; token ids are whole numbers, batch seq\.$"),
        (torch.zeros(2, 3), r"float32 and shape \[2, 3\]"),
        (torch.zeros(0, 3, dtype=torch.long), r"shape \[0, 3\]"),
        (torch.tensor([[3, 257]]), r"^texts holds token ids from 3 to 257; the model has 0 to 256\.$"),
        (torch.tensor([[-1, 5]]), r"^texts holds token ids from -1 to 5; "),
    ],
    ids=str,
)
def test_texts_that_are_none(model, texts, message):
    for method in (model.encode, model.logits, model.tokenize):
        with pytest.raises(ValueError, match=message):
            method(texts)


@pytest.mark.parametrize("texts", [["a", 3], [[1, 2]], [None], 3.5], ids=str)
def test_what_is_neither_text_nor_tensor(model, texts):
    with pytest.raises(ValueError, match=r"^texts has to be a text, a list of one or more, or a tensor"):
        model._rows(texts)  # which takes anything; elsewhere the tests' type checker is faster


def test_settings_out_of_range(model):
    with pytest.raises(ValueError, match="top_p=2"):
        model.generate(["a"], top_p=2)
    with pytest.raises(ValueError, match="num_tokens=-1"):
        model.generate(["a"], num_tokens=-1)


def test_files_that_are_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint=\S+none.ckpt is no file"):
        tinyformer.load(tmp_path / "none.ckpt")


def test_a_backend_that_cannot(paths):
    with pytest.raises(ValueError, match=r"^attention.backend=fast: choose one of auto, eager"):
        tinyformer.load(paths["causal"], backend="fast")


def test_a_device_that_is_not_there(paths):
    if torch.cuda.is_available():
        pytest.skip("CUDA is there")
    with pytest.raises(ValueError, match=r"^device=cuda: .*; device=cpu works"):
        tinyformer.load(paths["causal"], device="cuda")


def test_a_checkpoint_calls_what_the_user_names_and_nothing_else(store):
    path = store(change=lambda config: config["norm"].update(_target_="torch.nn.LayerNorm"))
    with pytest.raises(ValueError, match=r"'torch\.nn\.LayerNorm', .* load\(…, trusted=\['torch\.nn\.LayerNorm'\]\)"):
        tinyformer.load(path)
    assert tinyformer.load(path, trusted=["torch.nn.LayerNorm"]).encode(["a"]).shape == (1, 2, 32)
    computed = store(change=lambda config: config.update(seed="${oc.create:{_target_:os.system}}"))
    with pytest.raises(ValueError, match="wants to compute"):
        tinyformer.load(computed, trusted=["torch.nn.LayerNorm"])


# Importing.


def test_the_package_alone_is_imported_at_once():
    code = "import sys, tinyformer; assert 'torch' not in sys.modules; tinyformer.lod"
    start = time.perf_counter()
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert time.perf_counter() - start < 2
    assert "module 'tinyformer' has no attribute 'lod'. Did you mean: 'load'?" in ended.stderr


def test_the_package_names_what_it_has():
    assert tinyformer.load.__module__ == "tinyformer.model"
    assert {"Model", "load"} <= set(dir(tinyformer))
