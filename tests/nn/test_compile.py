"""Torch's compiler takes the whole network, loss included, as one graph."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
    from functools import partial

    import torch
    from torch._dynamo.utils import counters

    from tinyformer.nn import vocabulary_cross_entropy
    from nn.variants import able, documents, factory, mask_of, network

    for name in ("gqa", "mla", "differential", "t5", "gqa+rotary+sink+gate+qk_norm"):
        backend = "flash" if "flash" in able(name) else "eager"
        model, plain = (network(partial(factory(name), backend=backend)) for _ in range(2))
        model.compile(backend="aot_eager", fullgraph=True)  # a break in the graph is an error
        ids = torch.randint(50, (3, 13))
        for seq in (12, 11, 7, 5):
            arguments = ids[:, :seq], mask_of("causal", seq)
            loss, expected = (each(*arguments, targets=ids[:, 1 : seq + 1]) for each in (model, plain))
            torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        for actual, reference in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(actual.grad, reference.grad)
        print(name, counters["stats"]["unique_graphs"])
        torch._dynamo.reset()
        counters.clear()
    # The logits of a large vocabulary are computed in parts, and recomputed.
    parts = torch.compile(partial(vocabulary_cross_entropy, max_logits=100), backend="aot_eager", fullgraph=True)
    x, weight = torch.randn(7, 4, requires_grad=True), torch.randn(30, 4, requires_grad=True)
    targets = torch.tensor([1, -100, 2, 3, 4, 29, -100])
    losses = [each(x, weight, targets) for each in (parts, vocabulary_cross_entropy)]
    gradients = [torch.autograd.grad(loss, (x, weight)) for loss in losses]
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])
"""


@pytest.mark.slow
def test_there_are_no_graph_breaks_and_lengths_share_a_graph():
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT)],
        env=os.environ | {"PYTHONPATH": f"{here.parents[1]}:{here.parent}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    graphs = dict(line.split() for line in done.stdout.splitlines())
    assert len(graphs) == 5
    # The second length makes the length dynamic; no further length is compiled for.
    assert set(graphs.values()) == {"2"}
