"""Hidden tokens: how many, which, what stands in their place, and that the same are hidden again."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from data.streams import EOS, split_of
from tinyformer.data import (
    IGNORED,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    MaskedWindows,
    Masker,
    Masking,
    ResumableLoader,
    TextDataModule,
    TextFiles,
    TextTokenizer,
    Windows,
)

TEXT = "Unbelievable interoperability: 12 naïve café-goers' tokenizations, isn't it?\n"


WORDS = {f"w{i}": i for i in range(4_999) if i != EOS} | {"<eos>": EOS, "<mask>": 4_999}
TOKENIZER = TextTokenizer(Tokenizer(models.WordLevel(WORDS)))


def masked(masking, lengths=(40,) * 50, seq_len=41, seed=0, epoch=0, rows=None):
    """Windows of one document each, as they were and with tokens hidden."""
    windows = Windows(split_of(lengths), seq_len, "document")
    rows = list(range(len(windows))) if rows is None else rows
    return windows.__getitems__(rows), MaskedWindows(windows, Masker(masking, TOKENIZER, seed), epoch).__getitems__(
        rows
    )


def test_the_shares_are_those_asked_for():
    before, after = masked(Masking(rate=0.3, mask_share=0.7, random_share=0.2), (200,) * 100, 201)
    chosen = after["targets"] != IGNORED
    shares = {
        "chosen": chosen.sum() / (100 * 200),
        "masked": (after["inputs"][chosen] == TOKENIZER.mask_id).double().mean(),
        "kept": (after["inputs"][chosen] == before["inputs"][chosen]).double().mean(),
    }
    # Binomial: four standard deviations of 20,000 and 6,000 draws.
    assert shares["chosen"] == pytest.approx(0.3, abs=0.013)
    assert shares["masked"] == pytest.approx(0.7, abs=0.024)
    assert shares["kept"] == pytest.approx(0.1, abs=0.016)
    others = after["inputs"][chosen & (after["inputs"] != TOKENIZER.mask_id) & (after["inputs"] != before["inputs"])]
    assert others.min() >= 0
    assert others.max() < TOKENIZER.vocab_size
    assert len(others.unique()) > 0.8 * len(others)  # all over the vocabulary


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.floats(0.01, 0.99), st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_targets_are_what_was_there_and_nothing_else_changes(lengths, rate, seed):
    before, after = masked(Masking(rate=rate), lengths, 12, seed)
    chosen = after["targets"] != IGNORED
    assert torch.equal(after["targets"][chosen], before["inputs"][chosen])
    assert torch.equal(after["inputs"][~chosen], before["inputs"][~chosen])
    real = torch.arange(12) < after["lengths"].unsqueeze(1)
    assert torch.equal(after["lengths"], (before["targets"] != IGNORED).sum(dim=1))
    assert not (chosen & ~real).any()
    assert not (chosen & (before["inputs"] == EOS)).any()
    maskable = (real & (before["inputs"] != EOS)).any(dim=1)
    assert torch.equal(chosen.any(dim=1), maskable)  # each window teaches something, if it can


def test_plain_masking_hides_every_chosen_token():
    _, after = masked(Masking(rate=0.2, mask_share=1.0, random_share=0.0))
    chosen = after["targets"] != IGNORED
    assert (after["inputs"][chosen] == TOKENIZER.mask_id).all()
    assert not (after["inputs"][~chosen] == TOKENIZER.mask_id).any()


def test_masks_depend_on_seed_epoch_and_window_and_not_on_the_batch():
    masking = Masking(rate=0.5)
    _, whole = masked(masking)
    _, part = masked(masking, rows=[7, 3])
    assert torch.equal(whole["inputs"][[7, 3]], part["inputs"])
    assert torch.equal(whole["targets"][[7, 3]], part["targets"])
    for other in (masked(masking, seed=1), masked(masking, epoch=1)):
        assert ((other[1]["targets"] == IGNORED) != (whole["targets"] == IGNORED)).double().mean() > 0.3
    rows = whole["targets"] != IGNORED
    assert all((first != second).any() for first, second in pairwise(rows))


@pytest.mark.parametrize("recipe", [BPETokenizer(300), CharTokenizer(), ByteTokenizer()], ids=lambda r: r.name)
def test_whole_words_are_hidden_whole(recipe):
    tokenizer = recipe.build([TEXT]).with_mask()
    ids = torch.tensor([tokenizer.encode(TEXT * 8)])
    masker = Masker(Masking(rate=0.4, mask_share=1.0, random_share=0.0, whole_words=True), tokenizer, seed=0)
    batch = masker({"inputs": ids, "targets": ids}, [0], 0)
    chosen = (batch["targets"][0] != IGNORED).tolist()
    # Words by their characters, each of which belongs to a token.
    raw = [tokenizer._raw(i) for i in ids[0].tolist()]
    owners = [index for index, text in enumerate(raw) for _ in text]
    stream = b"".join(raw)
    letters = [bytes([byte]).isalnum() or byte >= 0x80 for byte in stream]
    for at, (first, second) in enumerate(pairwise(letters)):
        if first and second:
            assert chosen[owners[at]] == chosen[owners[at + 1]], stream[at - 5 : at + 5]
    assert 0.2 < sum(chosen) / len(chosen) < 0.6
    single = Masker(Masking(rate=0.4, mask_share=1.0, random_share=0.0), tokenizer, seed=0)
    assert (single({"inputs": ids, "targets": ids}, [0], 0)["targets"][0] != IGNORED).tolist() != chosen


def test_wordpiece_marks_what_goes_on_a_word():
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "[SEP]": 1, "[MASK]": 2, "play": 3, "##ing": 4, "him": 5}))
    pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = TextTokenizer(pieces)
    assert tokenizer.mask_id == 2
    assert tokenizer.with_mask() is tokenizer
    begins, ends = tokenizer.joins()
    assert begins.tolist() == [False, False, False, False, True, False]
    assert ends.all()


def test_the_mask_is_the_last_token_and_is_never_read_from_text():
    tokenizer = BPETokenizer(300).build([TEXT])
    with_mask = tokenizer.with_mask()
    assert (tokenizer.mask_id, with_mask.mask_id) == (None, tokenizer.vocab_size)
    assert with_mask.vocab_size == tokenizer.vocab_size + 1
    assert with_mask.encode(TEXT) == tokenizer.encode(TEXT)
    assert with_mask.mask_id not in with_mask.encode("a <mask> b")
    again = TextTokenizer.from_json(with_mask.to_json())
    assert (again.mask_id, again.fingerprint) == (with_mask.mask_id, with_mask.fingerprint)


def make_data(tmp_path, **changes):
    (tmp_path / "book.txt").write_text(TEXT * 200)
    options = {"seq_len": 16, "batch_size": 4, "cache_dir": str(tmp_path / "cache"), "masking": Masking()}
    data = TextDataModule(TextFiles(str(tmp_path / "book.txt")), ByteTokenizer(), **options | changes)
    data.prepare()
    return data


def test_training_hides_other_tokens_in_each_epoch_and_validation_the_same(tmp_path):
    data = make_data(tmp_path, pack="document")
    loader = data.train_dataloader()
    assert isinstance(loader, ResumableLoader)
    epochs = [sorted(tuple(row) for batch in loader for row in batch["targets"].tolist()) for _ in range(2)]
    assert epochs[0] != epochs[1]
    validations = [[batch["targets"] for batch in data.val_dataloader()] for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(*validations, strict=True))
    other = make_data(tmp_path, pack="document", seed=1)
    assert not torch.equal(next(iter(other.val_dataloader()))["targets"], validations[0][0])


def test_a_loader_that_goes_on_hides_what_it_would_have_hidden(tmp_path):
    data = make_data(tmp_path)
    unbroken, broken = data.train_dataloader(), data.train_dataloader()
    expected = [batch for _, batch in zip(range(7), unbroken, strict=False)][5:]
    for _, _batch in zip(range(5), broken, strict=False):
        state = broken.state_dict()
    resumed = data.train_dataloader()
    resumed.load_state_dict(state)
    for batch, found in zip(expected, resumed, strict=False):
        assert torch.equal(batch["inputs"], found["inputs"])
        assert torch.equal(batch["targets"], found["targets"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rate": 0.0}, "task.masking.rate=0.0"),
        ({"rate": 1.0}, "task.masking.rate=0.15 works"),
        ({"mask_share": 0.8, "random_share": 0.3}, "task.masking.random_share=0.3"),
        ({"mask_share": -0.1}, "task.masking.mask_share=-0.1"),
        ({"random_share": -0.1}, "task.masking.random_share=-0.1"),
    ],
)
def test_shares_that_are_none_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Masking(**options)


def test_words_on_both_sides_of_a_mark_are_two():
    tokenizer = CharTokenizer().build(["a,b"]).with_mask()
    ids = torch.tensor([tokenizer.encode("a,b" * 50)])
    masker = Masker(Masking(rate=0.4, mask_share=1.0, random_share=0.0, whole_words=True), tokenizer, seed=0)
    chosen = masker({"inputs": ids, "targets": ids}, [0], 0)["targets"][0] != IGNORED
    marks = (ids[0] == tokenizer.encode(",")[0]).nonzero()[:, 0]
    assert (chosen[marks] != chosen[marks + 1]).any()
