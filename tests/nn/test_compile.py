"""Torch's compiler, in processes without the type checker's wrappers."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nn.variants import NAMES, able

NETWORK = """
    from functools import partial

    import torch
    from torch._dynamo.utils import counters

    from tinyformer.nn import vocabulary_cross_entropy
    from nn.variants import CONVOLVED, NAMES, able, factory, mask_of, network

    def compare(models, *arguments, **options):
        losses = [each(*arguments, **options) for each in models]
        torch.testing.assert_close(*losses)
        gradients = [torch.autograd.grad(loss, [*each.parameters()]) for loss, each in zip(losses, models)]
        torch.testing.assert_close(*gradients)

    ids, count = torch.randint(50, (3, 12)), 0
    for name in NAMES:
        for backend in ("eager", *(backend for backend in ("sdpa", "flash") if backend in able(name))):
            for mask in ("causal", "causal+documents"):
                places = CONVOLVED if name == "convolution" else {}
                models = [network(partial(factory(name), backend=backend), **places).train() for _ in range(2)]
                models[0].encoder.checkpoint_activations = name == "gqa"
                models[0].compile(backend="aot_eager", fullgraph=True)  # a break in the graph is an error
                for seq in (11, 9, 6) if mask == "causal" else (11,):
                    compare(models, ids[:, :seq], mask_of(mask, seq), targets=ids[:, 1 : seq + 1])
                # The second length makes the length dynamic; no further length is compiled for.
                assert counters["stats"]["unique_graphs"] <= 2, (name, backend, mask)
                torch._dynamo.reset()
                counters.clear()
                count += 1
    print(count, "cells")
    # The logits of a large vocabulary are computed in parts, and recomputed.
    whole = partial(vocabulary_cross_entropy, softcap=2.0)
    parts = torch.compile(partial(whole, max_logits=100), backend="aot_eager", fullgraph=True)
    x, weight = torch.randn(7, 4, requires_grad=True), torch.randn(30, 4, requires_grad=True)
    targets = torch.tensor([1, -100, 2, 3, 4, 29, -100])
    losses = [each(x, weight, targets) for each in (parts, whole)]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, (x, weight)) for loss in losses))
"""


def printed(script: str) -> str:
    """Run a script in a process of its own, and return what it prints."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        env=os.environ | {"PYTHONPATH": f"{here.parents[1]}:{here.parent}"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(960)
def test_every_variant_is_one_graph_for_all_lengths():
    num_cells = sum(2 * (1 + len({"sdpa", "flash"} & {*able(name)})) for name in NAMES)
    assert printed(NETWORK).strip() == f"{num_cells} cells"
