"""Generation of texts: sampling from a causal model, and beam search in an encoder–decoder."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.data import PairTokens, TextTokenizer
from tinyformer.errors import ArgumentError, require_at_least
from tinyformer.nn import AttentionMask, Cache, Context, Transformer

Prompts: TypeAlias = Sequence[Sequence[int]] | Int[Tensor, "batch prompt_seq"]
"""Token ids of each prompt; as a list, prompts may differ in length."""


@dataclass(frozen=True)
class Sampling:
    """The rule by which the next token is sampled from the logits.

    `top_k` limits sampling to the k most probable tokens (Fan et al. 2018, arXiv 1805.04833), `top_p` to the smallest
    set of tokens with at least this total probability (nucleus sampling, Holtzman et al. 2019, arXiv 1904.09751).
    """

    temperature: float = 1.0  # divisor of the logits; 0 takes the most probable token
    top_k: int | None = None
    top_p: float | None = None
    suppressed: Sequence[int] = ()  # ids that are never sampled, such as `TextTokenizer.missing_ids`
    repetition_penalty: float = 1.0  # of tokens in the text so far; 1 for no penalty (arXiv 1909.05858)

    def __post_init__(self) -> None:
        require_at_least(0, {"temperature": 0.8}, temperature=self.temperature)
        require_at_least(1e-6, {"repetition_penalty": 1.2}, repetition_penalty=self.repetition_penalty)
        require_at_least(1, top_k=self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ArgumentError("top_p", self.top_p, "must be above 0 and at most 1", {"top_p": 0.9})

    def draw(
        self, logits: Float[Tensor, "batch vocab_size"], generators: Sequence[torch.Generator | None]
    ) -> Int[Tensor, " batch"]:
        """Sample one token for each row with the row's random generator; None stands for torch's default generator."""
        never = torch.tensor(self.suppressed, dtype=torch.long, device=logits.device)
        logits = logits.index_fill(-1, never, -torch.inf)
        if self.temperature < 1e-6:  # a division would overflow fp32
            return logits.argmax(dim=-1)
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            kept = logits.topk(self.top_k, dim=-1)  # exactly k, even if several logits equal the k-th
            logits = torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)
        probabilities = logits.softmax(dim=-1)
        if self.top_p is not None:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            # A token is kept while the tokens before it add up to less than top_p, so the first token is always kept.
            dropped = ordered.cumsum(dim=-1) - ordered >= self.top_p
            probabilities = probabilities.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), 0.0)
        pairs = zip(probabilities, generators, strict=True)
        return torch.cat([torch.multinomial(row, 1, generator=generator) for row, generator in pairs])


def require_amount(num_tokens: int, seed: int, num_return_sequences: int = 1, stops: Collection[str] = ()) -> None:
    """Raise an `ArgumentError` for an invalid number of tokens or texts, an invalid seed, or an empty stop string."""
    require_at_least(1, num_return_sequences=num_return_sequences)
    require_at_least(0, {"num_tokens": 200}, num_tokens=num_tokens, seed=seed)
    if "" in stops:
        raise ArgumentError("stop", "", "must not be empty: it would end every text", {"stop": ["A", "B"]})


def generate(
    network: Transformer,
    prompts: Prompts,
    num_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    **settings: Any,
) -> list[list[int]]:
    """The new tokens of each prompt, without the prompt; see `stream` for the arguments."""
    texts: list[list[int]] = [[] for _ in prompts]
    for drawn in stream(network, prompts, num_tokens, sampling, seed, **settings):
        for text, token in zip(texts, drawn, strict=True):
            if token is not None:
                text.append(token)
    return texts


def stream(
    network: Transformer,
    prompts: Prompts,
    num_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    use_cache: bool = True,
    stop_token: int | Collection[int] | None = None,
    is_end: Callable[[list[int]], bool] | None = None,
) -> Iterator[list[int | None]]:
    """Yield the new token of each prompt at each step; None if the prompt is not yet processed or its text has ended.

    Prompts may differ in length. There is no padding: all prompts start at position 0, and while longer prompts are
    still being processed, shorter prompts are already continued. The model sees the last `max_seq_len` tokens. Up to
    that length each new token takes one step with a KV cache; beyond it, positions shift, and each token recomputes the
    whole window.

    Prompt `i` has its own random generator, seeded `seed + i`, so that its continuation depends neither on the cache
    nor on the other prompts. It may depend on the device, and on rounding where two tokens are equally probable.

    Args:
        network: a causal model; in evaluation mode while it generates.
        prompts: token ids of the prompts, at least one token each.
        num_tokens: number of tokens to sample for each prompt.
        sampling: the sampling rule; None for `Sampling()`.
        seed: the seed of the first prompt's generator.
        use_cache: whether to keep keys and values in a cache; the tokens are the same without a cache.
        stop_token: the token, or several tokens, any of which ends a text without being part of it.
        is_end: function that gets the token ids of a prompt and its continuation, and returns True to end the text.
    """
    rows = prompts.tolist() if isinstance(prompts, Tensor) else [list(prompt) for prompt in prompts]
    stops = stop_token if isinstance(stop_token, Collection) else {stop_token}
    sampling = sampling or Sampling()
    device = next(network.parameters()).device
    total = max(map(len, rows), default=0) + num_tokens
    # After the token that ends a text, its row is filled with zeros while other texts continue.
    tokens = torch.zeros(len(rows), total, dtype=torch.long, device=device)
    for row, prompt in enumerate(rows):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    generators = [torch.Generator(device).manual_seed(seed + row) for row in range(len(rows))]
    capacity, cache = min(network.encoder.max_seq_len, total - 1), None
    use_cache = use_cache and network.encoder.takes_cache
    remaining = {row: num_tokens for row in range(len(rows)) if num_tokens}
    was_training, end = network.training, 0
    network.eval()
    try:
        while remaining:
            # One token further, or straight to the end of the shortest remaining prompt.
            end = max(end + 1, min(len(rows[row]) for row in remaining))
            if not use_cache or end > network.encoder.max_seq_len:
                cache, unread = None, tokens[:, max(0, end - network.encoder.max_seq_len) : end]
            elif cache is None or end > cache.length + 1:
                # A new cache from the first token: not every kernel takes several queries after cached keys.
                cache, unread = Cache(len(network.encoder.layers), capacity), tokens[:, :end]
            else:
                unread = tokens[:, end - 1 : end]
            logits = _next_logits(network, unread, cache)
            drawn: list[int | None] = [None] * len(rows)
            read = [row for row in remaining if len(rows[row]) <= end]
            if sampling.repetition_penalty != 1:
                penalty, seen = sampling.repetition_penalty, tokens[:, :end]
                scores = logits.gather(1, seen)
                logits = logits.scatter(1, seen, torch.where(scores < 0, scores * penalty, scores / penalty))
            tokens[read, end] = chosen = sampling.draw(logits[read], [generators[row] for row in read])
            for row, token in zip(read, chosen.tolist(), strict=True):
                if token in stops:
                    del remaining[row]
                    continue
                drawn[row] = token
                remaining[row] -= 1
                if not remaining[row] or (is_end and is_end(tokens[row, : end + 1].tolist())):
                    del remaining[row]
            yield drawn
    finally:
        network.train(was_training)


def ends(tokenizer: TextTokenizer, stops: Sequence[str]) -> dict[str, Any]:
    """The arguments of `stream` that end a text at an end token of the tokenizer, or after one of the `stops`."""

    def is_end(ids: Sequence[int]) -> bool:
        text = tokenizer.decode(ids)
        both = zip(text, tokenizer.decode(ids[:-1]), strict=False)
        known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        return any(text.find(word, max(0, known + 1 - len(word))) >= 0 for word in stops)

    return {"stop_token": tokenizer.end_ids, "is_end": is_end if stops else None}


@torch.no_grad()
def _next_logits(
    network: Transformer, unread: Int[Tensor, "batch seq"], cache: Cache | None
) -> Float[Tensor, "batch vocab_size"]:
    # Not `network(…)`: a compiled one would be recompiled for each length, and it returns logits of all positions.
    encoded = network.encoder(unread, AttentionMask(causal=True), cache)
    return network.readout(encoded[:, -1:])[:, 0]


@dataclass(frozen=True)
class Beam:
    """The settings of a beam search: how many hypotheses it keeps, and how it scores them.

    Args:
        beams: hypotheses kept for each source at each step; 1 is greedy search.
        length_penalty: α of the score log p / ((n + c) / (1 + c))^α of a hypothesis of n tokens, at least 0. At 0,
            short hypotheses are favoured.
        length_offset: c of this score, at least 0: 0 divides by n^α, as `transformers` and Marian do; 5 is as in GNMT
            (Wu et al. 2016, arXiv 1609.08144, §7) and the original transformer (arXiv 1706.03762, §6.1).
    """

    beams: int = 4
    length_penalty: float = 1.0
    length_offset: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(1, {"beams": 4}, beams=self.beams)
        require_at_least(0, length_penalty=self.length_penalty, length_offset=self.length_offset)

    def norm(self, num_tokens: int) -> float:
        """The divisor of the log-probability of a hypothesis of `num_tokens` tokens."""
        return float(((num_tokens + self.length_offset) / (1 + self.length_offset)) ** self.length_penalty)


@torch.no_grad()
def beam_search(
    network: Any,
    source: Int[Tensor, "batch source_seq"],
    lengths: Int[Tensor, " batch"],
    tokens: PairTokens,
    beam: Beam | None = None,
    max_tokens: int | None = None,
    use_cache: bool = True,
) -> list[list[int]]:
    """The target with the best score found for each source, without the tokens that begin and end the target.

    Args:
        network: an `EncoderDecoder`, or another network with `encode`, `decode` and `decoder`; in evaluation mode while
            it decodes.
        source: token ids of the sources, padded on the right.
        lengths: number of tokens of each source.
        tokens: the ids that begin and end a target, and the ids that a target never contains, such as unused ids.
        beam: the settings of the search; None for `Beam()`.
        max_tokens: maximum number of tokens of a target, including the one that ends it; by default the context
            length of the model.
        use_cache: whether to keep keys and values in a cache; the targets are the same without a cache.
    """
    room = network.decoder.max_seq_len
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
    network: Any, context: Context, cache: Cache | None, special: PairTokens, beam: Beam, max_tokens: int
) -> list[list[int]]:
    """The search of `beam_search`; a batch has all hypotheses of the first source, then of the second, and so on."""
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
        # Twice as many candidates as hypotheses, since the best candidates may all end here.
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


def _unfinished(
    ended: Float[Tensor, "sources beams"], open_scores: Float[Tensor, "sources beams"]
) -> Int[Tensor, " unfinished"]:
    """The sources whose best open hypothesis scores better, at its present length, than their worst ended one.

    This is a heuristic: with a length penalty, a hypothesis that scores worse could still improve.
    """
    return (ended[:, -1] < open_scores[:, 0]).nonzero().squeeze(1)


def _permitted(log_p: Float[Tensor, "rows vocab_size"], special: PairTokens, length: int) -> Tensor:
    """The log-probability of each token at position `length` of the target, -inf for tokens not permitted there."""
    if length == 1 and special.forced_bos is not None:
        forced = torch.full_like(log_p, -torch.inf)
        forced[:, special.forced_bos] = 0.0  # certain, as in transformers
        return forced
    log_p[:, [*special.suppressed, *range(special.vocab_size or log_p.shape[1], log_p.shape[1])]] = -torch.inf
    return log_p


def _select(context: Context, rows: Int[Tensor, " rows"]) -> Context:
    lengths = context.mask.lengths
    return Context(context.vectors[rows], AttentionMask(lengths=None if lengths is None else lengths[rows]))
