"""What a hand at a notebook gets wrong: a sentence with the argument, its value and, where there is one, a cure."""

from pathlib import Path

import numpy as np
import pytest
import torch

from model.models import answerer, model, translator
from model.untrained import masked
from tinyformer.errors import ArgumentError

MAPS = model().attention("abc")
SOME = "texts=['A text', 'and another'] works."
KINDS = "must be a text, a list of texts, or token ids"
SHORT = (
    "len(texts[0])=1: must be more tokens: the first one has no loss, nor has a special one where tokens are masked; "
    f"{SOME}"
)
LAYERS = "must be the number of a layer, after its kind if any: layer 0, layer 1; layer=(0,) works."

MISTAKES = [
    (lambda: MAPS.save(3), "path=3: must be the path of a file; path='atlas.html' works."),
    (lambda: MAPS.save(""), "path='': is a folder; path='atlas.html' works."),
    (lambda: MAPS.plot((1, 0)), "head=(1, 0): must be given in parts: plot(1, 0)."),
    (MAPS.plot, "head=(): must be the (layer, head) of a head"),
    (lambda: MAPS.plot(1, 0, axes=3), "axes=3: must be axes of matplotlib, such as plt.gca()."),
    (lambda: (MAPS - MAPS).plot((1, 0)), "head=(1, 0): must be given in parts: plot(1, 0)."),
    (lambda: MAPS[True, 0], "head=(True, 0): must be the (layer, head) of a head"),
    (lambda: MAPS.mean([1]), "layer=[1]: must be given in parts: mean(1)."),
    (lambda: MAPS.mean("1"), f"layer=('1',): {LAYERS}"),
    (lambda: model().loss(""), SHORT),
    (lambda: model().loss(torch.tensor([[3]])), SHORT),
    (lambda: masked().loss(""), SHORT),
    (lambda: model().loss([]), f"texts=[]: {KINDS} of shape (batch, seq); {SOME}"),
    (lambda: model().loss(None), f"texts=None: {KINDS} of shape (batch, seq); {SOME}"),
    (lambda: model().attention(b"abc"), f"texts=b'abc': {KINDS}"),
    (lambda: translator().attention("a", 3), f"targets=3: {KINDS}; targets=['A text', 'and another'] works."),
    (
        lambda: answerer().run("q", "logits"),
        "capture='logits': is given in place of a text; capture='logits' works.",
    ),
    (lambda: model().run("q", "logits"), "capture='logits': is given in place of a text;"),
    (lambda: model().generate("q", beams=2), "task='CausalLM': takes prompts, num_tokens, temperature, top_k"),
    (lambda: model().answer("q", "c"), "task='CausalLM': answers no questions; SpanExtraction does."),
    (lambda: model().analyse(), "origin=None: the model was not loaded from a checkpoint"),
    (lambda: answerer().run("q", ["layers.*.keys"]), "capture=['layers.*.keys']: is given"),
    (lambda: translator().run("a", ["encoder.*"]), "capture=['encoder.*']: is given"),
    (lambda: answerer().loss("q", "a cat", 3), "answers=3: must be a text; empty where the context has none."),
    (
        lambda: model().generate(3),
        "prompts=3: must be a text, or a list of texts; prompts=['A text', 'and another'] works.",
    ),
    (lambda: translator().generate(3), "prompts=3: must be a text, or a list of texts; prompts=['A text'"),
    (lambda: model().generate(["a", None]), "prompts=['a', None]: must be a text, or a list of texts"),
    (lambda: model().generate("a", num_tokens=None), "num_tokens=None: must be an integer; num_tokens=200 works."),
    (lambda: model().generate("a", seed="x"), "seed='x': must be an integer; seed=0 works."),
    (lambda: model().generate("a", top_k=1.5), "top_k=1.5: must be an integer; top_k=20 works."),
    (lambda: model().generate("a", top_p="x"), "top_p='x': must be a number; top_p=0.9 works."),
    (lambda: model().generate("a", temperature=True), "temperature=True: must be a number; temperature=0.8 works."),
    (lambda: model().ablated([(9, 9)]).__enter__(), "heads=[[9, 9]]: must hold [layer, head] pairs of a model with 2"),
    (lambda: model().ablated(3).__enter__(), "heads=3: must be a list of heads; heads=[(0, 0)] works."),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_reported_in_a_sentence(call, message):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value).startswith(message)


def test_what_looks_like_a_mistake_and_is_none(tmp_path):
    with pytest.raises(ArgumentError, match=r"is a folder; path='.*atlas\.html' works"):
        MAPS.save(tmp_path)
    assert MAPS.save(tmp_path / "new" / "atlas.html") == Path(tmp_path, "new", "atlas.html")
    assert list(answerer().run("q", "logits", capture="logits").activations) == ["logits"]  # a context after all
    assert len(model().generate("a", num_tokens=np.int64(2), temperature=np.float32(1), top_k=np.int64(3))) == 1
