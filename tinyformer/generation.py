"""Text from a model, one token at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.nn import AttentionMask, Cache, Transformer

Prompts: TypeAlias = Sequence[Sequence[int]] | Int[Tensor, "batch prompt_seq"]
"""Token ids, of equal or unequal number."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the model's scores.

    Args:
        temperature: the scores are divided by it; 0 takes the likeliest token.
        top_k: draw among the k likeliest tokens only (Fan et al. 2018, arXiv 1805.04833).
        top_p: draw among the fewest tokens that together have this probability (Holtzman et al. 2019, arXiv
            1904.09751).

    Raises:
        ValueError: a value is out of its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"generate.temperature={self.temperature} is negative; 0 takes the likeliest token.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"generate.top_k={self.top_k}: at least one token is left to draw, generate.top_k=1.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"generate.top_p={self.top_p} is no share above 0 and up to 1; generate.top_p=0.9 is.")

    def draw(
        self, logits: Float[Tensor, "batch vocab_size"], generator: torch.Generator | None = None
    ) -> Int[Tensor, " batch"]:
        """One token for each row."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        probabilities = logits.softmax(dim=-1)
        if self.top_p is not None:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            # A token stays while those before it have not yet reached top_p, so the likeliest always does.
            beyond = ordered.cumsum(dim=-1) - ordered >= self.top_p
            probabilities = probabilities.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def generate(
    network: Transformer,
    prompts: Prompts,
    num_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    use_cache: bool = True,
    stop_token: int | None = None,
) -> list[list[int]]:
    """Go on from prompts, all at once; see `stream`.

    Returns:
        The new tokens of each prompt, without the prompt: `num_tokens` of them, or those before `stop_token`.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    for drawn in stream(network, prompts, num_tokens, sampling, seed, use_cache, stop_token):
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
    stop_token: int | None = None,
) -> Iterator[list[int | None]]:
    """Go on from prompts, all at once, token by token.

    Prompts may be of different lengths. None is padded: all begin at position 0, and one that is longer is read while
    others go on. The model sees the last `max_seq_len` tokens: up to there each new token costs one step behind a
    cache, beyond it positions shift and all is computed anew, as without a cache.

    Greedy text depends on neither the cache nor the other prompts. Prompt `i` draws with a generator of its own, seeded
    `seed + i`, so that what is drawn does not depend on the other prompts either; it may on the device, and where two
    tokens are as likely to the last digit, on rounding.

    Args:
        network: a causal model; while its tokens are drawn it is in evaluation mode.
        prompts: at least one token each.
        num_tokens: how many are drawn for each prompt.
        sampling: how they are drawn.
        seed: fixes what is drawn.
        use_cache: whether to remember keys and values; the tokens are the same without.
        stop_token: ends a text, and is no part of it.

    Returns:
        At each step the new token of each prompt, None for one that is still read or has ended.

    Raises:
        ValueError: a prompt has no tokens or some that the model does not know, or `num_tokens` is negative.
    """
    rows = prompts.tolist() if isinstance(prompts, Tensor) else [list(prompt) for prompt in prompts]
    for index, prompt in enumerate(rows):
        unknown = [token for token in prompt if not 0 <= token < network.encoder.vocab_size]
        if not prompt or unknown:
            problem = f"holds token {unknown[0]}" if unknown else "has no tokens"
            raise ValueError(
                f"prompts[{index}] {problem}; one token or more from 0 to {network.encoder.vocab_size - 1} is a prompt."
            )
    if num_tokens < 0:
        raise ValueError(f"generate.num_tokens={num_tokens} is negative; generate.num_tokens=200 works.")
    return _steps(network, rows, num_tokens, sampling or Sampling(), seed, use_cache, stop_token)


def _steps(
    network: Transformer,
    prompts: list[list[int]],
    num_tokens: int,
    sampling: Sampling,
    seed: int,
    use_cache: bool,
    stop_token: int | None,
) -> Iterator[list[int | None]]:
    device = next(network.parameters()).device
    total = max(map(len, prompts), default=0) + num_tokens
    # A text that has ended is filled with zeros while others go on.
    tokens = torch.zeros(len(prompts), total, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    generators = [torch.Generator(device).manual_seed(seed + row) for row in range(len(prompts))]
    reader = _Reader(network, use_cache, room=min(network.encoder.max_seq_len, total - 1))
    left = {row: num_tokens for row in range(len(prompts)) if num_tokens}
    was_training, end = network.training, 0
    network.eval()
    try:
        while left:
            # On by one token, or by as many as are known of all texts that have not ended.
            end = max(end + 1, min(len(prompts[row]) for row in left))
            logits = reader.next_logits(tokens[:, :end])
            drawn: list[int | None] = [None] * len(prompts)
            for row in [row for row in left if len(prompts[row]) <= end]:
                token = int(sampling.draw(logits[row : row + 1], generators[row]))
                if token == stop_token:
                    del left[row]
                    continue
                drawn[row] = tokens[row, end] = token
                left[row] -= 1
                if not left[row]:
                    del left[row]
            yield drawn
    finally:
        network.train(was_training)


class _Reader:
    """A model that reads on in texts, and what it remembers of them.

    Args:
        network: the model.
        use_cache: whether it remembers anything.
        room: how many tokens, at most.
    """

    def __init__(self, network: Transformer, use_cache: bool, room: int) -> None:
        self.network, self.use_cache, self.room = network, use_cache, room
        self.cache: Cache | None = None

    @torch.no_grad()
    def next_logits(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch vocab_size"]:
        """The scores of the token after these, of which all but some at the end were read before."""
        encoder, seq = self.network.encoder, tokens.shape[1]
        if not self.use_cache or seq > encoder.max_seq_len:
            self.cache, unread = None, tokens[:, -encoder.max_seq_len :]
        elif self.cache is None or seq > self.cache.length + 1:
            # From the start: not every kernel takes several queries behind a cache.
            self.cache, unread = Cache(len(encoder.layers), self.room), tokens
        else:
            unread = tokens[:, -1:]
        # Not the network's own call, which may be compiled, for each length anew; nor scores that nobody reads.
        encoded = encoder(unread, AttentionMask(causal=True), self.cache)
        return self.network.readout(encoded[:, -1:])[:, 0]
