"""The data module: splits, loaders, and a sentence for each mistake."""

from types import SimpleNamespace

import lightning
import pytest
import torch

from tinyformer.data import IGNORED, ByteTokenizer, CharTokenizer, Masking, TextDataModule, TextFiles

TEXT = "All happy families are alike; each unhappy family is unhappy in its own way.\n" * 40


@pytest.fixture
def make(tmp_path):
    def module(text=TEXT, tokenizer=None, **changes):
        (tmp_path / "book.txt").write_text(text)
        settings = {"seq_len": 16, "batch_size": 8, "cache_dir": str(tmp_path / "cache")}
        source = TextFiles(str(tmp_path / "book.txt"))
        return TextDataModule(source, tokenizer or CharTokenizer(), **(settings | changes))

    return module


def test_prepare_opens_tokenizer_and_splits(make):
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


def test_evaluation_scores_every_token_once(make):
    module = make()
    module.prepare()
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
    module.prepare(whole=True)
    assert set(module.splits) == {"all"}
    assert module.splits["all"].num_tokens == len(TEXT)
    assert module.tokenizer.fingerprint == tokenizer.fingerprint
    assert len(list(module.evaluation_dataloader("all"))) == -(-len(TEXT) // 16 // 8)


def test_without_fractions_there_is_only_training_text(make):
    module = make(validation_fraction=0, test_fraction=0)
    module.prepare()
    assert set(module.splits) == {"train"}
    assert module.val_dataloader() == []
    with pytest.raises(ValueError, match=r"no split test, only train; data.test_fraction=0.05"):
        module.test_dataloader()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"validation_fraction": 1.0},
            r"data.validation_fraction=1.0: .* data.validation_fraction=0.05 works",
        ),
        ({"test_fraction": -0.1}, r"data.test_fraction=-0.1: must be at least 0"),
        ({"validation_fraction": 0.5, "test_fraction": 0.5}, "leave no text to train on; 0.05 and 0.05 work"),
        ({"pack": "tight"}, "data.pack=tight: must be concat or document"),
        ({"batch_size": 0}, "data.batch_size=0: must be at least 1; data.batch_size=16 works"),
        ({"seq_len": 0}, "model.max_seq_len=0: must be at least 1"),
        ({"max_tokens": 0}, "data.max_tokens=0: must be at least 1"),
        ({"num_workers": -1}, "data.num_workers=-1: must not be negative"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_mistakes_are_named_at_once(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_a_text_shorter_than_a_window_is_refused(make):
    with pytest.raises(ValueError, match=r"model.max_seq_len=16: .* only 9 tokens; .*model.max_seq_len=9 works"):
        make(text="0123456789", test_fraction=0.0).prepare()
    make(text="0123456789", test_fraction=0.0, seq_len=9).prepare()


def test_an_empty_validation_split_is_refused_when_asked_for(make):
    module = make(text="x" * 45, validation_fraction=0.01, test_fraction=0.01)
    module.prepare()
    with pytest.raises(ValueError, match=r"the split validation holds no text; .*data.validation_fraction"):
        module.val_dataloader()


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.tokens = 0

    def training_step(self, batch):
        return self.weight.sum()

    def validation_step(self, batch):
        self.tokens += int((batch["targets"] != IGNORED).sum())

    test_step = validation_step

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
    """What a module asks of its trainer."""
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
def test_tokens_lie_on_a_gpu_where_they_fit_and_windows_are_plain(make, monkeypatch, changes, free, device):
    module = make(**changes)
    module.prepare()
    if changes.get("device") != "cuda":
        assert module._token_device() is None  # without a trainer
        module.trainer = strategy_on("cpu")
        assert module._token_device() is None
    module.trainer = strategy_on("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**12))
    assert module._token_device() == (torch.device(device) if device else None)


def test_tokens_do_not_lie_on_a_gpu_that_the_run_is_not_on(make):
    module = make(device="cuda")
    module.prepare()
    module.trainer = strategy_on("cpu")
    with pytest.raises(ValueError, match=r"data.device=cuda: the run is on cpu; data.device=auto works"):
        module.train_dataloader()


@pytest.mark.parametrize("changes", [{"pack": "document"}, {"document_mask": True}, {"masking": Masking()}])
def test_windows_that_are_not_plain_do_not_lie_on_a_gpu(make, changes):
    with pytest.raises(ValueError, match=r"data.device=cuda: windows within documents.*data.device=auto works"):
        make(device="cuda", **changes)


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
