"""Masked tokens: how many, which, what replaces them, and that the same are masked again."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from data.streams import EOS, split_of
from tinyformer.data import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    MaskedWindows,
    Masker,
    Masking,
    SourceDataModule,
    TextFiles,
    TextTokenizer,
    WindowFormat,
    Windows,
)
from tinyformer.data.batches.windows import IGNORED

TEXT = "Unbelievable interoperability: 12 naïve café-goers' tokenizations, isn't it?\n"


def of_words(number):
    """A tokenizer of this many tokens, the last of which is the mask token."""
    words = {f"w{i}": i for i in range(number - 1) if i != EOS} | {"<eos>": EOS, "<mask>": number - 1}
    return TextTokenizer(Tokenizer(models.WordLevel(words)))


TOKENIZER = of_words(5000)


def masked(masking, lengths=(40,) * 50, seq_len=41, seed=0, epoch=0, rows=None, tokenizer=TOKENIZER):
    """Windows of one document each, before and after masking."""
    windows = Windows(split_of(lengths), seq_len, "document")
    rows = list(range(len(windows))) if rows is None else rows
    dataset = MaskedWindows(windows, Masker(masking, tokenizer, seed), epoch)
    return windows.__getitems__(rows), dataset.__getitems__(rows)


def test_the_shares_are_as_configured():
    before, after = masked(Masking(rate=0.3, mask_share=0.7, random_share=0.2), (200,) * 100, 201)
    selected = after["targets"] != IGNORED
    # Binomial: four standard deviations of 20,000 and 6,000 draws.
    assert float(selected.sum()) / (100 * 200) == pytest.approx(0.3, abs=0.013)
    is_mask = (after["inputs"] == TOKENIZER.mask_id)[selected]
    unchanged = (after["inputs"] == before["inputs"])[selected]
    assert is_mask.double().mean() == pytest.approx(0.7, abs=0.024)
    assert unchanged.double().mean() == pytest.approx(0.1, abs=0.016)


def test_random_tokens_are_every_token_of_the_vocabulary():
    _, after = masked(Masking(rate=0.5, mask_share=0.0, random_share=1.0), tokenizer=of_words(9))
    assert after["inputs"][after["targets"] != IGNORED].unique().tolist() == list(range(9))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.floats(0.01, 0.99), st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_targets_are_the_masked_tokens_and_nothing_else_changes(lengths, rate, seed):
    before, after = masked(Masking(rate=rate), lengths, 12, seed)
    selected = after["targets"] != IGNORED
    assert torch.equal(after["targets"][selected], before["inputs"][selected])
    assert torch.equal(after["inputs"][~selected], before["inputs"][~selected])
    real = torch.arange(12) < after["lengths"].unsqueeze(1)
    assert torch.equal(after["lengths"], (before["targets"] != IGNORED).sum(dim=1))
    eligible = real & (before["inputs"] != EOS)
    assert not (selected & ~eligible).any()
    assert torch.equal(selected.any(dim=1), eligible.any(dim=1))  # at least one target in each window, if possible


def selected_of(tokenizer, text, **options):
    """The tokens of a text, and which of them are selected."""
    ids = torch.tensor([tokenizer.encode(text)])
    masker = Masker(Masking(rate=0.4, mask_share=1.0, random_share=0.0, **options), tokenizer, seed=0)
    return ids[0], (masker({"inputs": ids, "targets": ids}, [0], 0)["targets"][0] != IGNORED).tolist()


PIECES = {f"<0x{i:02X}>": i for i in range(256)} | {"</s>": 256}
FALLBACK = TextTokenizer(Tokenizer(models.BPE(PIECES, [], byte_fallback=True)))
BARE = Tokenizer.from_str(ByteTokenizer().build([]).to_json())
BARE.decoder = None


@pytest.mark.parametrize("recipe", [BPETokenizer(300), CharTokenizer(), ByteTokenizer(), FALLBACK, TextTokenizer(BARE)])
def test_whole_words_are_masked_together(recipe):
    tokenizer = recipe.build([TEXT]).with_mask()
    ids, selected = selected_of(tokenizer, TEXT * 8, whole_words=True)
    raw = [tokenizer._raw(i) for i in ids.tolist()]
    owners = [index for index, text in enumerate(raw) for _ in text]  # the token of each byte
    stream = b"".join(raw)
    assert stream == (TEXT * 8).encode()
    letters = [bytes([byte]).isalnum() or byte >= 0x80 for byte in stream]
    for at, (first, second) in enumerate(pairwise(letters)):
        if first and second:
            assert selected[owners[at]] == selected[owners[at + 1]], stream[at - 5 : at + 5]
    assert 0.2 < sum(selected) / len(selected) < 0.6
    assert selected_of(tokenizer, TEXT * 8)[1] != selected


def test_whole_words_are_those_of_the_pre_tokenizer_where_tokens_drop_white_space(tmp_path):
    (tmp_path / "book.txt").write_text(text := "abb ab bba, a bbbb " * 50)
    library = Tokenizer(models.BPE({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, [], unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    given = TextTokenizer(library), WindowFormat(500, masking=Masking(0.4, whole_words=True))
    data = SourceDataModule(TextFiles(str(tmp_path / "book.txt")), *given, 1, cache_dir=str(tmp_path))
    data.prepare()
    selected = (data._rows("train")[0]["targets"][0, 1:] != IGNORED).tolist()
    is_in = dict(of_words := {*zip(library.encode(text).word_ids, selected, strict=False)})
    assert len(of_words) == len(is_in)  # each word is selected whole or not at all, and not always with the next one
    assert {is_in[first] == is_in[first + 1] for first in range(0, 60, 6)} == {True, False}


def test_training_masks_differ_between_epochs_and_from_evaluation_which_repeats_its_own(tmp_path):
    def make(**seeds):
        source, windows = TextFiles(str(tmp_path / "book.txt")), WindowFormat(16, "document", masking=Masking())
        data = SourceDataModule(source, ByteTokenizer(), windows, 4, cache_dir=str(tmp_path / "cache"), **seeds)
        data.prepare()
        return data

    def targets(batches):
        return sorted(tuple(row) for batch in batches for row in batch["targets"].tolist())

    (tmp_path / "book.txt").write_text(TEXT * 200)
    data = make()
    loader, masker = data.train_dataloader(), Masker(Masking(), data.tokenizer, data.split_seed)
    evaluated = MaskedWindows(Windows(data.splits["train"], 16, "document"), masker)
    everything = evaluated.__getitems__(list(range(len(evaluated))))
    epochs = [set(targets(batches)) for batches in (loader, loader, [everything])]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert len(epochs[one] & epochs[other]) < 0.2 * len(epochs[one])
    validation = targets(data.val_dataloader())
    assert targets(data.val_dataloader()) == targets(make(seed=1).val_dataloader()) == validation
    assert targets(make(split_seed=1).val_dataloader()) != validation
