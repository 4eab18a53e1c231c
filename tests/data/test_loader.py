"""The training loader: each window once an epoch, and resuming is exact, under Lightning too."""

from itertools import chain
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tinyformer.data import ResumableLoader, Windows
from tinyformer.data import loader as loader_module

from .streams import split_of

SPLIT = split_of([52, 33, 116])  # 203 scored tokens; each token is unique


def loader(**changes):
    return ResumableLoader(SPLIT, **({"seq_len": 5, "batch_size": 4, "seed": 1} | changes))


def first_targets(batches):
    """The first target of each window, by batch: it names the window."""
    return [batch["targets"][:, 0].tolist() for batch in batches]


@pytest.mark.parametrize("pack", ["concat", "document"])
def test_an_epoch_has_no_window_twice_and_leaves_out_less_than_a_batch(pack):
    training = loader(pack=pack)
    for _ in range(3):
        batches = first_targets(training)
        assert len(batches) == len(training)
        assert all(len(batch) == 4 for batch in batches)
        windows = list(chain.from_iterable(batches))
        assert len(set(windows)) == len(windows)
    assert len(training) == {"concat": 39 // 4, "document": 42 // 4}[pack]


def test_epochs_differ_in_order_and_phase_and_seeds_repeat():
    training = loader()
    epochs = [list(chain.from_iterable(first_targets(training))) for _ in range(8)]
    assert len({tuple(epoch) for epoch in epochs}) == 8
    assert len({min(epoch) for epoch in epochs}) > 2
    again = loader()
    assert epochs == [list(chain.from_iterable(first_targets(again))) for _ in range(8)]
    assert epochs[0] != list(chain.from_iterable(first_targets(loader(seed=2))))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 4, 9, 12])
def test_a_saved_state_goes_on_with_the_next_batch(stop, num_workers):
    reference = loader()
    expected = first_targets(batch for _ in range(3) for batch in reference)
    interrupted = loader(num_workers=num_workers)
    seen = []
    while len(seen) < stop:
        for batch in interrupted:
            seen += first_targets([batch])
            if len(seen) == stop:
                break
    resumed = loader(num_workers=num_workers)
    resumed.load_state_dict(interrupted.state_dict())
    while len(seen) < len(expected):
        seen += first_targets(resumed)
    assert seen == expected


def test_ranks_share_an_epoch():
    ranks = [loader(rank=rank, world_size=2) for rank in range(2)]
    shares = [list(chain.from_iterable(first_targets(rank))) for rank in ranks]
    assert len(ranks[0]) == len(ranks[1]) == 39 // 8
    assert len(shares[0]) == len(shares[1])
    assert not set(shares[0]) & set(shares[1])


def test_fewer_windows_than_a_batch_make_a_smaller_batch():
    training = loader(batch_size=1000)
    assert len(training) == 1
    assert [len(batch) for batch in first_targets(training)] == [39]


@pytest.mark.parametrize("tokens", [5, 6, 9, 10])
def test_a_text_of_barely_one_window_has_one_batch(tokens):
    training = ResumableLoader(split_of([tokens]), seq_len=5, batch_size=4, seed=0)
    for _ in range(6):
        assert len(list(training)) == len(training) == 1


def test_waiting_is_what_passes_between_asking_for_a_batch_and_getting_it(monkeypatch):
    """By a clock that moves by 3 s when a batch is read, and by 100 s when it is used."""
    now = [0.0]
    monkeypatch.setattr(loader_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    read = Windows.__getitems__

    def slowly(windows, indices):
        now[0] += 3
        return read(windows, indices)

    monkeypatch.setattr(Windows, "__getitems__", slowly)
    training = loader()
    for _ in range(2):
        for _ in training:
            now[0] += 100
    assert training.seconds == 2 * 3 * len(training)


@pytest.mark.parametrize("lengths", [[52, 33, 116], [6], [10]])
def test_from_a_tensor_come_the_same_batches_bit_for_bit(lengths):
    settings = {"seq_len": 5, "batch_size": 4, "seed": 1}
    mapped, held = (
        ResumableLoader(split_of(lengths), **settings, device=device) for device in (None, torch.device("cpu"))
    )
    assert len(mapped) == len(held) > 0
    for _ in range(6):
        for one, other in zip(mapped, held, strict=True):
            assert one.keys() == other.keys()
            for name, tensor in one.items():
                assert torch.equal(tensor, other[name])
                assert tensor.dtype == other[name].dtype
                assert other[name].is_contiguous()
        assert mapped.state_dict() == held.state_dict()


def test_ranks_share_a_tensor_as_they_share_a_file():
    for rank in range(2):
        settings = {"rank": rank, "world_size": 2}
        assert first_targets(loader(**settings)) == first_targets(loader(**settings, device=torch.device("cpu")))


class Recorder(lightning.LightningModule):
    """Learns nothing, and notes the windows that it is given."""

    def __init__(self, **loader_changes):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.loader_changes = loader_changes
        self.seen = []

    def training_step(self, batch):
        self.seen += first_targets([batch])
        return self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return loader(**self.loader_changes)


def fit(folder, steps, ckpt_path=None, **loader_changes):
    recorder = Recorder(**loader_changes)
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = lightning.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(recorder, ckpt_path=ckpt_path)
    return recorder.seen


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.")
@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
@pytest.mark.filterwarnings("ignore:.*`weights_only` was not set")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [5, 9, 10], ids=["within-an-epoch", "at-its-end", "after-its-end"])
def test_lightning_resumes_without_repeating_or_skipping_a_window(tmp_path, stop, num_workers):
    reference = loader()
    expected = first_targets(batch for _ in range(3) for batch in reference)[:22]
    before = fit(tmp_path, stop, num_workers=num_workers)
    after = fit(tmp_path, 22, ckpt_path=tmp_path / f"step={stop}.ckpt", num_workers=num_workers)
    assert before + after == expected
