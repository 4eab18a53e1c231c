"""`tinyformer.load` and the methods of a model in Python."""

import shutil
from pathlib import Path

import pytest
import torch
from analysis.contexts import loud_transformer
from commands import BOOK, Trained
from interop.models import VOCAB, our_checkpoint, tokens
from tokenizers import Tokenizer, models

import tinyformer
from model.models import causal, classifier, masked, model, translator
from tinyformer.checkpoint.file import load_raw
from tinyformer.checkpoint.format import KEY, write_raw
from tinyformer.data import TextTokenizer
from tinyformer.errors import ArgumentError
from tinyformer.generation.generation import Sampling
from tinyformer.model.model import Model
from tinyformer.nn import AttentionMask
from tinyformer.tasks import CausalLM


def test_texts_start_with_a_token_and_are_padded_on_the_right():
    some = model()
    tokens, lengths = some.tokenize(["ab", "", "👋"])
    assert lengths.tolist() == [3, 1, 5]
    assert tokens.tolist() == [[256, 97, 98, 256, 256], [256] * 5, [256, 240, 159, 145, 139]]
    ids = tokens[:, 1:]
    assert torch.equal(some.tokenize(ids)[0], ids)  # token ids are used as they are
    assert torch.equal(some.logits(ids.int()), some.logits(ids))
    assert torch.equal(some.encode("cat"), some.encode(["cat"]))


def test_special_tokens_can_be_spelled_out_and_a_classifier_reads_pairs():
    masked_lm, pairs = masked(), classifier()
    assert masked_lm.attention("a <mask>").tokens == ["<eos>", "a", "·", "<mask>"]
    assert masked_lm.tokenizer.encode("<mask>") == [*b"<mask>"]  # of data, which hold no special token
    logits = masked_lm.logits(torch.tensor([[256, 257, 257]]))[0, 1:2]
    nats = torch.nn.functional.cross_entropy(logits, torch.tensor([97]))
    torch.testing.assert_close(masked_lm.loss("a<mask>")[0], nats)  # what is masked already has no target
    pair, eos, (a, b, c) = [("ab", "c")], pairs.tokenizer.eos_id, pairs.tokenizer.encode("abc")
    ids = torch.tensor([[eos, a, b, eos, c]])
    assert torch.equal(pairs.tokenize([*pair, "d"])[0][0], ids[0])
    torch.testing.assert_close(pairs.loss(pair, ["no"]), pairs.loss(ids, ["no"]))
    assert pairs.attention(pair)[0].tokens == ["<eos>", "a", "b", "<eos>", "c"]
    for num_texts, texts in ((1, pair), (2, "d"), (2, ("ab", "c")), (None, [("ab", "c", "d")])):
        pairs.task.num_texts = num_texts
        with pytest.raises(ArgumentError, match=r"^texts=.* of shape \(batch, seq\); texts=.* works\.$") as raised:
            pairs.logits(texts)
        assert pairs.logits(raised.value.works["texts"]).shape[1] == 3


def test_an_id_without_a_token_is_never_generated(monkeypatch):
    words = Tokenizer(models.WordLevel({"a": 0, "b": 5, "</s>": 9, "<unk>": 11}, unk_token="<unk>"))
    tokenizer, drawn, draw = TextTokenizer(words), set(), Sampling.draw
    known = {*words.get_vocab().values()}

    def record(self, *scores):
        tokens = draw(self, *scores)
        drawn.update(tokens.tolist())
        return tokens

    monkeypatch.setattr(Sampling, "draw", record)
    some = Model(loud_transformer(vocab_size=512), tokenizer, CausalLM())
    for settings in ({"temperature": 0}, {"temperature": 2.0}, {"top_k": 300}, {"top_p": 0.99}):
        some.generate(["a"] * 20, 9, **settings)
    assert 1 < len(drawn & known) == len(drawn)
    pairs = translator(tokenizer, vocab_size=512)
    ids = torch.tensor([[token, other, 9] for token in known for other in known])
    for beams in (1, 20):
        assert {token for target in pairs.generate_ids(ids, beams=beams) for token in target} <= known


@pytest.mark.parametrize("name", ["gqa+alibi+window", "mla", "differential"])
def test_interventions_in_generation_are_those_of_one_pass_over_all_tokens(name):
    some, prompts, stream = model(name), ["the cat", "ab"], "layers.1.residual_post"
    replace = dict.fromkeys((stream, "layers.1.attention.values", "layers.1.attention.weights"), lambda x: -2 * x)
    texts = some.generate(prompts, 6, temperature=0, replace=replace, capture=stream)
    for text, prompt, passes in zip(texts, prompts, texts.activations, strict=True):
        ids = some.tokenize(prompt)[0]
        for _ in range(6):
            logits, found = some.run(ids, replace=replace, capture=stream)
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        torch.testing.assert_close(torch.cat(passes[stream], dim=1), found[stream], atol=1e-4, rtol=1e-4)
        assert (text, len(passes[stream])) == (some.tokenizer.decode(ids[0, 1:]), 6)


def test_a_prompt_is_continued_several_times():
    some, settings = causal(), {"num_return_sequences": 3, "seed": 4, "num_tokens": 5}
    three = some.generate(["ab", "c"], **settings)
    assert three[4:5] == some.generate("c", 5, seed=8)
    assert some.generate(["ab", "c"], capture="*", num_tokens=0).activations == [{}, {}]
    assert three == some.generate(["ab", "c"], replace={"logits": lambda x: x}, **settings)
    rows = some.generate_ids(*some.tokenize(["ab", "c"]), **settings)
    assert [some.tokenizer.decode(row[1:]) for row in rows] == three


@pytest.mark.parametrize("make", [causal, masked, classifier])
def test_results_are_those_of_each_text_alone_under_the_mask_of_the_task(make):
    some, texts = make(), ["The cat", "", "x", "a" * 15]
    vectors, logits, (tokens, lengths) = some.encode(texts), some.logits(texts), some.tokenize(texts)
    assert vectors.shape[1:] == (16, 32)
    for row, length in enumerate(lengths.tolist()):
        alone = tokens[row : row + 1, :length], AttentionMask(causal=make is causal)
        with torch.no_grad():
            expected, scores = some.network.encoder(*alone)[0], some.network(*alone)[0]
        torch.testing.assert_close(vectors[row, :length], expected, atol=1e-5, rtol=1e-5)
        assert (vectors[row, length:] == 0).all()
        torch.testing.assert_close(logits[row][: len(scores)], scores, atol=1e-5, rtol=1e-5)
        assert make is classifier or (logits[row, length:] == 0).all()
    assert not vectors.requires_grad


def test_loading_and_generating_leave_random_numbers_alone(trained: Trained):
    state = torch.get_rng_state()
    loaded = tinyformer.load(str(trained.last))
    loaded.generate(["a"], num_tokens=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert not loaded.network.training


def test_a_text_ends_where_its_document_ends():
    some = model()
    vector = some.encode(["ab"])[0, -1]
    some.network.readout.proj.weight.data.zero_()[256] = vector  # `<eos>` is the most probable token
    assert some.generate(["ab"], num_tokens=8, temperature=0) == ["ab"]


def test_a_checkpoint_uses_only_classes_that_are_trusted(trained: Trained, tmp_path):
    raw, path = load_raw(trained.last), tmp_path / "own.ckpt"
    raw[KEY]["overrides"]["norm._target_"] = "torch.nn.LayerNorm"
    write_raw(path, raw)
    with pytest.raises(ArgumentError, match=r"^checkpoint=.*'torch\.nn\.LayerNorm', .*name it in trusted\.$"):
        tinyformer.load(path)
    assert tinyformer.load(path, trusted=["torch.nn.LayerNorm"]).encode(["a"]).shape == (1, 2, 16)


def test_a_model_needs_nothing_of_its_checkpoint_later(trained: Trained, tmp_path, monkeypatch):
    """Neither when the file is replaced by that of another run, nor when it is gone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text(BOOK)
    path, words = shutil.copy(trained.last, "own.ckpt"), ["data.files=book.txt"]
    loaded = tinyformer.load(path)
    before = loaded.sample(3, words), loaded.analyse("heads", words)
    our_checkpoint(tmp_path / "own.ckpt", f"model.vocab_size={VOCAB}")
    for _ in range(2):
        after = loaded.sample(3, words), loaded.analyse("heads", words)
        assert after[0].facts == before[0].facts == {**after[0].facts, "step": "30"}
        assert torch.equal(after[0].batches[0]["inputs"], before[0].batches[0]["inputs"])
        assert (after[1].tables, str(loaded.origin)) == (before[1].tables, f"{Path(path).name}, step 30")
        Path(path).unlink(missing_ok=True)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("alibi", "relative", "t5", "sinusoidal", "none")]


@pytest.mark.parametrize("position", ["rotary", "learned", *SLOW])
def test_texts_may_be_longer_than_in_training_unless_positions_are_learned(position, tmp_path):
    path = our_checkpoint(tmp_path / "own.ckpt", f"position={position}", f"model.vocab_size={VOCAB}").path
    ids = tokens()
    short = tinyformer.load(path)
    if position == "learned":
        with pytest.raises(ArgumentError, match=r"has shape \[21, 48\], but in the model \[64, 48\]"):
            tinyformer.load(path, max_seq_len=64)
        return
    longer = tinyformer.load(path, max_seq_len=64)
    logits = longer.logits(torch.cat([ids, ids.flip(0)], dim=1))
    torch.testing.assert_close(logits[:, : ids.shape[1]], short.logits(ids))
    assert (short.max_seq_len, longer.max_seq_len, logits.shape[1]) == (21, 64, 38)
