"""Heads by their weights: circuits and composition as in TransformerLens, as in a forward pass, and as made by hand."""

from functools import partial
from itertools import product

import pytest
import torch
from matplotlib.text import Annotation
from nn.model_cases import block_factory, make_encoder, make_transformer
from torch import nn

from analysis.contexts import TOKENIZER, columns_of, loud, loud_encoder_decoder, make_context, pair_context
from analysis.test_transformer_lens import both
from tinyformer import nn as ours
from tinyformer.analysis import AnalysisContext, HeadWeights
from tinyformer.analysis.causes import weights
from tinyformer.analysis.causes.weights import Chance, circuits, folded_stacks, scores_of
from tinyformer.analysis.removal.ablation import ablated
from tinyformer.errors import ArgumentError
from tinyformer.nn import LayerNorm, Residual, RMSNorm, Transformer
from tinyformer.nn.heads import split_heads
from tinyformer.nn.projections import ProjectionNorm
from tinyformer.tasks import CausalLM

ROTARY = partial(ours.RotaryPosition, 16)


def divided_by(norm, x):
    """The number that a norm divides each vector by, which the circuits leave out."""
    if isinstance(norm, ProjectionNorm):
        return x.square().mean(dim=(1, 3), keepdim=True).sqrt().expand(*x.shape[:3], 1).squeeze(-1)
    x = x - x.mean(dim=-1, keepdim=True) if isinstance(norm, LayerNorm) else x
    return torch.ones(x.shape[:-1]) if isinstance(norm, nn.Identity) else x.square().mean(dim=-1).sqrt()


def matrices(network, distances=(0,)):
    """The whole matrices of the circuits of the first layer, by name."""
    of_first = (circuit for circuit in circuits(folded_stacks(network), distances) if circuit.layer == 0)
    return {c.name: (c.source @ c.a.mT @ c.b @ c.target.mT).float() for c in of_first}


@pytest.mark.parametrize(
    ("norm", "options"),
    [
        (partial(LayerNorm, bias=False), {"num_kv_heads": 2}),
        (RMSNorm, {"num_kv_heads": 1, "attention_position": ROTARY, "qk_norm": True, "embedding_norm": True}),
        (partial(RMSNorm, weight=False), {"num_kv_heads": 2, "qk_norm": "projection", "scaled_embedding": True}),
        (nn.Identity, {"score": "general", "attention_residual": partial(Residual, branch=-3)}),
        (partial(LayerNorm, bias=False), {"kind": ours.SandwichBlock}),
        (RMSNorm, {"kind": ours.ReorderedBlock}),
    ],
)
@torch.no_grad()
def test_entries_are_what_a_layer_computes_from_pairs_of_tokens(norm, options):
    torch.manual_seed(0)
    network = loud(make_transformer(norm=norm, position=False, tied=False, **options))
    for parameter in network.parameters():
        if parameter.ndim == 1:
            parameter.normal_(1, 0.5)
    stack, block, tokens = network.encoder, network.encoder.layers[0], torch.randperm(50)[:9]
    layer, found = block.attention, matrices(network, range(9))
    embedded = stack.token_embedding.weight[tokens][None] * (32**0.5 if options.get("scaled_embedding") else 1)
    x = stack.embedding_norm(embedded)
    norms = block.norms("attention")
    vectors = norms.input(x)
    sizes = (divided_by(norms.input, x) * divided_by(stack.embedding_norm, embedded)).mT
    q, k = (split_heads(projection(vectors), 8) for projection in (layer.q_proj, layer.k_proj))
    of_q, of_k = divided_by(layer.q_norm, q)[0, :, :, None], divided_by(layer.k_norm, k)[0, :, None]
    scores = layer.maps_of_call(layer.inputs(vectors)).logits[0] / layer.score.scale * sizes * sizes.mT
    scores *= of_q * of_k.repeat_interleave(4 // len(of_k), dim=0)
    for distance in range(9):
        entries = found.get(f"QK_{distance}", found.get("QK"))[:, tokens[:, None], tokens]
        torch.testing.assert_close(*(of.diagonal(-distance, 1, 2) for of in (entries, scores)), rtol=1e-3, atol=1e-3)
    for head, entries in enumerate(found["OV"][:, tokens]):
        with ablated(layer, [other for other in range(4) if other != head]):  # each token attends to itself alone
            heads_output = layer(vectors.mT.permute(2, 0, 1))
        written = block.attention_residual(torch.zeros_like(heads_output), norms.output(heads_output))
        logits = network.readout(stack.final_norm(written))[:, 0] * divided_by(stack.final_norm, written) * sizes
        logits *= divided_by(norms.output, heads_output)
        torch.testing.assert_close(entries, logits - logits.mean(dim=1, keepdim=True), rtol=1e-3, atol=1e-3)


def analysed(network, control=make_transformer, **options):
    return HeadWeights(**options)(make_context(network, untrained=lambda further: control()))


def test_the_largest_and_smallest_entries_are_those_of_the_whole_matrix(monkeypatch):
    network, names, expected = loud(make_transformer(ablated_heads=[[0, 2]])), TOKENIZER.token_strings(range(50)), []
    for (name, of_heads), head in product(matrices(network).items(), (0, 1, 3)):
        order = of_heads[head].flatten().argsort(descending=True).tolist()
        ends = [("most", place) for place in order[:3]] + [("least", place) for place in order[:-4:-1]]
        expected += [[0, head, name, end, names[place // 50], names[place % 50]] for end, place in ends]
    for entries in (60, 1700, 2**24):  # blocks of one row, of 34 with a smaller last one, and the whole
        monkeypatch.setattr(weights, "ENTRIES", entries)
        found = analysed(network, num_tokens=3, num_untrained=2)
        assert [row[:-1] for row in found.tables["tokens"][1] if row[0] == 0] == expected
    assert (len(found.tables["circuits"][1]), len(found.tables["composition"][1])) == (7, 3 * 3 * 4)


def made_by_hand(copied):
    """Tokens are dimensions 0 to 3 of 8; head 0 of layer 0 writes tokens 0 and 1 into dimensions 4 and 5.

    In layer 1, head 0 has keys of dimensions 4 and 6 and values of 4 and 5; head 1 has queries of dimension 5 and
    promotes `copied` for tokens 0 and 1.
    """
    encoder = ours.Encoder(4, 2, 8, 8, block_factory(d_model=8, num_heads=2, head_dim=2, norm=nn.Identity), nn.Identity)
    network = Transformer(encoder, partial(ours.TokenReadout, tied=False)).eval()
    (first, second), unit = network.attentions(), torch.eye(8)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        for table in (encoder.token_embedding, network.readout.proj):
            table.weight.copy_(unit[:4])
        first.q_proj.weight[:2] = first.k_proj.weight[:2] = first.v_proj.weight[:2] = unit[:2]
        first.o_proj.weight[:, :2] = unit[4:6].T
        second.q_proj.weight[:] = unit[[0, 1, 5, 5]]
        second.k_proj.weight[:] = unit[[4, 6, 2, 2]]
        second.v_proj.weight[:] = unit[[4, 5, 0, 1]]
        second.o_proj.weight[:] = torch.cat([unit[:2], copied], dim=0).T
    return network


@pytest.mark.parametrize(
    ("rows", "sign", "copying"),
    [([0, 1], 1, 1), ([0, 1], -1, -1), ([1, 0], 1, -1 / 3)],  # eigenvalues 1 and 1/2, as U has mean 0; -1 and 1/2
)
def test_scores_are_those_computed_by_hand(rows, sign, copying):
    network, tokens = made_by_hand(sign * torch.eye(8)[rows]), torch.zeros(2, 4, dtype=torch.long)
    control = partial(make_transformer, vocab_size=4, d_model=8, num_heads=2, head_dim=2, position=False)
    batch = {"inputs": tokens, "targets": tokens, "lengths": torch.full((2,), 4)}
    found = HeadWeights()(AnalysisContext(network, [batch], CausalLM(), TOKENIZER, untrained=lambda further: control()))
    table = columns_of(found.tables["circuits"])
    assert table["OV"] == pytest.approx([0, 0, 0, copying])
    assert table["QK"] == pytest.approx([1, 0, 0, 0])
    columns, rows = found.tables["composition"]
    assert columns[:6] == ["composition", "layer_writer", "head_writer", "layer_reader", "head_reader", "score"]
    scores = {tuple(row[:5]): row[5] for row in rows}
    expected = {("Q", 0, 0, 1, 1): 0.5**0.5, ("K", 0, 0, 1, 0): 0.5, ("V", 0, 0, 1, 0): 0.5**0.5}
    assert scores == pytest.approx(dict.fromkeys(scores, 0) | expected)
    assert found.lines["  keys of layer 1 head 0"].startswith("from layer 0 head 0: 0.500")
    assert list(found.lines)[1] == "K-composition"
    arrows = [text.xy for text in found.figures["composition"].axes[0].texts if isinstance(text, Annotation)]
    assert sorted(arrows) == sorted((row[4], 1) for row in rows if row[-1])


def test_the_bound_of_chance_by_hand():
    chance = Chance.of([{"a": 1.0, "b": 3.0}, {"a": 5.0, "b": 1.0}])
    assert chance == pytest.approx((2.5, 4 + 1.8658 * 2**0.5), abs=1e-4)  # the 95 % quantile is 1.8658 deviations away


def test_each_stack_of_an_encoder_decoder_and_a_network_without_logits_of_tokens():
    network = loud_encoder_decoder(num_kv_heads=2, pruned_heads=[["encoder", 1, 0]])
    found = HeadWeights(num_tokens=1)(pair_context(network))
    columns, rows = found.tables["circuits"]
    assert columns[:4] == ["kind", "layer", "head", "OV"]
    expected = [[*layer, head] for layer in [("encoder", 0), ("encoder", 1), ("decoder", 0)] for head in range(4)]
    assert [row[:3] for row in rows] == [row for row in expected if row != ["encoder", 1, 0]]
    assert [row[3] is None for row in rows] == [True] * 7 + [False] * 4
    assert len(found.tables["composition"][1]) == 3 * 4 * 3
    network = partial(Transformer, make_encoder(num_layers=1), partial(ours.ClassReadout, labels=["a", "b"]))
    assert list(analysed(network().eval(), network).tables) == ["tokens", "circuits"]


REFUSED = {
    "PostNormBlock normalises the residual stream between any two heads": {"kind": ours.PostNormBlock},
    "Attention with forget=true adds to its scores a decay": {"forget": True},
    "AdditiveScore is no product of query and key": {"score": "additive"},
    "Attention with a convolution or shifted_keys has heads that read several": {"shifted_keys": True},
    "Tanh cannot be folded into weights": {"norm": lambda d_model: nn.Tanh()},
    "Residual with skip=0 leaves no path": {"feed_forward_residual": partial(Residual, skip=0)},
    "LatentAttention has heads that are no products of W_Q, W_K, W_V and W_O": {},
    "attention='LSTM': is no BaseAttention": {},
    "distances=16: must be at most 15": {"attention_position": ROTARY},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_product_of_weights_is_refused(reason):
    network = make_transformer(**REFUSED[reason]).eval()
    if not REFUSED[reason]:
        network.encoder.layers[1].attention = ours.LSTM(32) if "LSTM" in reason else ours.LatentAttention(32, 4)
    with pytest.raises(ArgumentError, match=reason):
        HeadWeights(distances=[0, 16])(make_context(network))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_eigenvalues_and_compositions_are_those_of_the_library(family, tmp_path):
    model, bridge = both(family, tmp_path)
    bridge.enable_compatibility_mode(disable_warnings=True)
    with torch.no_grad():
        found, e = scores_of(model.network, [0], make_context(model.network).heads), bridge.W_E
        expected = {name: bridge.all_composition_scores(name).scores[0, :, 1] for name in "QKV"}
        for name, matrix in {"OV": e @ bridge.OV @ bridge.W_U, "QK": e @ bridge.QK @ e.T}.items():
            values = matrix.eigenvalues
            expected[name if name in found else f"{name}_0"] = (values.sum(dim=-1) / values.abs().sum(dim=-1)).real
    assert found.keys() == expected.keys()
    for name, scores in found.items():
        assert list(scores.values()) == pytest.approx(expected[name].flatten().tolist(), abs=1e-5), name
