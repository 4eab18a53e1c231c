"""The outputs of a run beside its numbers: samples, the line above each picture, and a profile."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import SMALL, TEXT, ran, results_of
from matplotlib.image import imread
from nn.model_cases import make_transformer

from tinyformer.config.errors import printable, say
from tinyformer.data import ByteTokenizer
from tinyformer.generation.generation import Sampling, generate
from tinyformer.report import head_maps, save_png
from tinyformer.report.picture import CAPTION_HEIGHT
from tinyformer.run.sample import print_samples
from tinyformer.run.settings import Generation

TOKENIZER = ByteTokenizer().build([])
PICTURE = head_maps([torch.eye(4)[None]], list("abcd"), "Attention maps")


def network():
    torch.manual_seed(0)
    return make_transformer(vocab_size=257, max_seq_len=16, tied=False)


def indented(text):
    return "".join(f"  {printable(line)}\n" for line in text.splitlines()) or "\n"


@pytest.mark.parametrize("prompt", [None, "", "👋🏽\n\nx\r\x1b[2J", "far longer than what fits", ["a", "b\n", "a"]])
def test_samples_are_printed_and_given(capsys, prompt):
    assert Generation(stop=[r"\n", "a"]).stops == ["\n", "a"]  # as a shell passes them on
    given = print_samples(Generation(prompt, num_tokens=12, temperature=1.5, seed=3), network(), TOKENIZER)
    texts, prompts = (given, prompt) if isinstance(prompt, list) else ([given], [prompt or ""])
    new = generate(network(), [[256, *text.encode()] for text in prompts], 12, Sampling(1.5), 3, stop_token=256)
    assert texts == [text + TOKENIZER.decode(tokens) for text, tokens in zip(prompts, new, strict=True)]
    headings = ["Sample 1 of 3", "Sample 2 of 3", "Sample 3 of 3"] if len(prompts) > 1 else ["A sample"]
    out = capsys.readouterr().out
    assert out == "".join(f"\n{heading}:\n{indented(text)}" for heading, text in zip(headings, texts, strict=True))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", out)  # which a terminal would obey


def test_a_sample_appears_as_it_is_drawn(capsys):
    model, seen = network(), []
    # What is on the screen when the model reads; bytes of ASCII alone, which come one at a time.
    model.encoder.register_forward_pre_hook(lambda encoder, args: seen.append(capsys.readouterr().out))
    model.readout.proj.weight.data[128:] = 0
    model.readout.proj.weight.data[:128] += 1
    text = print_samples(Generation("ab", num_tokens=12, temperature=0), model, TOKENIZER)
    assert seen[0] == "\nA sample:\n  ab"
    assert len(seen) == 12
    assert "".join(seen[1:]) + capsys.readouterr().out == indented(text)[4:]
    assert sum(map(bool, seen[1:])) >= 10


def test_a_saved_picture_has_a_line_above_it(tmp_path):
    path = save_png(PICTURE, tmp_path / "maps.png", "step 7 · data text, validation split")
    image, plain = imread(path), np.asarray(PICTURE.image) / 255
    above, below = image[:CAPTION_HEIGHT], image[CAPTION_HEIGHT:, : plain.shape[1], :3]
    assert below == pytest.approx(plain, abs=0.01)
    assert (above[..., :3] < 0.5).any()


def test_control_characters_of_names_are_printed_as_escapes(program, book, capsys):
    name = "a\x1b[2J\n\x9b.txt"
    Path("texts").mkdir()
    Path("texts", name).write_text(book.read_text())
    out = ran(program, "train.py", SMALL, TEXT.replace("book.txt", "texts"), "hydra.run.dir=run")
    assert repr(name)[1:-1] in out
    say("a\x07\nb\x85c")  # of a finding or a conversion
    assert "a\\x07\nb\\x85c\n" in (said := capsys.readouterr().out)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", out + said)


def test_a_torch_profile_traces_three_steps(program, book):
    ran(program, "train.py", SMALL, TEXT, "trainer.profiler=torch hydra.run.dir=run trainer.max_steps=9")
    names = Counter(event["name"] for event in json.loads(Path("run/trace.json").read_text())["traceEvents"])
    assert names["aten::scaled_dot_product_attention"] >= 3 * 2  # in two layers
    assert sum(count for name, count in names.items() if name.endswith(".training_step")) == 3
    assert re.search(r"^ +aten::linear +[\d.]+%", Path("run/fit-profile.txt").read_text(), re.MULTILINE)
    assert results_of("run")["steps"] == 9
