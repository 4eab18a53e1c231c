"""Direct logit attribution: the parts add up to the logit, by key and by head, and are those of TransformerLens."""

import pydoc
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from commands import ROOT
from model.models import LABELS, answerer, causal, classifier, model, randomised, translator
from nn.model_cases import BLOCKS, make_encoder
from nn.variants import factory, network
from torch import nn

from analysis.contexts import CAPPED, columns_of, make_context, pair_context
from analysis.test_transformer_lens import IDS, assert_same, both
from tinyformer.analysis import AnalysisContext, LogitAttribution
from tinyformer.analysis.atlas.snippets import promoted_tokens
from tinyformer.analysis.causes.attribution import direct_effects
from tinyformer.analysis.causes.prompts import Prompts, read_prompt
from tinyformer.analysis.context import Snapshot
from tinyformer.errors import ArgumentError
from tinyformer.model.model import Model
from tinyformer.nn import ClassReadout, LayerNorm, MaskedTokenReadout, Residual, RMSNorm, SandwichBlock, Transformer
from tinyformer.tasks import CausalLM, Classification, Seq2Seq


def scaled(**options):
    """A network whose residual connections have scales, and whose embeddings are normalised."""
    some = causal(embedding_norm=True, **options)
    for layer in some.network.encoder.layers:
        layer.attention_residual, layer.feed_forward_residual = Residual(0.7, 1.3), Residual(1.2, 0.4)
    return some


def mixing(**options):
    """A network whose layers mix in the first layer's values and the embedding, with factors other than 0 and 1."""
    some = causal(value_residual=0.4, attention_residual=partial(Residual, learned=True, embedding=True), **options)
    for name, parameter in some.network.named_parameters():
        if "factor" in name:
            nn.init.normal_(parameter)
    return some


def of_block(name, **options):
    """A network with a kind of block, in which the weights and biases of norms are random, too."""
    some = causal(kind=BLOCKS[name], **options)
    randomised(some.network)
    return some


def pooled(pooling):
    network = Transformer(make_encoder(max_seq_len=24), partial(ClassReadout, labels=LABELS, pooling=pooling))
    return Model(randomised(network), classifier()._tokenizer, Classification(LABELS))


def bert():
    return Model(Transformer(make_encoder(), MaskedTokenReadout), causal()._tokenizer, CausalLM())


MODELS = {
    "learned positions": causal,
    "grouped, rotary, sink, gate": partial(model, "gqa+rotary+sink+gate+qk_norm"),
    "latent": partial(model, "mla+rotary+qk_norm"),
    "differential": partial(model, "differential+t5"),
    "values by distance": partial(model, "gqa+relative"),
    **{name: partial(of_block, name, norm=LayerNorm, bias=True) for name in BLOCKS},
    "RMSNorm": partial(causal, norm=RMSNorm),
    "no weight, scaled embedding": partial(causal, norm=partial(LayerNorm, weight=False), scaled_embedding=True),
    "scales": scaled,
    "side inputs": mixing,
    "exclusive, gated": partial(model, "gqa+exclusive+elementwise+rotary"),
    "scales and norms of outputs": partial(scaled, kind=SandwichBlock, norm=RMSNorm),
    "pruned": partial(causal, pruned_heads=[[0, 1], [1, 0], [1, 3]]),
    "encoder–decoder": translator,
    "mean": partial(pooled, "mean"),
    "first token": partial(pooled, "cls"),
}


def context_of(some, batches=()):
    return AnalysisContext(some.network.double(), batches, some.task, some._tokenizer)


@pytest.mark.parametrize("name", MODELS)
def test_the_parts_add_up_to_the_logit_and_the_keys_to_the_head(name):
    context = context_of(MODELS[name]())
    answer, against = ("maybe", "no") if isinstance(context.task, Classification) else ("c", "d")
    prompts = read_prompt(context, "abba", "ab" if isinstance(context.task, Seq2Seq) else None, answer, against)
    scores, effects, sources = direct_effects(context, prompts.batch, prompts.score)
    torch.testing.assert_close(scores, prompts.run(context)[0])
    torch.testing.assert_close(torch.stack([*effects.values()]).sum(dim=0), scores, atol=1e-9, rtol=0)
    assert all(bool((effect != 0).all()) for _, effect in effects.items())
    for head, by_key in sources.items():
        torch.testing.assert_close(by_key.sum(dim=1), effects[head], atol=1e-9, rtol=0)
    assert bool(sources) == (name not in ("differential", "values by distance"))


@pytest.mark.parametrize("name", BLOCKS)
def test_the_tokens_that_a_head_promotes_have_the_largest_effects(name):
    context = context_of(of_block(name, norm=RMSNorm))
    prompts, point = read_prompt(context, "abba", None, "c", None), "layers.0.attention.output_by_head"
    outputs = prompts.run(context, capture=point)[1][point][:, 2, -1]
    effects = [
        direct_effects(context, prompts.batch, lambda logits, at=at: logits[:, -1, at]).parts[0, 2] for at in range(50)
    ]
    promoted = promoted_tokens(context.network, context.network.attentions()[0], 2, outputs.float())
    assert torch.equal(promoted[0], torch.cat(effects).topk(3).indices)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_attribution_is_that_of_the_library(family: str, tmp_path: Path) -> None:
    ours, bridge = both(family, tmp_path)
    bridge.set_use_attn_result(True)
    places, answers, against = torch.tensor([18, 11]), torch.tensor([3, 5]), torch.tensor([4, 7])
    context = AnalysisContext(ours.network, [], ours.task, ours._tokenizer)
    batch = {"inputs": IDS, "lengths": torch.full((2,), 19)}
    _, effects, _ = direct_effects(context, batch, Prompts(batch, places, answers, against).score)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(IDS)
    parts, labels = cache.get_full_resid_decomposition(-1, expand_neurons=False, return_labels=True)
    parts = cache.apply_ln_to_stack(parts, -1)[:, torch.arange(2), places]
    direction = (bridge.W_U[:, answers] - bridge.W_U[:, against]) * bridge.ln_final.weight.unsqueeze(1)
    expected = dict(zip(labels, torch.einsum("pbd,db->pb", parts, direction), strict=True))
    for part, effect in effects.items():
        names = {"token embedding": "embed", "position embedding": "pos_embed"}
        name = "L{}H{}".format(*part) if isinstance(part, tuple) else f"{part}_mlp_out"
        name = names.get(part, name) if isinstance(part, str) else name
        if part != "biases":  # theirs hold no bias of the final norm
            assert_same(effect, expected[name], name)


def test_findings_of_a_text_and_of_the_sample(tmp_path):
    some = causal()
    found = LogitAttribution(text="abba", answer="c", against="d")(context_of(some, make_context(some.network).batches))
    assert list(found.figures) == list(found.tables) == ["attribution", "sources"]
    assert sum(columns_of(found.tables["attribution"])["logits"]) == pytest.approx(found.scalars["analysis/logit"])
    assert found.lines["attribution"].startswith('the logit of "c" minus "d": ')
    for context in (make_context(some.network, padded=True), pair_context(translator().network)):
        table = columns_of((found := LogitAttribution()(context)).tables["attribution"])
        assert sum(table["logits"]) == pytest.approx(found.scalars["analysis/logit"], abs=1e-4)
        low, mean, high = (torch.tensor(table[name]) for name in ("low", "logits", "high"))
        assert bool(((low <= mean) & (mean <= high)).all())


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (causal, {"answer": "a"}, "answer='a': needs a prompt"),
        (bert, {"text": "ab"}, "readout='MaskedTokenReadout': is not linear"),
        (partial(causal, readout=CAPPED), {"text": "ab"}, "readout_softcap=3.0: must be None: a bounded logit is"),
        (answerer, {"text": "ab"}, "does not predict a token after a text"),
    ],
)
def test_mistakes(make, options, message):
    with pytest.raises(ArgumentError, match=message):
        LogitAttribution(**options)(context_of(make()))


OPTIONS = dict.fromkeys(("num_windows", "num_resamples", "num_untrained", "num_steps", "num_pairs", "period"), 4)
OPTIONS |= {"num_sequences": 2, "num_fits": 1, "num_draws": 1, "steps": 1, "gradients": False}
OWN = {"circuit": {"measures": {"induction": 1e-9}}, "relations": {"text": "ab ba", "pairs": [["ba", "ab"]]}}
TEXTS = {"text": "ab ba", "clean": "abba", "corrupted": "acca", "answer": "b", "against": "d"}
REFUSED = {"mla+rotary": {"weights"}, "differential+t5": {"weights"}, "gqa+relative": {"atlas"}, "mqa+window": set()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_every_analysis_takes_every_attention_with_a_text_and_without(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    context, refused = make_context(network(factory(kind)), 4), set()
    steps = [Snapshot(step, lambda further=0: network(factory(kind))) for step in (0, 5)]
    context = replace(context, split=lambda: context.batches, snapshots=steps, untrained=steps[0].network)
    for path in (ROOT / "conf" / "analysis").glob("*.yaml"):
        known, own = yaml.safe_load(path.read_text()), OPTIONS | OWN.get(path.stem, {})
        for values in (own, own | TEXTS):
            try:
                analysis = pydoc.locate(known["_target_"])
                analysis(**{key: values[key] for key in values.keys() & known})(context, tmp_path)
            except ArgumentError:
                refused.add(path.stem)
    assert refused == REFUSED[kind] | {"alignment"}
