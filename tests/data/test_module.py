"""The data of a run from a source of text: splits, loaders, and where tokens are kept."""

import pytest
import torch

from tinyformer.batch import IGNORED
from tinyformer.data import CharTokenizer, Masking, SourceDataModule, TextFiles, WindowFormat
from tinyformer.errors import ArgumentError

TEXT = "All happy families are alike; each unhappy family is unhappy in its own way.\n" * 40


@pytest.fixture
def make(tmp_path):
    def module(windows=None, **fractions):
        (tmp_path / "book.txt").write_text(TEXT)
        source, settings = TextFiles(str(tmp_path / "book.txt")), {"cache_dir": str(tmp_path / "cache")} | fractions
        data = SourceDataModule(source, CharTokenizer(), WindowFormat(16, **windows or {}), 8, **settings)
        data.prepare()
        return data

    return module


def test_every_token_of_every_split_is_scored_once(make):
    module = make(validation_fraction=0.1, test_fraction=0.2)
    n = len(TEXT)
    sizes = {"train": int(n * 0.7), "validation": int(n * 0.8) - int(n * 0.7), "test": n - int(n * 0.8)}
    assert {name: split.num_tokens for name, split in module.splits.items()} == sizes
    assert module.tokenizer.decode(module.splits["train"].ids[1:20]) == TEXT[:19]
    assert module.is_prepared(module.tokenizer)
    for name, loader in (("validation", module.val_dataloader()), ("test", module.test_dataloader())):
        targets = torch.cat([batch["targets"].flatten() for batch in loader])
        assert targets[targets != IGNORED].tolist() == module.splits[name].ids[1:].tolist()


def test_a_split_that_is_missing_is_answered_with_those_that_there_are(make):
    message = "split='test': there is no such split, only train, validation; split='validation' works"
    module = make(test_fraction=0.0)
    for ask in (module.evaluation_dataloader, lambda split: next(module.sample(split, 1))):
        with pytest.raises(ArgumentError, match=message):
            ask("test")


@pytest.mark.parametrize(
    ("windows", "free", "device"),
    [
        ({}, 10**6, "cuda"),
        ({}, 10**5, None),  # 4 bytes for each of 2,772 tokens are more than a tenth of that
        ({"device": "cuda"}, 10**5, "cuda"),
        ({"device": "cpu"}, 10**6, None),
        ({"masking": Masking()}, 10**6, None),
    ],
)
def test_tokens_are_kept_on_a_gpu_if_they_fit_and_windows_are_plain(make, monkeypatch, windows, free, device):
    data = make(windows)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**12))
    found = data.row_format.token_device(data.splits["train"], torch.device("cuda"))
    assert found == (torch.device(device) if device else None)
    if windows.get("device") == "cuda":
        with pytest.raises(ArgumentError, match=r"^row_format.device='cuda': the run is on cpu; row_format.device"):
            data.require_device("cpu")
    else:
        assert data.row_format.token_device(data.splits["train"], torch.device("cpu")) is None
