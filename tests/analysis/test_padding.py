"""Padding takes no part in what replaces the output of a head, nor in measures."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from data.streams import split_of
from nn.model_cases import make_encoder

from analysis.subjects import TOKENIZER, all_rows, columns_of, loud, loud_encoder_decoder, pair_subject, rows_of
from tinyformer.analysis import MEASURES, HeadMaps, Subject, capture_weights, measure_layers
from tinyformer.analysis.ablation import MODES, losses_without, resampled_positions
from tinyformer.analysis.measures.inputs import of_one_length
from tinyformer.data import Examples, LabelledSplit, Windows
from tinyformer.nn import AttentionMask, ClassReadout, TokenReadout, Transformer
from tinyformer.tasks import CausalLM, Classification


def subject_of(rows, task, readout, **options):
    """The rows of a data set in two batches."""
    torch.manual_seed(0)
    network = loud(Transformer(make_encoder(num_layers=2, **options), readout=readout))
    half = len(rows) // 2
    batches = [rows.__getitems__(list(part)) for part in (range(half), range(half, len(rows)))]
    return Subject(network, batches, task, TOKENIZER, nullcontext, lambda: network, lambda network, path: None)


def windows():
    split = split_of([8, 3, 14, 5])
    # A head that is ablated already stays at zero in every mode.
    return subject_of(Windows(split, 8, "document"), CausalLM(), TokenReadout, ablated_heads=[[1, 0]])


def examples(lengths=(3, 7, 12, 1, 5)):
    lengths = np.array(lengths)
    ids = torch.randint(2, 50, (lengths.sum(),), generator=torch.Generator().manual_seed(0)).numpy().astype(np.uint16)
    offsets = np.concatenate([[0], lengths.cumsum()])
    split = LabelledSplit(ids, offsets, np.arange(len(lengths)) % 2, ["a", "b"], TOKENIZER, 0, 0, 0)
    return subject_of(Examples(split), Classification(["a", "b"]), partial(ClassReadout, labels=["a", "b"]))


@torch.no_grad()
def outputs_of(subject, row):
    """The outputs of the heads of each layer for a row, `heads seq v_head_dim`."""
    outputs, gates = [], [layer.head_gate for layer in subject.layers]
    hooks = [gate.register_forward_pre_hook(lambda gate, args: outputs.append(args[0][0])) for gate in gates]
    subject.task.forward(subject.network, row)
    for hook in hooks:
        hook.remove()
    return outputs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [windows, examples, lambda: pair_subject(loud_encoder_decoder())])
@torch.no_grad()
def test_what_replaces_a_head_of_rows_without_padding(make, mode):
    subject = make()
    batches = [list(rows_of(batch)) for batch in subject.batches]
    outputs = [[outputs_of(subject, row) for row in rows] for rows in batches]
    for index, layer in enumerate(subject.layers):
        (found,) = losses_without(subject, [[(index, 1)]], mode)
        expected, of_head = [], [[of_row[index][1] for of_row in of_batch] for of_batch in outputs]
        mean = torch.cat([own for of_batch in of_head for own in of_batch]).mean(dim=0)
        for rows, of_batch in zip(batches, of_head, strict=True):
            lengths = torch.tensor([len(own) for own in of_batch])
            positions = resampled_positions(lengths.roll(1), int(lengths.max()))
            for number, (row, own) in enumerate(zip(rows, of_batch, strict=True)):
                other = {
                    "zero": torch.zeros_like(own),
                    "mean": mean.expand_as(own),
                    # An index behind the tokens of the row before would raise.
                    "resample": of_batch[number - 1][positions[number, : len(own)]],
                }[mode]
                hook = layer.o_proj.register_forward_pre_hook(
                    lambda module, args, other=other: torch.cat([args[0][..., :8], other[None], args[0][..., 16:]], -1)
                )
                expected.append(subject.task.nats(subject.network, row)[0])
                hook.remove()
        torch.testing.assert_close(found.nats, torch.cat(expected).to(found.nats), rtol=1e-4, atol=1e-4)
        assert abs(found.mean - subject.losses().mean) > 1e-4


def test_windows_of_a_probe_are_cut_to_one_length():
    cut = {"inputs": torch.arange(40).view(4, 10), "lengths": torch.tensor([3, 8, 4, 6])}
    assert sorted(of_one_length([cut])["inputs"].tolist()) == [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]]


def test_measures_are_those_of_rows_without_padding(tmp_path):
    subject = examples((3, 7, 12, 3, 3, 1, 5))
    rows = all_rows(subject)
    maps = [capture_weights(subject.network, row["inputs"], AttentionMask()) for row in rows]
    measures = [measure_layers(MEASURES, *each) for each in zip(maps, (row["inputs"] for row in rows), strict=True)]
    table = columns_of(HeadMaps(importance=False)(subject, tmp_path).tables["maps"])
    # Rows of one length are measured together, and share the head that is most similar.
    for name in MEASURES.keys() - {"similarity"}:
        values = torch.tensor([found[name] for found in measures]).flatten(1)
        expected = values.amax(dim=0) if name == "largest_logit" else values.nanmean(dim=0)
        torch.testing.assert_close(torch.tensor(table[name]), expected)


def test_a_longer_row_takes_random_tokens_of_the_other_row():
    lengths, place = torch.tensor([3000, 4000, 3]), torch.arange(3000)
    positions = resampled_positions(lengths, 3000)
    assert torch.equal(positions[:2], place.expand(2, -1))  # the others are longer
    assert torch.equal(positions[2, :3], place[:3])
    counts = positions[2, 3:].bincount(minlength=3)
    assert len(counts) == 3
    assert (counts - 999).abs().max() < 100  # 26 is the standard deviation
