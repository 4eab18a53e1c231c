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
    # So does a network that computes activations again.
    model, plain = (network(factory("gqa")).train() for _ in range(2))
    model.encoder.checkpoint_activations = True
    model.compile(backend="aot_eager", fullgraph=True)
    for each in (model, plain):
        each(ids[:, :12], mask_of("causal", 12), targets=ids[:, 1:]).backward()
    for actual, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, reference.grad)
    # The logits of a large vocabulary are computed in parts, and recomputed.
    parts = torch.compile(partial(vocabulary_cross_entropy, max_logits=100), backend="aot_eager", fullgraph=True)
    x, weight = torch.randn(7, 4, requires_grad=True), torch.randn(30, 4, requires_grad=True)
    targets = torch.tensor([1, -100, 2, 3, 4, 29, -100])
    losses = [each(x, weight, targets) for each in (parts, vocabulary_cross_entropy)]
    gradients = [torch.autograd.grad(loss, (x, weight)) for loss in losses]
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])
"""


FLEX = """
    import warnings
    import torch
    from nn.variants import error
    from nn.variants import NAMES, able, make, mask_of, tokens

    warnings.simplefilter("ignore")  # that it is slow
    count = 0
    with torch.no_grad():
        for name in NAMES:
            for mask in ("padded", "causal+documents") if "flex" in able(name, training=False) else ():
                out, expected = (make(name, backend)(tokens(), mask_of(mask)) for backend in ("flex", "eager"))
                assert error(out, expected) <= 1e-5, (name, mask)
                count += 1
    print(count, "cells")
"""


ONE_GRAPH = """
    from functools import partial

    import torch

    from nn.variants import error
    from nn.variants import NAMES, able, factory, mask_of, network

    ids, count = torch.randint(50, (3, 12)), 0
    for name in NAMES:
        for backend in ("eager", *(backend for backend in ("sdpa", "flash") if backend in able(name))):
            for mask in ("causal", "causal+documents"):
                model, plain = (network(partial(factory(name), backend=backend)) for _ in range(2))
                model.compile(backend="aot_eager", fullgraph=True)
                losses = [each(ids[:, :11], mask_of(mask), targets=ids[:, 1:]) for each in (model, plain)]
                losses[0].backward()
                assert error(*losses) <= 1e-5, (name, backend, mask)
                torch._dynamo.reset()
                count += 1
    print(count, "cells")
"""


def printed(script: str) -> str:
    """What a script prints in a process of its own."""
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
def test_there_are_no_graph_breaks_and_lengths_share_a_graph():
    graphs = dict(line.split() for line in printed(NETWORK).splitlines())
    assert len(graphs) == 5
    # The second length makes the length dynamic; no further length is compiled for.
    assert set(graphs.values()) == {"2"}


@pytest.mark.nightly
def test_compiled_flex_equals_eager():
    num_variants = sum("flex" in able(name, training=False) for name in NAMES)
    assert printed(FLEX).strip() == f"{2 * num_variants} cells"


@pytest.mark.nightly
def test_every_variant_is_one_graph():
    num_cells = sum(2 * (1 + len({"sdpa", "flash"} & {*able(name)})) for name in NAMES)
    assert printed(ONE_GRAPH).strip() == f"{num_cells} cells"
