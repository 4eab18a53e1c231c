"""The attention maps of a text in Python, against the definition and against values computed by hand."""

import pytest
import torch
from analysis.contexts import EOS, TOKENIZER, loud_transformer
from nn.variants import NAMES, able
from tokenizers import Tokenizer, models, pre_tokenizers

from model.models import BYTES, answerer, model, transformer, translator
from tinyformer.data import SpecialTokens, TextTokenizer
from tinyformer.errors import ArgumentError
from tinyformer.measures import CROSS_MEASURES, MEASURES, PATTERNS, Axes, capture_attention
from tinyformer.model import LayerMaps, TextMaps
from tinyformer.model.model import Model
from tinyformer.nn import AttentionMask, DifferentialAttention, prune_heads
from tinyformer.tasks import CausalLM, MaskedLM, Seq2Seq

TEXT = "The bank, Ελ 👋🏽"


def by_hand(network, ids, mask):
    """The weights of each layer as `BaseAttention.weights` defines them for the layer's input."""
    inputs, layers = [], network.attentions()
    hooks = [layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for layer in layers]
    with torch.no_grad():
        network(ids, mask)
        for hook in hooks:
            hook.remove()
        for layer, x in zip(layers, inputs, strict=True):
            weights = layer.weights(x, mask)[0]
            is_differential = isinstance(layer, DifferentialAttention)
            yield weights[0::2] - layer.factor() * weights[1::2] if is_differential else weights


def layer_of(*heads, address=(0,), **changes):
    weights, numbers = torch.tensor(heads), tuple(range(len(heads)))
    parts = {"weights": weights, "logits": weights.log(), "factor": None, "ablated": frozenset()} | changes
    return LayerMaps(address, heads=numbers, names=tuple(map(str, numbers)), **parts)


def maps_of(*layers, tokens="ab"):
    ids = [*tokens.encode()]
    return TextMaps(layers, {"": Axes([*tokens], [*tokens])}, {"": (ids, ids)}, BYTES)


@pytest.mark.parametrize("name", NAMES)
def test_maps_are_the_weights_of_the_definition_on_every_backend(name):
    network = transformer(name)
    expected = [*by_hand(network, Model(network, BYTES, CausalLM()).tokenize(TEXT)[0], AttentionMask(causal=True))]
    for backend in ("eager", *able(name, training=False)):
        maps = model(name, backend=backend).attention(TEXT)
        for layer, head in maps.heads:
            torch.testing.assert_close(maps[layer, head], expected[layer][head], atol=2e-5, rtol=1e-5)


def test_words_are_those_of_the_pre_tokenizer_where_tokens_drop_white_space():
    library = Tokenizer(models.BPE({"<unk>": 0, "</s>": 1, "c": 2, "a": 3, "t": 4}, [], unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    some, asking = model(tokenizer=TextTokenizer(library)), answerer(TextTokenizer(library))
    maps = some.attention(["cat catat,</s>", "ca t cata t"]) + asking.attention(["cat", "ca"], ["ca t cat", "tat"])
    expected = ["cat catat <unk> </s>", "ca t cata t", "cat </s> ca t cat", "ca </s> tat"]
    assert [" ".join(of.words().tokens[1:]) for of in maps] == expected


@pytest.mark.parametrize("task", [CausalLM(), MaskedLM()])
def test_a_text_among_others_has_the_maps_of_the_text_alone(task):
    some = model(task=task)
    texts = [TEXT, "", "x", "a" * 31]
    together = some.attention(texts)
    assert [len(maps.tokens) for maps in together] == some.tokenize(texts)[1].tolist()
    for text, maps in zip(texts, together, strict=True):
        for head in maps.heads:
            assert torch.equal(maps[head], some.attention(text)[head])
            assert (maps[head].triu(1).abs().sum() > 0) == (isinstance(task, MaskedLM) and len(text) > 0)
    assert model(tokenizer=None).attention(torch.tensor([[5, 3, 200]]))[0].tokens == ["5", "3", "200"]


def test_both_softmaxes_of_differential_attention_have_names():
    some = model("differential")
    maps, factor = some.attention(TEXT), some.network.attentions()[1].factor().item()
    torch.testing.assert_close(maps[1, 2], maps[1, "2a"] - factor * maps[1, "2b"])
    torch.testing.assert_close(maps.mean(1), torch.stack([maps[1, head] for head in range(4)]).mean(dim=0))
    assert [row["head"] for row in maps.measures()][:4] == ["0a", "0b", "1a", "1b"]


def test_heads_keep_their_numbers_and_ablated_heads_their_weights():
    some, ablated = model(), model(ablated_heads=[[0, 1]]).attention(TEXT)
    whole = some.attention(TEXT)
    prune_heads(some.network.attentions()[0], [0, 2])
    maps = some.attention(TEXT)
    assert maps.heads == [(0, 1), (0, 3), *((1, head) for head in range(4))]
    assert torch.equal(maps[0, 3], whole[0, 3])
    assert torch.equal(ablated[0, 1], whole[0, 1])
    assert not torch.equal(ablated[1, 1], whole[1, 1])
    assert [head for head in ablated.heads if "(ablated)" in ablated.panel_of(head).title] == [(0, 1)]


def test_means_and_rollout_leave_out_ablated_heads_and_have_the_scales_of_the_model():
    kept, dead = [[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [0.1, 0.9]]
    maps = maps_of(
        layer_of(kept, dead, ablated=frozenset({1}), skip=0.5, branch=-2.0),
        layer_of(dead, ablated=frozenset({0}), address=(1,)),
        layer_of([[0.6, 0.4], [0.8, 0.0]], address=(2,), skip=0.0),  # a sink takes a fifth of the second row
    )
    torch.testing.assert_close(maps.mean(0), torch.tensor(kept))
    torch.testing.assert_close(maps.mean(), torch.tensor([[0.8, 0.2], [0.65, 0.25]]))
    with pytest.raises(ArgumentError, match=r"^layer=\(1,\): has no head that is not ablated"):
        maps.mean(1)
    # Layer 0: 2 A + 0.5 I = [[2.5, 0], [1, 1.5]], so [[1, 0], [0.4, 0.6]]. Layer 1: I. Layer 2: [[0.6, 0.4], [1, 0]].
    torch.testing.assert_close(maps.rollout(), torch.tensor([[0.76, 0.24], [1.0, 0.0]]))
    assert [row["self"] is None for row in maps.measures()] == [False, True, True, False]
    some = Model(loud_transformer(num_layers=1, ablated_heads=[[0, 1], [0, 2]]), TOKENIZER, CausalLM())
    residual = some.network.encoder.layers[0].attention_residual
    residual.skip, residual.branch = 0.25, 3.0  # those of a model
    maps = some.attention("abc")
    expected = 1.5 * (maps[0, 0] + maps[0, 3]) + 0.25 * torch.eye(4)
    torch.testing.assert_close(maps.rollout(), expected / expected.sum(-1, keepdim=True))


def test_a_row_of_measures_for_each_head():
    first, second = maps_of(layer_of([[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]])).measures()
    assert [*first] == ["layer", "head", *MEASURES, *PATTERNS]
    assert (first["layer"], first["head"], second["head"]) == (0, 0, 1)
    assert (first["self"], second["self"], first["previous_token"]) == (0.75, 1.0, 0.5)
    assert first["induction"] is None  # no token repeats
    assert maps_of(layer_of([[1.0, 0.0], [0.5, 0.5]]), tokens="aa").measures()[0]["duplicate_token"] == 0.5


def test_a_source_and_its_target():
    some = translator()
    maps = some.attention("abcde", "fgh")
    source, target, predicted = [*"abcde", "<eos>"], ["<eos>", *"fgh"], [*"fgh", "<eos>"]
    assert maps.tokens == {"encoder": (source, source), "decoder": (target, target), "cross": (predicted, source)}
    encode = some.tokenizer.encode
    with capture_attention(some) as captured, torch.no_grad():
        some.network(torch.tensor([[*encode("abcde"), EOS]]), torch.tensor([[EOS, *encode("fgh")]]))
    for layer, weights in zip(maps.layers, captured, strict=True):
        torch.testing.assert_close(layer.weights, weights[0])
    assert torch.equal(maps["cross", 0, 3], maps.layers[-1].weights[3])
    assert {row["kind"] for row in maps.measures()} == {"encoder", "decoder", "cross"}
    assert {*maps.measures()[-1]} == {"kind", "layer", "head", *MEASURES, *PATTERNS, *CROSS_MEASURES}
    assert maps.words()["cross", 0, 0].shape == (2, 2)  # "fgh" and <eos>
    assert maps.rollout().shape == (6, 6)


def test_a_source_alone_has_the_target_that_the_model_decodes():
    some = translator()
    decoded = some.generate("abc")[0][:15]  # as much of it as the decoder can read
    first, second = some.attention(["abc", "f"])
    assert torch.equal(first["cross", 0, 2], some.attention("abc", decoded)["cross", 0, 2])
    assert torch.equal(second["cross", 0, 2], some.attention("f")["cross", 0, 2])
    ids = torch.tensor([[*some.tokenizer.encode("abc"), EOS]])
    unnamed = translator(tokenizer=None, task=Seq2Seq(special_tokens=SpecialTokens(eos=EOS)))
    for targets in ((), ([some.tokenizer.encode(decoded)],)):
        (maps,) = unnamed.attention(ids, *targets)
        assert torch.equal(maps["decoder", 0, 1], first["decoder", 0, 1])
