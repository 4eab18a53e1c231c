"""Training loaders: each item once an epoch, and resuming is exact, under Lightning too."""

from itertools import chain

import pytest
import torch

from tinyformer.data import Examples, ResumableLoader, SimilarLengthLoader

from .streams import split_of
from .test_examples import labelled

SPLIT = split_of([52, 33, 116])  # 203 scored tokens; each token is unique


def loader(**changes):
    return ResumableLoader(SPLIT, **({"seq_len": 5, "batch_size": 4, "seed": 1} | changes))


def example_loader(**changes):
    """Ten batches of examples in each epoch, with token dropout."""
    split = labelled(range(2, 39))
    return SimilarLengthLoader(lambda epoch: Examples(split, 0.5, (3, epoch)), split.lengths, 4, seed=3, **changes)


def first_targets(batches):
    """The first target of each window, by batch: it identifies the window."""
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


def test_epochs_differ_in_order_and_phase_and_a_seed_repeats_them():
    epochs, same = (
        [list(chain.from_iterable(first_targets(training))) for _ in range(8)] for training in (loader(), loader())
    )
    assert epochs == same
    assert len({tuple(epoch) for epoch in epochs}) == 8
    assert len({min(epoch) for epoch in epochs}) > 2
    assert epochs[0] != list(chain.from_iterable(first_targets(loader(seed=2))))


@pytest.mark.parametrize(
    ("make", "stop", "num_workers"),
    [(loader, 1, 0), (loader, 9, 0), (loader, 12, 0), (loader, 12, 2), (example_loader, 4, 0), (example_loader, 10, 0)],
)
def test_a_saved_state_resumes_at_the_next_batch(make, stop, num_workers):
    reference = make()
    expected = [batch["inputs"].tolist() for _ in range(3) for batch in reference]
    interrupted, seen = make(num_workers=num_workers), []
    while len(seen) < stop:
        for batch in interrupted:
            seen.append(batch["inputs"].tolist())
            if len(seen) == stop:
                break
    resumed = make(num_workers=num_workers)
    resumed.load_state_dict(interrupted.state_dict())
    while len(seen) < len(expected):
        seen += [batch["inputs"].tolist() for batch in resumed]
    assert seen == expected


def test_ranks_share_an_epoch():
    ranks = [loader(rank=rank, world_size=2) for rank in range(2)]
    shares = [list(chain.from_iterable(first_targets(rank))) for rank in ranks]
    assert len(ranks[0]) == len(ranks[1]) == 39 // 8
    assert len(shares[0]) == len(shares[1])
    assert not set(shares[0]) & set(shares[1])


@pytest.mark.parametrize("lengths", [[52, 33, 116], [6], [10]])
def test_tokens_on_a_device_give_the_same_batches_as_the_memory_map(lengths):
    settings = {"seq_len": 5, "batch_size": 4, "seed": 1}
    if len(lengths) > 1:
        settings |= {"rank": 1, "world_size": 2}
    devices = (None, torch.device("cpu"))
    mapped, held = (ResumableLoader(split_of(lengths), **settings, device=device) for device in devices)
    assert len(mapped) == len(held) > 0
    for _ in range(6):
        for one, other in zip(mapped, held, strict=True):
            assert one.keys() == other.keys()
            for name, tensor in one.items():
                torch.testing.assert_close(other[name], tensor, rtol=0, atol=0)
                assert other[name].is_contiguous()
        assert mapped.state_dict() == held.state_dict()
