"""The data module of text: splits, loaders, and where tokens are kept."""

from types import SimpleNamespace

import lightning
import pytest
import torch

from tinyformer.data import IGNORED, ByteTokenizer, CharTokenizer, Masking, TextDataModule, TextFiles
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
    assert not module.has_own_validation
    for name, loader in (("validation", module.val_dataloader()), ("test", module.test_dataloader())):
        targets = torch.cat([batch["targets"].flatten() for batch in loader])
        assert targets[targets != IGNORED].tolist() == module.splits[name].ids[1:].tolist()


def test_processes_share_an_evaluation_without_repeating(make, monkeypatch):
    module = make()
    module.prepare()
    targets = []
    for rank in range(3):
        monkeypatch.setattr(TextDataModule, "_rank", rank)
        monkeypatch.setattr(TextDataModule, "_world_size", 3)
        targets += [t for batch in module.val_dataloader() for t in batch["targets"].flatten().tolist() if t >= 0]
    assert sorted(targets) == sorted(module.splits["validation"].ids[1:].tolist())


def test_whole_data_with_a_given_tokenizer(make):
    tokenizer = ByteTokenizer().build([])
    module = make(tokenizer=tokenizer)
    assert not module.is_prepared(tokenizer, whole=True)
    module.prepare(whole=True)
    assert module.is_prepared(tokenizer, whole=True)
    assert not module.is_prepared(tokenizer.with_mask(), whole=True)
    assert set(module.splits) == {"all"}
    assert module.splits["all"].num_tokens == len(TEXT)
    assert module.tokenizer.fingerprint == tokenizer.fingerprint
    assert len(list(module.evaluation_dataloader("all"))) == -(-len(TEXT) // 16 // 8)


def test_splits_that_do_not_exist_or_are_empty(make):
    module = make(validation_fraction=0, test_fraction=0)
    module.prepare()
    assert set(module.splits) == {"train"}
    assert module.val_dataloader() == []
    for split, cure in (("test", "; test_fraction=0.05 works"), ("all", "")):
        with pytest.raises(ArgumentError, match=rf"^split='{split}': there is no such split, only train{cure}\."):
            module.evaluation_dataloader(split)
    small = make(text="x" * 45, validation_fraction=0.01, test_fraction=0.01)
    small.prepare()
    with pytest.raises(
        ArgumentError, match=r"^validation_fraction=0.01: leaves the validation split empty.*n=0.1 works"
    ):
        small.val_dataloader()


def test_a_window_needs_as_much_text(make):
    for seq_len, sentence in ((16, "seq_len=16: the training text has only 9 tokens; seq_len=9 works"), (9, None)):
        module = make(text="0123456789", test_fraction=0.0, seq_len=seq_len)
        if sentence is None:
            module.prepare()
        else:
            with pytest.raises(ArgumentError, match=f"^{sentence}"):
                module.prepare()


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.tokens = 0

    def training_step(self, batch):
        return self.weight.sum()

    def validation_step(self, batch):
        self.tokens += int((batch["targets"] != IGNORED).sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.")
@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
@pytest.mark.parametrize("fraction", [0.0, 0.1])
def test_lightning_prepares_trains_and_evaluates(make, fraction):
    module, model = make(validation_fraction=fraction), Model()
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", num_sanity_val_steps=0, enable_checkpointing=False, **silent
    )
    trainer.fit(model, datamodule=module)
    assert trainer.global_step == len(module.train_dataloader())
    assert model.tokens == (module.splits["validation"].num_tokens if fraction else 0)


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
        ({"pack": "document"}, 10**6, None),
        ({"document_mask": True}, 10**6, None),
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


def test_tokens_cannot_be_kept_on_another_device_than_the_run(make):
    module = make(device="cuda")
    module.prepare()
    module.trainer = strategy_on("cpu")
    with pytest.raises(ArgumentError, match=r"^device='cuda': the run is on cpu; device='auto' works"):
        module.train_dataloader()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_batches_made_on_a_gpu_are_those_of_the_memory_map(make):
    batches = []
    for device in ("cuda", "cpu"):
        module = make(device=device)
        module.prepare()
        module.trainer = strategy_on("cuda")
        batches.append(list(module.train_dataloader()))
    assert len(batches[0]) == len(batches[1])
    for on_gpu, mapped in zip(*batches, strict=True):
        for name, tensor in mapped.items():
            assert on_gpu[name].device.type == "cuda"
            assert torch.equal(on_gpu[name].cpu(), tensor)
