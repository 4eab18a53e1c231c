"""The error for a mistake in a notebook names the argument, its value and, if there is one, a value that works."""

from functools import partial

import pytest
import torch

from model.models import TEXTS, answerer, causal, classifier, masked, model, translator
from tinyformer.errors import ArgumentError

UNNAMED = model(tokenizer=None)
MAPS = model().attention("abc")
SOME = "texts=['A text', 'and another'] works."
KINDS = "must be a text, a list of texts, or token ids"
SHORT = "must be more tokens: the first token has no loss, and a masked model's special tokens have none; " + SOME
POINT = "layers.0.residual_mid"


def run(**arguments):
    return lambda: causal().run(TEXTS, **arguments)


def ablated(make, *arguments):
    return lambda: make().ablated(*arguments).__enter__()


MISTAKES = [
    # Maps.
    (lambda: model("differential").attention("ab").rollout(), "attention='differential': has negative weights"),
    (lambda: MAPS - model().attention("ab"), "maps.tokens=['<eos>', 'a', 'b']: must equal the tokens of the"),
    (
        lambda: causal(pruned_heads=[[0, 0], [0, 2]]).attention("a")[0, 0],
        "head=(0, 0): must be the (layer, head) of a head; head=(0, 1) works.",
    ),
    # Texts.
    (partial(model().loss, texts=""), f"len(texts[0])=1: {SHORT}"),
    (lambda: model().tokenize(["a", "b" * 32]), "len(texts[1])=33: must be 1 to 32 tokens, including the special"),
    (lambda: UNNAMED.attention("a"), "tokenizer=None: the model has no tokenizer and takes only token ids"),
    (UNNAMED.attention(torch.tensor([[3]]))[0].words, "tokenizer=None: the model has no tokenizer, so its"),
    (lambda: model().analyse(), "origin=None: the model has no checkpoint"),
    # What other tasks read.
    (partial(classifier().loss, TEXTS), "labels=None: must be 3, one for each text; labels=['no', 'no', 'no'] works."),
    (lambda: classifier().loss(TEXTS, ["no", "yes", "so"]), "labels='so': must be one of no, yes, maybe, 0, 1, 2."),
    (lambda: classifier(["1", "2", "3"]).loss("a", 0), "labels='0': must be one of 1, 2, 3."),
    (partial(translator().loss, TEXTS), f"targets=(): {KINDS};"),
    (lambda: translator().attention(TEXTS, ["un"]), "targets=['un']: must be 3, as many as texts."),
    (lambda: translator().attention("a", "b").mean(), "layer=(): must be (layer,), or (kind, layer)"),
    (lambda: answerer().loss("who", "a cat", "dog"), "answers[0]='dog': must be a part of its context."),
    (lambda: answerer().attention("Who is it?", "a" * 15), "num_windows(contexts[0])=2: must be 1: at most 14 tokens"),
    # Generation.
    (lambda: masked().generate("a"), "task='MaskedLM': cannot generate text; CausalLM can."),
    (partial(model().generate, "q", stop=""), "stop='': must not be empty: it would end every text; stop=['A', 'B']"),
    # Points.
    (run(capture="layers.0.residul_mid"), f"capture='layers.0.residul_mid': matches no point; there are {POINT}"),
    (run(replace={"*_mid": torch.relu, POINT: torch.relu}), f"replace='{POINT}': matches {POINT}, which '*_mid'"),
    (run(replace={POINT: torch.zeros(32)}), f"replace={{'{POINT}': 'torch.float32 (32,) on cpu'}}: must be a tensor"),
    # Heads.
    (ablated(causal, [(2, 0)]), "heads=[[2, 0]]: must hold [layer, head] pairs of a model with 2 layers of 4 heads"),
    (ablated(translator, [(0, 1)]), "heads=[[0, 1]]: must hold [kind, layer, head] with a kind of encoder, decoder,"),
    (ablated(causal, [(0, 1)], "median"), "mode='median': must be one of zero, mean, resample."),
    (ablated(causal, [(0, 1)], "mean"), "texts=None: must be given for mode='mean'"),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_reported_in_a_sentence(call, message):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value).startswith(message)
    if caught.value.works and isinstance(call, partial):
        call(**caught.value.works)
