"""The data module of text: splits, loaders, and where tokens are kept."""

from types import SimpleNamespace

import pytest
import torch

from tinyformer.batch import IGNORED
from tinyformer.data import CharTokenizer, Masking, TextDataModule, TextFiles
from tinyformer.errors import ArgumentError

TEXT = "All happy families are alike; each unhappy family is unhappy in its own way.\n" * 40


@pytest.fixture
def make(tmp_path):
    def module(text=TEXT, tokenizer=None, **changes):
        (tmp_path / "book.txt").write_text(text)
        settings = {"seq_len": 16, "batch_size": 8, "cache_dir": str(tmp_path / "cache")}
        source = TextFiles(str(tmp_path / "book.txt"))
        return TextDataModule(source, tokenizer or CharTokenizer(), **(settings | changes))

    return module


def test_every_token_of_every_split_is_scored_once(make):
    module = make(validation_fraction=0.1, test_fraction=0.2)
    module.prepare()
    n = len(TEXT)
    assert {name: split.num_tokens for name, split in module.splits.items()} == {
        "train": int(n * 0.7),
        "validation": int(n * 0.8) - int(n * 0.7),
        "test": n - int(n * 0.8),
    }
    assert module.tokenizer.decode(module.splits["train"].ids[1:20]) == TEXT[:19]
    assert module.is_prepared(module.tokenizer)
    for name, loader in (("validation", module.val_dataloader()), ("test", module.test_dataloader())):
        targets = torch.cat([batch["targets"].flatten() for batch in loader])
        assert targets[targets != IGNORED].tolist() == module.splits[name].ids[1:].tolist()


def test_a_split_that_is_missing_is_answered_with_those_that_there_are(make):
    module = make(test_fraction=0.0)
    module.prepare()
    for ask in (module.evaluation_dataloader, lambda split: next(module.sample(split, 1))):
        with pytest.raises(ArgumentError) as caught:
            ask("test")
        found = "split='test': there is no such split, only train, validation; split='validation' works."
        assert str(caught.value) == found


def strategy_on(device):
    """What a module reads from its trainer."""
    return SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)), global_rank=0, world_size=1)


@pytest.mark.parametrize(
    ("changes", "free", "device"),
    [
        ({}, 10**6, "cuda"),
        ({}, 10**5, None),  # 4 bytes for each of 2,772 tokens are more than a tenth of that
        ({"device": "cuda"}, 10**5, "cuda"),
        ({"device": "cpu"}, 10**6, None),
        ({"masking": Masking()}, 10**6, None),
    ],
)
def test_tokens_are_kept_on_a_gpu_if_they_fit_and_windows_are_plain(make, monkeypatch, changes, free, device):
    module = make(**changes)
    module.prepare()
    if changes.get("device") != "cuda":
        assert module._token_device() is None  # without a trainer
        module.trainer = strategy_on("cpu")
        assert module._token_device() is None
    module.trainer = strategy_on("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**12))
    assert module._token_device() == (torch.device(device) if device else None)
