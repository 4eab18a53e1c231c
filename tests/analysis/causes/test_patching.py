"""Activation patching: by hand, each place as the definition replaces it, and each grid of TransformerLens."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from interop.models import SEQ, tokens
from model.models import classifier, masked, model, translator
from nn.model_cases import make_transformer

from analysis.contexts import columns_of, loud_encoder_decoder, loud_transformer, make_context, pair_context
from analysis.test_redundancy import made_by_hand
from analysis.test_transformer_lens import both
from tinyformer.analysis import ActivationPatching, AnalysisContext
from tinyformer.analysis.causes.patching import BY_TOKEN, PARTS, Place, patch, patch_pairs, shares_of
from tinyformer.analysis.causes.prompts import PairAnalysis, Pairs, Prompts
from tinyformer.measures.points import points_of
from tinyformer.nn import prune_heads


def pairs_of(clean, corrupted, answers, against):
    lengths = torch.full((len(clean),), clean.shape[1])
    sides = ({"inputs": ids, "lengths": lengths} for ids in (clean, corrupted))
    return Pairs(*(Prompts(batch, lengths - 1, answers, against) for batch in sides))


def moved(other, where, share, value):
    """An activation that is moved towards another one."""
    value[where] = value[where].lerp(other[where], share)
    return value


def test_heads_that_copy_a_bit_restore_and_destroy_what_is_computed_by_hand():
    """The logit of a token minus that of the one with the other first bit is (2 + 2) × the bit by heads 0 and 1."""
    context = made_by_hand()
    clean, corrupted = (torch.tensor(ids).unsqueeze(1).expand(4, 6) for ids in ([0, 1, 0, 3], [2, 3, 2, 1]))
    pairs = pairs_of(clean, corrupted, clean[:, 0], corrupted[:, 0])
    points = [name for name in points_of(context.network) if BY_TOKEN.fullmatch(name) or "output_by_head" in name]
    difference, effects = patch_pairs(context, [pairs], points)
    assert difference.tolist() == pytest.approx([8] * 4)
    heads = "layers.0.attention.output_by_head"
    expected = {("output", 0): 4, ("output", 2): 0, ("values", 1): 4, ("values", 2): 0, ("pattern", 0): 0}
    for (what, head), effect in expected.items():
        torch.testing.assert_close(effects[Place(heads, what, head)], torch.full((2, 2, 4), effect).double())
    for point in ("layers.0.attention.output", "layers.0.residual_post"):
        by_token = torch.stack([effects[Place(point, "", index)] for index in range(-6, 0)])
        torch.testing.assert_close(by_token, torch.tensor([0.0] * 5 + [8]).double().expand(2, 2, 4, 6).movedim(-1, 0))
    # A ratio of means, not a mean of ratios.
    of, effect = torch.tensor([1.0, 3]).double(), torch.tensor([1.0, 0]).double().expand(2, 2, 2)
    share = shares_of({Place("", "", 0): effect}, of, 100)[Place("", "", 0)]
    assert [share.restores.mean, share.destroys.mean, *share.estimates] == [0.25] * 4


# One has a backend without a backward pass.
BACKENDS = {"relative": "auto", "gqa+rotary+sink+gate+qk_norm": "flex", "differential": "auto", "mla": "auto"}
HATS = ("a cat", "a hat", None, "a", "b")
MODELS = {name: (partial(model, name, backend=backend), HATS) for name, backend in BACKENDS.items()} | {
    "classifier": (classifier, ("cat", "hat", None, "yes", "no")),
    "masked": (masked, ("<mask>at", "<mask>ad", None, "c", "h")),
    "translator": (translator, ("at", "it", "le", "c", "h")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_each_place_is_replaced_as_the_definition_says(name):
    """And the estimate is the slope towards it. Values are patched alone where no other head has the same ones."""
    (make, texts), changed = MODELS[name], 0
    some = make()
    context = AnalysisContext(some.network.double(), [], some.task, some.tokenizer)
    (pairs,) = PairAnalysis(*texts).pairs(context)
    points, gates = points_of(context.network), {layer.head_gate: layer for layer in context.network.attentions()}
    heads = {name: gates[point.module] for name, point in points.items() if point.module in gates}
    for own, other in ((pairs.corrupted, pairs.clean), (pairs.clean, pairs.corrupted)):
        _, effects = patch(context, own, other, [*filter(BY_TOKEN.fullmatch, points), *heads])
        (base, _), (_, after) = own.run(context), other.run(context, capture="*")
        for (point, what, number), found in effects.items():
            layer, name = heads.get(point), point.replace("output_by_head", PARTS.get(what, "output_by_head"))
            if what == "values" and layer.num_kv_heads < layer.num_heads:
                continue
            is_double = what in PARTS and layer.num_softmaxes == 2
            part = [2 * number, 2 * number + 1] if is_double and what == "pattern" else [number]
            # Differential attention normalises what the weights give, and the estimate is linear in the output only.
            shares = (1.0,) if is_double else (1.0, 1e-6)
            ways = (partial(moved, after[name], (slice(None), part), share) for share in shares)
            scores = torch.stack([own.run(context, replace={name: way})[0] for way in ways])
            expected = (scores - base) / torch.tensor(shares).unsqueeze(1)
            torch.testing.assert_close(found[: len(shares)], expected, atol=1e-4, rtol=1e-4)
            changed += bool(found[0].abs() > 1e-3)
    assert changed > 50


def test_a_head_is_named_in_pairs_of_several_lengths(tmp_path):
    """Prompts that differ in the second bit, which head 2 alone reads."""
    context, nothing, file = made_by_hand(), make_transformer(), tmp_path / "pairs.csv"
    for parameter in nothing.parameters():
        torch.nn.init.zeros_(parameter)
    file.write_text("clean,corrupted,answer,against\nA,B,,\nB,A,B,\nAA,AB,A,B\nBAA,BBB,,B\n")
    analysis = ActivationPatching(file=str(file), margin=0.9)
    found = analysis(replace(context, untrained=lambda: nothing))
    assert (found.lines["heads"][:7], found.scalars["analysis/untrained_named_heads"]) == ("1 of 3 ", 0)
    assert found.lines["  layer 0 head 2"].startswith("restores +1.0000 [+1.0000, +1.0000], destroys +1.0000 [")
    assert found.scalars["analysis/gradient/heads/r"] == pytest.approx(1)
    tokens = columns_of(found.tables["tokens"])
    assert (tokens["position"][:2], tokens["token"][:2]) == ((-2, -1), ("…", "A/B"))
    # With weights that make the same difference, no share is defined and no head is named.
    assert analysis(context).lines["heads"].startswith("0 of 3 ")


def test_findings_of_pruned_and_ablated_heads_and_of_source_tokens():
    network = loud_transformer(num_kv_heads=2, ablated_heads=[[1, 2]])
    prune_heads(network.attentions()[0], [1])
    found = ActivationPatching(num_pairs=4, num_resamples=20)(make_context(network))
    table = columns_of(found.tables["heads"])
    assert (table["layer"], table["head"]) == ((0,) * 9 + (1,) * 9, (0, 2, 3) * 3 + (0, 1, 3) * 3)
    assert table["what"][::3] == ("output", "pattern", "values") * 2
    bounds = zip(*(table[f"noising{end}"] for end in ("_low", "", "_high")), strict=True)
    assert all(low < mean < high for low, mean, high in bounds)
    assert {"A/C", "B", "C/A", "D", "A"} < set(columns_of(found.tables["tokens"])["token"])
    context = pair_context(loud_encoder_decoder(num_kv_heads=2), untrained=partial(loud_encoder_decoder, seed=1))
    found = ActivationPatching("abcd", "abed", "xy", "q", "r")(context)
    assert set(found.figures) == {"heads", "source_tokens", "tokens"}
    assert (found.scalars["analysis/named_heads"], found.facts) == (0, {"text": '"abcd / abed"'})
    tokens = columns_of(found.tables["source_tokens"])
    assert (tokens["position"][:5], tokens["token"][:5]) == ((0, 1, 2, 3, 4), ("a", "b", "c/e", "d", "<eos>"))
    assert [value != 0 for value in tokens["denoising"][:5]] == [False, False, True, False, False]
    assert [*dict.fromkeys(columns_of(found.tables["heads"])["kind"])] == ["encoder", "decoder", "cross"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_each_grid_is_that_of_transformer_lens(family, tmp_path):
    from transformer_lens import patching

    ours, bridge = both(family, tmp_path)
    by_head, clean = "layers.{}.attention.output_by_head", tokens()
    pairs = pairs_of(clean, torch.cat([clean[:, :4].flip(1), clean[:, 4:]], dim=1), clean[:, 3], clean[:, 4])
    grids = [
        (patching.get_act_patch_resid_pre, "layers.{}.residual_post", ""),  # of the layer before
        (patching.get_act_patch_attn_out, "layers.{}.attention.output", ""),
        (patching.get_act_patch_mlp_out, "layers.{}.feed_forward.output", ""),
        (patching.get_act_patch_attn_head_out_all_pos, by_head, "output"),
        (patching.get_act_patch_attn_head_pattern_all_pos, by_head, "pattern"),
        # Of the outputs that the values of the other prompts give, since theirs patches the values of a group of heads.
        (patching.get_act_patch_attn_head_out_all_pos, by_head, "values"),
    ]
    points = ["embedding", *(point.format(layer) for layer in (0, 1) for _, point, _ in grids)]
    for own, other in ((pairs.corrupted, pairs.clean), (pairs.clean, pairs.corrupted)):
        _, effects = patch(make_context(ours.network), own, other, [*dict.fromkeys(points)])
        with torch.no_grad():
            _, cache = bridge.run_with_cache(other.batch["inputs"])
            logits, before = bridge.run_with_cache(own.batch["inputs"])
            by_values = {}
            for layer in (0, 1):
                weights, values = (f"blocks.{layer}.attn.hook_{name}" for name in ("pattern", "v"))
                shared = cache[values].repeat_interleave(before[weights].shape[1] // cache[values].shape[2], dim=2)
                by_values[f"blocks.{layer}.attn.hook_z"] = torch.einsum("bhqk,bkhv->bqhv", before[weights], shared)
            for grid, point, what in grids:
                of = by_values if what == "values" else cache
                scores = grid(bridge, own.batch["inputs"], of, own.score, reduce="none").values - own.score(logits)
                for layer, index in np.ndindex(scores.shape[:2]):
                    name = point.format(layer - point.endswith("post")).replace("layers.-1.residual_post", "embedding")
                    place = Place(name, what, index if what else index - SEQ)
                    error = (effects[place][0] - scores[layer, index]).abs().max()
                    assert error <= 1e-5 * max(1.0, float(scores[layer, index].abs().max())), place
