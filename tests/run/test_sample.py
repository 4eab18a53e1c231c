"""Samples: what is printed of each prompt, when, and what is refused."""

import re

import pytest
import torch
from nn.model_cases import make_transformer

from tinyformer.config.errors import printable
from tinyformer.data import ByteTokenizer
from tinyformer.generation.sampling import Sampling, generate
from tinyformer.run.sample import Generation, describe_prompts, print_completion, print_samples

TOKENIZER = ByteTokenizer().build([])


def generation_of(**changes):
    return Generation(**{"num_tokens": 12} | changes)


def network():
    torch.manual_seed(0)
    return make_transformer(vocab_size=257, max_seq_len=16, tied=False)


def indented(text):
    return "".join(f"  {printable(line)}\n" for line in text.splitlines()) or "\n"


@pytest.mark.parametrize("prompt", [None, "", "a", "👋🏽\n\nx\r", "\x1b[2J", "far longer than what fits"])
def test_a_sample_is_printed_and_given(capsys, prompt):
    text = print_samples(generation_of(prompt=prompt, temperature=1.5), network(), TOKENIZER)
    assert text.startswith(prompt or "")
    out = capsys.readouterr().out
    assert out == f"\nA sample:\n{indented(text)}"
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", out)  # which a terminal would obey
    tokens = [256, *(prompt or "").encode()]
    [new] = generate(network(), [tokens], 12, Sampling(1.5), stop_token=256)
    assert text == (prompt or "") + TOKENIZER.decode(new)


def test_a_completion_is_printed_beside_what_is_expected(capsys):
    text = print_completion("ab=", "ab", generation_of(temperature=0), network(), TOKENIZER)
    [new] = generate(network(), [[256, *b"ab="]], 2, Sampling(0))
    assert text == TOKENIZER.decode(new)
    lines = f"prompt     ab=\nexpected   ab\ngenerated  {text}"
    assert capsys.readouterr().out == f"\nA completion:\n{indented(lines)}"


def test_of_several_prompts_each_has_its_own(capsys):
    generation = generation_of(prompt=["a", "b\n", "a"], seed=3)
    texts = print_samples(generation, network(), TOKENIZER)
    assert capsys.readouterr().out == "".join(
        f"\nSample {index} of 3:\n{indented(text)}" for index, text in enumerate(texts, start=1)
    )
    together = generate(network(), [[256, 97], [256, 98, 10], [256, 97]], 12, Sampling(0.8), 3, stop_token=256)
    assert texts == [prompt + TOKENIZER.decode(new) for prompt, new in zip(["a", "b\n", "a"], together, strict=True)]


def test_a_sample_appears_as_it_is_drawn(capsys):
    model, seen = network(), []
    # What is on the screen when the model reads; bytes of ASCII alone, which come one at a time.
    model.encoder.register_forward_pre_hook(lambda encoder, args: seen.append(capsys.readouterr().out))
    model.readout.proj.weight.data[128:] = 0
    model.readout.proj.weight.data[:128] += 1
    text = print_samples(generation_of(prompt="ab", temperature=0), model, TOKENIZER)
    assert seen[0] == "\nA sample:\n  ab"
    assert len(seen) == 12
    assert "".join(seen[1:]) + capsys.readouterr().out == indented(text)[4:]
    assert sum(map(bool, seen[1:])) >= 10


def test_long_prompts_are_reported():
    for prompt in (None, "x" * 16, ["x", "y"]):
        assert describe_prompts(generation_of(prompt=prompt), TOKENIZER, 16) is None
    for prompt, which in (("x" * 17, ""), (["x", "é" * 9], "prompt 2: ")):
        told = f"{which}only its last 16 tokens fit"
        assert describe_prompts(generation_of(prompt=prompt), TOKENIZER, 16) == told
