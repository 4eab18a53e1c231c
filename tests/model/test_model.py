"""`tinyformer.load`: a checkpoint as a model in Python."""

import subprocess
import sys
import time

import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models

import tinyformer
from tinyformer.checkpoint.file import Checkpoint, save_network
from tinyformer.config.admission import describe_config
from tinyformer.config.compose import compose_run
from tinyformer.data import ByteTokenizer, CharTokenizer, TextTokenizer
from tinyformer.errors import ArgumentError
from tinyformer.generation.sampling import Sampling
from tinyformer.nn import AttentionMask
from tinyformer.run.parts import make_network

TINY = (
    *("model.num_layers=2", "model.num_heads=4", "model.d_model=32", "model.max_seq_len=24", "model.init_std=0.3"),
    *("attention=gqa", "position=rotary"),
)
BYTES = ByteTokenizer().build([])
TEXTS = ["The cat", "", "x", "naïve Ελ 中", "👋🏽 wave", "a" * 23]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Writes a checkpoint with random weights, as a run with these overrides would."""

    def write(*overrides, tokenizer=BYTES, change=lambda config: None):
        run, invocation = compose_run("train", [*TINY, *overrides])
        config = OmegaConf.to_container(run, resolve=False)
        change(config)
        torch.manual_seed(0)
        network = make_network(OmegaConf.create(config), tokenizer)
        path = tmp_path_factory.mktemp("run") / "last.ckpt"
        run = Checkpoint(path, {}, {}, tokenizer.to_json(), {}, step=1)
        save_network(path, network, run, describe_config(config, invocation.choices))
        return path

    return write


@pytest.fixture(scope="module")
def paths(store):
    labels = {"labels": ["no", "yes", "maybe"]}
    return {
        "causal": store("attention.window=[5,null]"),
        "masked": store("task=masked_lm", tokenizer=BYTES.with_mask()),
        "classifier": store("task=classification", change=lambda config: config["task"].update(labels)),
    }


@pytest.fixture(scope="module")
def model(paths):
    return tinyformer.load(paths["causal"])


def test_texts_start_with_a_token_and_are_padded_on_the_right(model):
    tokens, lengths = model.tokenize(["ab", "", "👋"])
    assert lengths.tolist() == [3, 1, 5]
    assert tokens.tolist() == [[256, 97, 98, 256, 256], [256] * 5, [256, 240, 159, 145, 139]]
    ids = tokens[:, 1:]
    assert torch.equal(model.tokenize(ids)[0], ids)  # token ids are used as they are
    assert torch.equal(model.logits(ids.int()), model.logits(ids))
    assert torch.equal(model.encode("cat"), model.encode(["cat"]))


def test_special_tokens_can_be_spelled_out_and_a_classifier_reads_pairs(paths):
    masked, classifier = tinyformer.load(paths["masked"]), tinyformer.load(paths["classifier"])
    assert masked.attention("a <mask>").tokens == ["<eos>", "a", "·", "<mask>"]
    assert masked.tokenizer.encode("<mask>") == [*b"<mask>"]  # of data, which hold no special token
    only = torch.tensor([[256, 97, 257]])
    nats = torch.nn.functional.cross_entropy(masked.logits(torch.tensor([[256, 257, 257]]))[0, 1:2], only[0, 1:2])
    torch.testing.assert_close(masked.loss("a<mask>")[0], nats)  # what is masked already has no target
    pair, ids = [("ab", "c")], torch.tensor([[256, 97, 98, 256, 99]])
    assert torch.equal(classifier.tokenize([*pair, "d"])[0][0], ids[0])
    torch.testing.assert_close(classifier.loss(pair, ["no"]), classifier.loss(ids, ["no"]))
    assert classifier.attention(pair)[0].tokens == ["<eos>", "a", "b", "<eos>", "c"]
    for num_texts, texts in ((1, pair), (2, "d"), (2, ("ab", "c")), (None, [("ab", "c", "d")])):
        classifier.task.num_texts = num_texts
        with pytest.raises(ArgumentError, match=r"^texts=.* of shape \(batch, seq\); texts=.* works\.$") as raised:
            classifier.logits(texts)
        assert classifier.logits(raised.value.works["texts"]).shape[1] == 3


def test_an_id_without_a_token_is_never_generated(store, monkeypatch):
    words = Tokenizer(models.WordLevel({"a": 0, "b": 5, "</s>": 9, "<unk>": 11}, unk_token="<unk>"))
    tokenizer, drawn, draw = TextTokenizer(words), set(), Sampling.draw
    known = {*words.get_vocab().values()}

    def record(self, *scores):
        tokens = draw(self, *scores)
        drawn.update(tokens.tolist())
        return tokens

    monkeypatch.setattr(Sampling, "draw", record)
    causal = tinyformer.load(store("model.vocab_size=512", tokenizer=tokenizer))
    for settings in ({"temperature": 0}, {"temperature": 2.0}, {"top_k": 300}, {"top_p": 0.99}):
        causal.generate(["a"] * 20, 9, **settings)
    assert 1 < len(drawn & known) == len(drawn)
    translator = tinyformer.load(store("task=seq2seq", "model.vocab_size=512", tokenizer=tokenizer))
    ids = torch.tensor([[token, other, 9] for token in known for other in known])
    for beams in (1, 20):
        assert {token for target in translator.generate_ids(ids, beams=beams) for token in target} <= known


EAGER_TO_FLEX = [("causal", backend) for backend in ("eager", "sdpa", "flash", "flex")]


@pytest.mark.parametrize(("kind", "backend"), [("masked", "auto"), ("classifier", "auto"), *EAGER_TO_FLEX])
def test_results_are_those_of_each_text_alone_under_the_mask_of_the_task(paths, kind, backend):
    model = tinyformer.load(paths[kind], backend=backend)
    vectors, logits, (tokens, lengths) = model.encode(TEXTS), model.logits(TEXTS), model.tokenize(TEXTS)
    assert vectors.shape == (6, 24, 32)
    assert logits.shape == {"causal": (6, 24, 257), "masked": (6, 24, 258), "classifier": (6, 3)}[kind]
    for row, length in enumerate(lengths.tolist()):
        alone = tokens[row : row + 1, :length], AttentionMask(causal=kind == "causal")
        with torch.no_grad():
            expected, scores = model.network.encoder(*alone)[0], model.network(*alone)[0]
        torch.testing.assert_close(vectors[row, :length], expected, atol=1e-5, rtol=1e-5)
        assert (vectors[row, length:] == 0).all()
        torch.testing.assert_close(logits[row][: len(scores)], scores, atol=1e-5, rtol=1e-5)
        assert kind == "classifier" or (logits[row, length:] == 0).all()
    assert not vectors.requires_grad


def test_loading_and_generating_leave_random_numbers_alone(paths):
    state = torch.get_rng_state()
    model = tinyformer.load(str(paths["causal"]))
    model.generate(["a"], num_tokens=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.network.training
    assert f"{paths['causal'].name}, step 1" in repr(model)


def test_unknown_characters_stay_in_the_prompt(store):
    model = tinyformer.load(store(tokenizer=CharTokenizer().build(["abc "])))
    assert model.tokenize(["a👋b"])[0].tolist() == [[1, 3, 0, 4]]
    first, second = model.generate(["a👋b", "a👋b"], num_tokens=20)
    assert first.startswith("a👋b")
    assert first != second  # each has a seed of its own
    assert model.generate([], num_tokens=8) == []


def test_a_text_ends_where_its_document_ends(store):
    """`<eos>` is made the most probable token."""
    model = tinyformer.load(store())
    model.network.readout.proj.weight = torch.nn.Parameter(torch.zeros(257, 32))
    model.network.readout.proj.weight.data[256] = model.encode(["ab"])[0, -1]
    assert model.generate(["ab"], num_tokens=8, temperature=0) == ["ab"]


def test_a_checkpoint_uses_only_classes_that_are_trusted(store):
    path = store(change=lambda config: config["norm"].update(_target_="torch.nn.LayerNorm"))
    with pytest.raises(ArgumentError, match=r"^checkpoint=.*'torch\.nn\.LayerNorm', .*name it in trusted\.$"):
        tinyformer.load(path)
    assert tinyformer.load(path, trusted=["torch.nn.LayerNorm"]).encode(["a"]).shape == (1, 2, 32)


def test_importing_the_package_does_not_import_torch():
    code = "import sys, tinyformer; assert 'torch' not in sys.modules; tinyformer.lod"
    start = time.perf_counter()
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert time.perf_counter() - start < 2
    assert "No tinyformer attribute lod. Did you mean: 'load'?" in ended.stderr
    assert {"Model", "load"} <= set(dir(tinyformer))
