"""The events between snapshots: of a head whose map is made by hand at each step."""

from dataclasses import replace

import pytest
import torch
from nn.model_cases import make_transformer

from analysis.contexts import make_context
from tinyformer.analysis.context import Snapshot
from tinyformer.analysis.over_training.over_steps import events_of_snapshots


def with_map(offset=None):
    """A network of positions alone, whose first head attends `offset` tokens back; without an offset, evenly."""
    network = make_transformer(num_layers=1, num_heads=2, tied=False).eval()
    (layer,), position = network.attentions(), network.encoder.position
    with torch.no_grad():
        for weight in (network.encoder.token_embedding.weight, layer.q_proj.weight, layer.k_proj.weight):
            weight.zero_()
        if offset is not None:
            position.embedding.weight.copy_(torch.eye(16, 32))
            layer.q_proj.weight[: 16 - offset, offset:16] = 10 * torch.eye(16 - offset)
            layer.k_proj.weight[:16, :16] = torch.eye(16)
    return network


def of_steps(networks, context):
    return replace(context, snapshots=[Snapshot(step, lambda of=of: of) for step, of in networks.items()])


def test_events_are_the_changes_between_snapshots():
    networks = {0: with_map(), 8: with_map(1), 16: with_map(1), 64: with_map(0), 128: with_map()}
    found = events_of_snapshots(of_steps(networks, make_context(networks[64])))
    assert list(found.steps) == list(networks)
    shares = [of_step.values["previous_token"][0][0] for of_step in found.measures]
    even = sum(1 / (1 + position) for position in range(1, 8)) / 7
    assert shares == pytest.approx([even, 1, 1, 0, even], abs=1e-3)
    events = [(event.step, event.layer, event.head, event.event) for event in found.events]
    assert sorted(events) == [
        (8, 0, "00", "became a previous-token head"),
        (8, 0, "00", "collapsed in entropy"),
        (64, 0, "00", "came to attend to its own token"),
        (64, 0, "00", "is no longer a previous-token head"),
        (128, 0, "00", "became uniform"),
        (128, 0, "00", "is no longer collapsed in entropy"),
        (128, 0, "00", "no longer attends to its own token"),
    ]


def test_a_trait_of_random_maps_is_no_event():
    """In windows of three tokens, random maps give a token itself (1 + 1/2 + 1/3) / 3 of the attention on average."""
    networks = {0: with_map(1), 8: with_map(0)}
    context = make_context(networks[8])
    short = [{name: rows[:, :3] for name, rows in batch.items() if name != "lengths"} for batch in context.batches]
    found = events_of_snapshots(of_steps(networks, replace(context, batches=short)))
    assert [event.event for event in found.events] == ["is no longer a previous-token head"]
