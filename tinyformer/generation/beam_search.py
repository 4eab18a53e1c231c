"""Beam search: for each source, the target with the best score among the hypotheses of an encoder–decoder."""

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.data import PairTokens
from tinyformer.errors import require_at_least, require_at_most, require_numbers
from tinyformer.nn import AttentionMask, Cache, Context, Encoder


@dataclass(frozen=True)
class Beam:
    """The settings of a beam search: how many hypotheses it keeps, and how it scores them.

    Args:
        beams: hypotheses kept for each source at each step, at most 100; 1 is greedy search.
        length_penalty: α of the score log p / ((n + c) / (1 + c))^α of a hypothesis of n tokens, from 0 to 10. At 0,
            short hypotheses are favoured.
        length_offset: its c, from 0 to 100: 0 divides by n^α, as `transformers` and Marian do; 5 is the penalty of
            GNMT (Wu et al. 2016, arXiv 1609.08144, §7) and of the original transformer (arXiv 1706.03762, §6.1).
    """

    beams: int = 4
    length_penalty: float = 1.0
    length_offset: float = 0.0

    def __post_init__(self) -> None:
        require_numbers(int, {"beams": 4}, beams=self.beams)
        require_at_least(1, {"beams": 4}, beams=self.beams)
        require_at_most(100, {"beams": 4}, beams=self.beams)
        for name, most, works in (("length_penalty", 10, 1.0), ("length_offset", 100, 5.0)):
            value = getattr(self, name)
            require_numbers(float, {name: works}, **{name: value})
            require_at_least(0, {name: works}, **{name: value})
            require_at_most(most, {name: works}, **{name: value})

    def norm(self, num_tokens: int) -> float:
        """The divisor of the log-probability of a hypothesis."""
        return float(((num_tokens + self.length_offset) / (1 + self.length_offset)) ** self.length_penalty)


@runtime_checkable
class Decoding(Protocol):
    """The interface of a network that can be searched, such as `EncoderDecoder`: a context and next-token logits."""

    training: bool

    @property
    def decoder(self) -> Encoder:
        """The decoder, whose number of layers and maximum sequence length determine the cache."""
        ...

    def eval(self) -> Any: ...

    def train(self, mode: bool = True) -> Any: ...

    def encode(self, source: Int[Tensor, "batch source_seq"], source_mask: AttentionMask, /) -> Context:
        """Encode the sources: the context that targets are decoded from."""
        ...

    def decode(
        self, tokens: Int[Tensor, "batch seq"], context: Context, /, *, cache: Cache | None = None
    ) -> Float[Tensor, "batch new_seq vocab_size"]:
        """The logits of the next token, at least at the last position."""
        ...


@torch.no_grad()
def beam_search(
    network: Decoding,
    source: Int[Tensor, "batch source_seq"],
    lengths: Int[Tensor, " batch"],
    tokens: PairTokens,
    beam: Beam | None = None,
    max_tokens: int | None = None,
    use_cache: bool = True,
) -> list[list[int]]:
    """The target with the best score that is found for each source, without the tokens that begin and end it.

    Args:
        network: the model; in evaluation mode while it decodes.
        source: token ids of the sources, padded on the right.
        lengths: number of tokens of each source.
        tokens: the ids that begin and end a target, and those that never occur in one, such as ids without a token.
        beam: `Beam()` unless given.
        max_tokens: maximum number of tokens of a target, including the one that ends it; by default the context
            length of the model.
        use_cache: whether to keep keys and values in a cache; the targets are the same without one.
    """
    room = network.decoder.max_seq_len
    require_at_least(1, {"max_tokens": room}, max_tokens=max_tokens)
    max_tokens = room if max_tokens is None else min(int(max_tokens), room)
    was_training = network.training
    network.eval()
    try:
        context = network.encode(source, AttentionMask(lengths=lengths))
        cache = Cache(len(network.decoder.layers), max_tokens) if use_cache and network.decoder.takes_cache else None
        return _search(network, context, cache, tokens, beam or Beam(), max_tokens)
    finally:
        network.train(was_training)


def _search(
    network: Decoding, context: Context, cache: Cache | None, special: PairTokens, beam: Beam, max_tokens: int
) -> list[list[int]]:
    """See `beam_search`; the rows of a batch are all hypotheses of the first source, then of the second, and so on."""
    batch, beams, device = len(context.vectors), beam.beams, context.vectors.device
    context = _select(context, torch.arange(batch, device=device).repeat_interleave(beams))
    best: list[tuple[float, list[int]]] = [(-math.inf, []) for _ in range(batch)]  # ended hypotheses with their scores
    searched = list(range(batch))
    targets = torch.full((batch, beams, 1), special.start, device=device)
    # At first all hypotheses of a source are equal, so only one of them counts.
    sums = torch.full((batch, beams), -torch.inf, device=device)
    sums[:, 0] = 0.0
    ended = torch.full((batch, beams), -torch.inf, device=device)
    for length in range(1, max_tokens + 1):
        unread = targets if cache is None else targets[:, :, -1:]
        logits = network.decode(unread.flatten(0, 1), context, cache=cache)[:, -1]
        log_p = _permitted(logits.float().log_softmax(dim=-1), special, length)
        totals = sums.unsqueeze(-1) + log_p.unflatten(0, (-1, beams))
        # Twice as many candidates as hypotheses, since the best ones may all end here.
        sums, places = totals.flatten(1).topk(2 * beams)
        parents, tokens = places // totals.shape[-1], places % totals.shape[-1]
        ends, norm = tokens == special.eos, beam.norm(length)
        closes = ends | (length == max_tokens)
        scores = (sums / norm).masked_fill(~closes, -torch.inf)[:, :beams]
        highest, place = scores.max(dim=1, keepdim=True)
        before = targets.take_along_dim(parents.gather(1, place).unsqueeze(-1), dim=1)[:, 0, 1:]
        # Copied to the host at once, since each copy waits for the device.
        texts = torch.cat([before, tokens.gather(1, place)], dim=1).tolist()
        for source, (score,), text in zip(searched, highest.tolist(), texts, strict=True):
            if score > best[source][0]:
                best[source] = score, text[:-1] if text[-1] == special.eos else text
        ended = torch.cat([ended, scores], dim=1).topk(beams).values
        sums, places = sums.masked_fill(ends, -torch.inf).topk(beams)
        goes_on = _unfinished(ended, sums / norm)
        if length == max_tokens or not len(goes_on):
            break
        parents, tokens = parents.gather(1, places)[goes_on], tokens.gather(1, places)[goes_on]
        rows = (goes_on.unsqueeze(1) * beams + parents).flatten()
        if cache is not None:
            cache.select(rows, contexts=len(goes_on) < len(sums))
        if len(goes_on) < len(sums):
            context = _select(context, rows)
        targets = torch.cat([targets.flatten(0, 1)[rows], tokens.flatten().unsqueeze(1)], dim=1)
        targets = targets.unflatten(0, (-1, beams))
        sums, ended, searched = sums[goes_on], ended[goes_on], [searched[row] for row in goes_on.tolist()]
    return [special.without_bos(text) for _, text in best]


def _permitted(log_p: Float[Tensor, "rows vocab_size"], special: PairTokens, length: int) -> Tensor:
    """The log-probabilities of the token at a position of the target (from 1), -inf for tokens not permitted there."""
    if length == 1 and special.forced_bos is not None:
        forced = torch.full_like(log_p, -torch.inf)
        forced[:, special.forced_bos] = 0.0  # certain, as in transformers
        return forced
    log_p[:, [*special.suppressed, *range(special.vocab_size or log_p.shape[1], log_p.shape[1])]] = -torch.inf
    return log_p


def _unfinished(
    ended: Float[Tensor, "batch beams"], going_on: Float[Tensor, "batch beams"]
) -> Int[Tensor, " unfinished"]:
    """The searches whose best open hypothesis scores better, at its present length, than their worst ended one.

    This is a heuristic: with a length penalty, a hypothesis that scores worse could still improve.
    """
    return (ended[:, -1] < going_on[:, 0]).nonzero().squeeze(1)


def _select(context: Context, rows: Int[Tensor, " rows"]) -> Context:
    lengths = context.mask.lengths
    return Context(context.vectors[rows], AttentionMask(lengths=None if lengths is None else lengths[rows]))
