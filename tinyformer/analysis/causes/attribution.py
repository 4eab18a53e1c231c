"""Direct logit attribution: what each head, each feed-forward network and the embeddings add to a logit."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.analysis.causes.prompts import exact_pass, read_prompt
from tinyformer.analysis.context import AnalysisContext, Head, Text, Trained, largest
from tinyformer.analysis.texts.relation_lines import compare
from tinyformer.data.batches.windows import IGNORED, Batch
from tinyformer.errors import ArgumentError
from tinyformer.measures.batches import rows_of
from tinyformer.measures.points import points_of
from tinyformer.nn import BaseAttention, Block, ClassReadout, Residual, TokenReadout
from tinyformer.nn.heads import layer_title, without_own_value
from tinyformer.nn.layers import Stream, weight_of
from tinyformer.report.charts import named_grid, token_grid
from tinyformer.report.result import AnalysisResult

NUM_PRINTED, NUM_DRAWN = 6, 24  # parts that are printed, and heads in the picture of sources

NEEDED = re.compile(
    r"embedding|token_embedding|position_embedding|final_norm|layers\.\d+\.(residual_\w+|feed_forward\.output|"
    r"(cross_)?attention\.(added_by_head|output|output_by_head|weights|values))"
)
"""The points whose activations are needed to decompose a logit."""


Part: TypeAlias = Head | int | str
"""A summand of the residual stream: a head, the index of a feed-forward layer, or the name of embeddings or biases."""


class _Direction:
    """For each token, the direction u with score = Σ u · x + constant, where x is the residual stream at one depth.

    u is carried back from the readout to the embeddings, through norms whose scale is fixed to that of the forward
    pass. So effects are direct: they exclude that a part changes the scale of a norm, or the inputs of later layers.
    """

    def __init__(self, u: Stream) -> None:
        self.u, self.constant, self.of_embedding = u, u.new_zeros(len(u)), torch.zeros_like(u)

    def effect(self, update: Tensor) -> Float[Tensor, " rows"]:
        """U · update, summed over the tokens."""
        return (self.u * update).sum(dim=(-1, -2))

    def before_norm(self, norm: nn.Module, x: Stream) -> None:
        """Carry the direction back through a norm whose input is x."""
        if isinstance(norm, nn.Identity):
            return
        if not isinstance(norm, nn.LayerNorm | nn.RMSNorm):
            reason = "must be LayerNorm or RMSNorm, which are linear except for their scale"
            raise ArgumentError("norm", type(norm).__name__, reason)
        centred = isinstance(norm, nn.LayerNorm)
        if isinstance(norm, nn.LayerNorm) and norm.bias is not None:
            self.constant = self.constant + (self.u @ norm.bias).sum(dim=-1)
        spread = x - x.mean(dim=-1, keepdim=True) if centred else x
        u = self.u * weight_of(norm) * (spread.square().mean(dim=-1, keepdim=True) + cast(float, norm.eps)).rsqrt()
        self.u = u - u.mean(dim=-1, keepdim=True) if centred else u

    def past(self, residual: Residual) -> Stream:
        """Carry the direction back to the update of a residual connection; returns the direction of the stream."""
        if residual.embedding_factor is not None:
            self.of_embedding = self.of_embedding + residual.embedding_factor * self.u
        skipping, self.u = residual.scale * self.u, residual.branch * self.u
        return skipping


class Effects(NamedTuple):
    """The contribution of each part to each row's score, in logits; the score is their sum."""

    scores: Float[Tensor, " rows"]
    parts: dict[Part, Float[Tensor, " rows"]]
    sources: dict[Head, Float[Tensor, "rows k_seq"]]  # each head's contribution by key


@torch.no_grad()
def direct_effects(context: AnalysisContext, batch: Batch, score: Callable[[Tensor], Tensor]) -> Effects:
    """The direct effect of each part on the score of each row; `score` must be linear in the logits.

    Raises:
        ArgumentError: the readout is not linear or has a softcap, or a block or a norm is of a user-defined class.
    """
    network = context.network
    network.require_heads_everywhere()
    stack, prefix = network.stacks()[-1], "decoder." if len(network.stacks()) > 1 else ""
    names = [name for name in points_of(network) if NEEDED.fullmatch(name.removeprefix(prefix)) and prefix in name]
    _require_linear(network.readout)
    _, captured = exact_pass(context, batch, capture=names)
    at = {name.removeprefix(prefix): value for name, value in captured.items()}
    with torch.enable_grad():  # the score is linear, so its gradient is the direction
        read = at["final_norm"].requires_grad_()
        scores = score(network.readout(read, context.task.mask(batch)))
        (direction,) = torch.autograd.grad(scores.sum(), read)
    scores = scores.detach()
    index_of = {layer.head_gate: index for index, layer in enumerate(network.require_heads())}
    parts, sources, last = dict[Part, Tensor](), dict[Head, Tensor](), len(stack.layers) - 1
    walk = _Direction(direction)
    walk.constant = scores - walk.effect(read.detach())  # the bias of the readout
    walk.before_norm(stack.final_norm, at[f"layers.{last}.residual_post"])
    for number, block in reversed([*enumerate(stack.layers)]):
        if not isinstance(block, Block):
            raise ArgumentError("block", type(block).__name__, "must be a Block, such as PreNormBlock")
        layer = f"layers.{number}"
        before = at[f"layers.{number - 1}.residual_post"] if number else at["embedding"]
        mid = at[f"{layer}.residual_mid"]
        sublayers = [("attention", before)]
        sublayers += [("cross_attention", mid)] if block.cross_attention is not None else []
        sublayers += [("feed_forward", at.get(f"{layer}.residual_cross_mid", mid))]
        for name, x in reversed(sublayers):
            residual, update = cast(Residual, getattr(block, f"{name}_residual")), at[f"{layer}.{name}.output"]
            norms = block.norms(name)
            walk.before_norm(norms.stream, residual(x, norms.output(update), at["embedding"]))
            skipping = walk.past(residual)
            walk.before_norm(norms.output, update)
            if name == "feed_forward":
                parts[number] = walk.effect(update)
            else:
                module = getattr(block, name)
                added = at[f"{layer}.{name}.added_by_head"]
                for head in reversed(range(added.shape[1])):
                    parts[index_of[module.head_gate], head] = walk.effect(added[:, head])
                walk.constant = walk.constant + walk.effect(update - added.sum(dim=1))
                seen = (at[f"{layer}.{name}.{point}"] for point in ("weights", "values", "output_by_head"))
                by_key = _by_key(module, walk.u, *seen)
                sources |= {(index_of[module.head_gate], head): by_key[:, head] for head in range(by_key.shape[1])}
            walk.u = skipping
    walk.u = walk.u + walk.of_embedding
    embeddings = {name: at[name] for name in ("token_embedding", "position_embedding") if name in at}
    walk.before_norm(stack.embedding_norm, torch.stack([*embeddings.values()]).sum(dim=0))
    ordered: dict[Part, Tensor] = {name.replace("_", " "): walk.effect(x) for name, x in embeddings.items()}
    ordered |= dict(reversed(parts.items())) | {"biases": walk.constant}
    return Effects(scores, ordered, dict(reversed(sources.items())))


def _require_linear(readout: nn.Module) -> None:
    """Raise an error for a readout whose logits are no sums of contributions."""
    pooling = getattr(readout, "pooling", None)
    if type(readout) not in (TokenReadout, ClassReadout) or isinstance(pooling, nn.Module):
        reason = "is not linear, so a logit is no sum of contributions; TokenReadout is linear"
        raise ArgumentError("readout", type(pooling if isinstance(pooling, nn.Module) else readout).__name__, reason)
    if isinstance(readout, TokenReadout) and readout.softcap is not None:
        reason = "must be None: a bounded logit is no sum of contributions"
        raise ArgumentError("readout_softcap", readout.softcap, reason)


def _by_key(
    layer: BaseAttention, u: Stream, weights: Tensor, values: Tensor, output_by_head: Tensor
) -> Float[Tensor, "rows heads k_seq"]:
    """The contribution of each key through each head: the sum over queries of the key's weight times u · W_O v.

    The result has no heads if a head's output is not one softmax times the values.
    """
    if layer.num_softmaxes > 1 or layer.position.mixed_dim is not None:
        return u.new_zeros(len(u), 0, weights.shape[-1])
    values = values[:, layer.head_map.kv_heads]
    read = (u @ layer.o_proj.weight).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
    mixed = weights @ values
    mixed = without_own_value(mixed, values) if layer.exclusive else mixed
    gates = (mixed * output_by_head).sum(dim=-1) / mixed.square().sum(dim=-1).clamp(min=torch.finfo(u.dtype).tiny)
    if layer.output_gate is not None and layer.output_gate.width > 1:  # a gate of each element
        gates, read = torch.ones_like(gates), read * torch.where(mixed == 0, 0.0, output_by_head / mixed)
    read = without_own_value(read, values) if layer.exclusive else read
    return torch.einsum("bhqk,bhkv,bhqv,bhq->bhk", weights, values, read, gates)


def target_score(row: Batch, logits: Float[Tensor, "rows *seq scores"]) -> Float[Tensor, " rows"]:
    """The mean logit of the targets, or of the label, minus the mean of all logits, which a softmax ignores."""
    logits = logits - logits.mean(dim=-1, keepdim=True)
    if "labels" in row:
        return logits.gather(1, row["labels"].unsqueeze(1)).squeeze(1)
    is_target = row["targets"] != IGNORED
    of_targets = logits.gather(2, row["targets"].clamp(min=0).unsqueeze(2)).squeeze(2)
    return (of_targets * is_target).sum(dim=1) / is_target.sum(dim=1).clamp(min=1)


@dataclass(eq=False)
class LogitAttribution:
    """Direct logit attribution: the contributions of heads, feed-forward networks and embeddings to a logit.

    The output matrix is applied to the residual stream, which is the sum of all these parts; so a logit is a sum with a
    term for each part (Elhage et al. 2021, transformer-circuits.pub/2021/framework; Wang et al. 2022, arXiv
    2211.00593). The final norm, and each norm of a sublayer's output or of the stream between layers, keeps the scale
    that it has in the forward pass.
    Only direct effects are included: a head's effects through later layers are not.

    Args:
        text: the prompt, see `read_prompt`; a pair of texts for a classifier of pairs; the source of an
            encoder–decoder, whose decoder computes the logit. By default, the mean logit of the evaluated
            split's targets is attributed, minus the mean of all logits, with 95 % intervals over the windows.
        target: the beginning of the target in an encoder–decoder.
        answer: the token (or label) whose logit is attributed; by default, the model's prediction.
        against: a token (or label) whose logit is subtracted.
    """

    text: Text | None = None
    target: str | None = None
    answer: str | None = None
    against: str | None = None
    num_windows: int = 32
    needs_gradient = False

    def __post_init__(self) -> None:
        for name in ("target", "answer", "against"):
            if self.text is None and (value := getattr(self, name)) is not None:
                raise ArgumentError(name, value, "needs a prompt, the argument `text`", {name: None})

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        context.task.require_loss()
        if self.text is None:
            rows = rows_of(context.batches)
            passes = [direct_effects(context, row, partial(target_score, row)) for row in rows]
            what = f"the mean logit of the targets of {len(rows)} {context.row}s, relative to that of all tokens"
            return _of_parts(context, passes, what, ["low", "high"])
        prompts = read_prompt(context, self.text, self.target, self.answer, self.against)
        effects = direct_effects(context, prompts.batch, prompts.score)
        found = _of_parts(context, [effects], f"the logit of {prompts.title(context)}", [])  # one prompt, no interval
        found.facts = context.facts_of_text(self.text)
        if effects.sources:
            _add_sources(context, found, effects.sources, prompts.keys(context))
        return found


def _of_parts(context: AnalysisContext, passes: Sequence[Effects], what: str, bounds: Sequence[str]) -> AnalysisResult:
    """The result with the mean effect of each part over the rows; `bounds` are the names of the interval's columns."""
    scores = torch.cat([effects.scores for effects in passes]).double().cpu()
    parts = {part: torch.cat([of.parts[part] for of in passes]).double().cpu() for part in passes[0].parts}
    error = float((torch.stack([*parts.values()]).sum(dim=0) - scores).abs().max())
    changes = {_name(context, part): compare(values) for part, values in parts.items()}
    cells = {(layer or "embeddings", name): of.mean for (layer, name), of in changes.items()}
    found = AnalysisResult({"analysis/logit": float(scores.mean()), "analysis/largest_error": error})
    number = f"{float(scores.mean()):.3f}, the sum of {len(changes)} parts (largest error {error:.0e})"
    found.lines["attribution"] = f"{what}: {number}; norms have the scale of this forward pass:"
    for name in largest({name: abs(change.mean) for name, change in changes.items()}, NUM_PRINTED):
        found.lines[f"  {' '.join(filter(None, name))}"] = str(changes[name])
    rows = [[*name, of.mean, *(getattr(of, bound) for bound in bounds)] for name, of in changes.items()]
    found.tables["attribution"] = ["layer", "part", "logits", *bounds], rows
    found.figures["attribution"] = named_grid(cells, f"What each part adds to {what}", "logits")
    return found


def _add_sources(
    context: AnalysisContext, found: AnalysisResult, sources: Mapping[Head, Tensor], keys: Mapping[str, list[str]]
) -> None:
    """Add the effect of each key through each head on a prompt's score."""
    of_heads = {
        head: [*zip(itertools.count(), keys[context.kinds[head[0]]], of_keys[0].tolist())]
        for head, of_keys in sources.items()
    }
    rows = [[*_name(context, head), *row] for head, of_head in of_heads.items() for row in of_head]
    found.tables["sources"] = ["layer", "part", "position", "token", "logits"], rows
    drawn = largest({head: float(of_keys.abs().max()) for head, of_keys in sources.items()}, NUM_DRAWN)
    cells = {
        (" ".join(_name(context, head)), at, token): effect
        for head in sorted(drawn)
        for at, token, effect in of_heads[head]
    }
    found.figures["sources"] = token_grid(cells, "What each head adds to the logit from each key (below)", "logits")


def _name(context: AnalysisContext, part: Any) -> tuple[str, str]:
    """The title of a part's layer, which is "" for embeddings and biases, and the name of the part."""
    if isinstance(part, str):
        return "", part
    if isinstance(part, int):
        kind = ["decoder"] if "decoder" in context.kinds else []
        return layer_title((*kind, part)), "feed-forward"
    return layer_title(context.addresses[part[0]]), f"head {context.head_address(*part)[-1]}"
