"""The benchmarks compare what is comparable; our training step is about as fast as a plain loop; what they write."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import generation
import measure
import pytest
import torch
from commands import ROOT, Program, ran
from here import our_network
from measure import PLAIN, Effort, Trained, settings, train_in_turn
from peers import GPT, GPU_PEERS, PEERS, QUICK, SHAPES, Peer, Shape, num_parameters

from tinyformer.nn import AttentionMask

pytestmark = pytest.mark.slow  # peers take seconds to import

MAX_SLOWDOWN = 1.35
ATTEMPTS = 4
"""To find our step within `MAX_SLOWDOWN`, each with twice the rounds of the one before: other processes can make a
ratio wrong only for a while; what truly is slower stays so."""


def train(book: Path, shape: Shape, **effort: int) -> Trained:
    """Our run and the plain loop, in turn, in fp32, in seconds of the process."""
    measured = Effort(**effort)
    overrides = [*settings(shape, GPT, measured, "32-true"), "data=text", f"data.files={book}"]
    (plain,) = train_in_turn([], overrides, shape, measured, "32-true", time.process_time)
    return plain


@pytest.mark.timed
def test_our_step_takes_little_longer_than_a_plain_loop(book: Path) -> None:
    slowdowns = []
    for attempt in range(ATTEMPTS):
        plain = train(book, SHAPES["small"], steps_per_block=5, rounds=6 * 2**attempt)
        slowdowns.append(1 / measure.compare(plain.ours, plain.theirs).ratio)
        if slowdowns[-1] <= MAX_SLOWDOWN:
            break
    assert slowdowns[-1] <= MAX_SLOWDOWN, slowdowns


def test_our_run_and_the_plain_loop_have_the_same_losses(book: Path) -> None:
    plain = train(book, QUICK, steps_per_block=4, rounds=4)  # the learning rate is past its rise
    assert (plain.peer, plain.parameters) == (PLAIN, plain.our_parameters)
    assert plain.loss == pytest.approx(plain.our_loss, rel=1e-5)
    assert plain.loss < 4.0  # of a vocabulary of about 40 characters


@pytest.mark.parametrize("shape", [*SHAPES.values(), QUICK], ids=lambda shape: shape.name)
@pytest.mark.parametrize("peer", [*PEERS, GPU_PEERS[0]], ids=lambda peer: peer.name)
def test_a_peer_computes_our_function_with_as_many_parameters(peer: Peer, shape: Shape) -> None:
    # Weights that are large enough for each layer to matter.
    network = our_network([*peer.like, *shape.overrides, "model.init_std=0.1"], 65)
    model = peer.build(shape, network)
    assert abs(num_parameters(model) / network.num_parameters() - 1) <= 0.01
    tokens = torch.randint(65, (2, shape.seq_len), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = network(tokens, AttentionMask(causal=True)), peer.logits(model, tokens)
    assert ours.std() > 0.5
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-3 if peer.exact else 1e-2)


@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer.generates], ids=lambda peer: peer.name)
def test_both_sides_generate_the_same_text(peer: Peer) -> None:
    sides = generation.sides(peer, replace(QUICK, num_layers=1), 2, 12, torch.float32, "cpu")
    ours, theirs = sides["ours"](), sides["theirs"]()
    assert ([*map(len, ours)], ours) == ([12, 12], theirs)


def test_ratios_are_of_the_blocks_of_a_round() -> None:
    # Everything took three times as long in the last round, and the ratio does not see it.
    assert measure.compare([1.0, 1.0, 1.0, 3.0], [2.0, 2.0, 2.0, 6.0]) == (2.0, 2.0, 2.0)
    assert measure.compare([1.0, 1.0, 1.0], [1.0, 2.0, 4.0]) == (2.0, 1.5, 3.0)


@pytest.mark.nightly
def test_a_language_model_translates_by_continuing(tmp_path: Path, program: Program) -> None:
    english = {"uno": "one", "dos": "two", "tres": "three", "cuatro": "four", "cinco": "five"}
    pairs = [(" ".join(few), " ".join(map(english.get, few))) for n in (2, 3, 4) for few in permutations(english, n)]
    (tmp_path / "pairs").mkdir()
    for split in ("train", "validation", "test"):
        rows = map("\t".join, [("source", "target"), *pairs])
        (tmp_path / "pairs" / f"{split}.tsv").write_text("\n".join(rows))
    sizes = "model.num_layers=2 model.num_heads=2 model.d_model=32 model.max_seq_len=64 tokenizer.vocab_size=270"
    command = f"experiment=translate_lm_cpu data.files=pairs hydra.run.dir=lm trainer.max_steps=300 {sizes}"
    ran(program, "train.py", command)
    benchmark = [sys.executable, ROOT / "benchmarks" / "translation.py", "pairs", "lm/checkpoints/last.ckpt"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    printed = subprocess.check_output(benchmark, cwd=tmp_path, env=environment, text=True)
    scores = [float(line.split("BLEU ")[1].split(",")[0]) for line in printed.splitlines()]
    assert len(scores) == 5
    assert scores[2] > 90 > scores[0]
