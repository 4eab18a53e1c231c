"""A trained model of one stack in Python: it encodes, scores and generates text."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.data import TextTokenizer
from tinyformer.errors import ArgumentError
from tinyformer.generation import Sampling, generate
from tinyformer.nn import Transformer
from tinyformer.tasks import Task

Texts: TypeAlias = str | Sequence[str] | Tensor
"""A text, a list of texts, or token ids of shape (batch, seq)."""


class Model:
    """A trained network with its tokenizer and task; made by `load`.

    Texts are padded on the right, which does not affect the results: outputs for padding are zero. As in training, each
    text is preceded by the token that starts a document, so that an empty text has one token; token ids are used as
    they are.

    Args:
        network: the model.
        tokenizer: its tokenizer; a model without one only takes token ids.
        task: the task that it was trained for.
    """

    def __init__(self, network: Transformer, tokenizer: TextTokenizer | None, task: Task) -> None:
        self.network, self.task, self._tokenizer = network.eval(), task, tokenizer

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer.

        Raises:
            ArgumentError: it has none.
        """
        if self._tokenizer is None:
            reason = "the model has no tokenizer, so it takes a tensor of token ids of shape (batch, seq)"
            raise ArgumentError("tokenizer", None, reason)
        return self._tokenizer

    @property
    def max_seq_len(self) -> int:
        """The maximum length of a text in tokens, including the one that starts it."""
        return self.network.encoder.max_seq_len

    def tokenize(self, texts: Texts) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, " batch"]]:
        """Token ids, padded on the right, and the length of each text in tokens.

        Raises:
            ArgumentError: there is no text, one is too long, or a token id is unknown.
        """
        rows = self._rows(texts)
        for index, row in enumerate(rows):
            if not 0 < len(row) <= self.max_seq_len:
                limit = f"must be 1 to {self.max_seq_len:,} tokens, including the one that starts a text"
                raise ArgumentError(f"len(texts[{index}])", len(row), limit)
        lengths = torch.tensor([len(row) for row in rows])
        # A tensor of token ids has no padding, so its value does not matter there.
        tokens = torch.full((len(rows), int(lengths.max())), self._tokenizer.eos_id if self._tokenizer else 0)
        for row, padded in zip(rows, tokens, strict=True):
            padded[: len(row)] = torch.tensor(row)
        device = self.network.encoder.token_embedding.weight.device
        return tokens.to(device), lengths.to(device)

    @torch.no_grad()
    def encode(self, texts: Texts) -> Float[Tensor, "batch seq d_model"]:
        """The encoder's output for each token.

        Raises:
            ArgumentError: see `tokenize`.
        """
        tokens, lengths = self.tokenize(texts)
        mask = self.task.mask({"inputs": tokens, "lengths": lengths})
        return _without_padding(self.network.encoder(tokens, mask), lengths)

    @torch.no_grad()
    def logits(self, texts: Texts) -> Float[Tensor, "batch *seq scores"]:
        """The logits: of shape (batch, seq, vocab_size), or (batch, num_classes) from a classifier.

        Raises:
            ArgumentError: see `tokenize`.
        """
        tokens, lengths = self.tokenize(texts)
        logits = self.network(tokens, self.task.mask({"inputs": tokens, "lengths": lengths}))
        return _without_padding(logits, lengths) if logits.ndim == 3 else logits

    def generate(
        self,
        prompts: str | Sequence[str],
        num_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> list[str]:
        """Continue each prompt up to the end of its document; the results include the prompts.

        Args:
            prompts: texts of any length; the model sees the last `max_seq_len` tokens.
            num_tokens: how many tokens to sample, at most.
            temperature: 0 takes the most probable token; see `Sampling`, also for the next two.
            top_k: sample from the k most probable tokens only.
            top_p: sample from the smallest set of tokens with this total probability.
            seed: prompt `i` is sampled with the seed `seed + i`, independently of the others.

        Raises:
            ArgumentError: a setting is out of range, or the model's task is not causal language modelling.
        """
        if not self.task.generates:
            raise ArgumentError("task", type(self.task).__name__, "cannot generate text; CausalLM can")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        rows = self._rows(prompts) if prompts else []
        sampling = Sampling(temperature, top_k, top_p)
        new = generate(self.network, rows, num_tokens, sampling, seed, stop_token=self.tokenizer.eos_id)
        return [
            prompt + self.tokenizer.continuation(ids, after=row)
            for prompt, row, ids in zip(prompts, rows, new, strict=True)
        ]

    def _rows(self, texts: Any) -> list[list[int]]:
        """The token ids of each text."""
        if isinstance(texts, Tensor):
            require_token_ids("texts", texts, self.network.encoder.vocab_size)
            return texts.tolist()
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
            raise ArgumentError("texts", texts, "must be a text, a list of texts, or token ids of shape (batch, seq)")
        return [[self.tokenizer.eos_id, *ids] for ids in self.tokenizer.encode_batch(texts)]


def require_token_ids(argument: str, ids: Tensor, vocab_size: int) -> None:
    """Refuse a tensor that does not hold sequences of token ids.

    Raises:
        ArgumentError: it has another shape or dtype, or an id is not in the vocabulary.
    """
    if ids.ndim != 2 or len(ids) == 0:
        raise ArgumentError(f"{argument}.shape", list(ids.shape), "must be (batch, seq), with at least one sequence")
    if ids.is_floating_point() or ids.is_complex():
        raise ArgumentError(f"{argument}.dtype", ids.dtype, "token ids must be integers")
    for unknown in ids[(ids < 0) | (ids >= vocab_size)].tolist():
        raise ArgumentError(argument, unknown, f"token ids go from 0 to {vocab_size - 1}")


def _without_padding(
    x: Float[Tensor, "batch seq width"], lengths: Int[Tensor, " batch"]
) -> Float[Tensor, "batch seq width"]:
    is_padding = torch.arange(x.shape[1], device=x.device) >= lengths.unsqueeze(-1)
    return x.masked_fill(is_padding.unsqueeze(-1), 0.0)
