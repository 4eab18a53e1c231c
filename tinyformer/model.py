"""A trained model of one stack, to encode, score and generate text in Python."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, cast, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer import inspection
from tinyformer.batch import IGNORED, Batch
from tinyformer.data import TextTokenizer
from tinyformer.errors import ArgumentError, require_choice, require_numbers
from tinyformer.generation import Sampling, generate
from tinyformer.inspection.forward import ForwardPass, Replacement, without_padding
from tinyformer.inspection.inspected import Head, Inspected
from tinyformer.nn import Transformer
from tinyformer.tasks import Classification, Task

Texts: TypeAlias = str | Sequence[str | tuple[str, str]] | Tensor
"""A text, a list of texts, of pairs of texts for a classifier of pairs, or token ids of shape (batch, seq)."""

SOME_TEXTS = ["A text", "and another"]
"""Texts that errors show as an example that works."""


class Model(Inspected):
    """A trained network with its tokenizer and task; made by `load`.

    Texts are padded on the right, which does not affect the results: outputs for padding are zero. A text is read
    between the special tokens that its tokenizer adds: for an imported model those of `transformers`, for others, as in
    training, the token that starts a document. Special tokens can be spelled out in a text, such as `<mask>`; token ids
    are used as they are.

    Args:
        network: the model.
        tokenizer: its tokenizer; a model without one takes only token ids.
        task: the task that it was trained for.
        origin: the checkpoint of its weights.
    """

    network: Transformer

    def __init__(
        self,
        network: Transformer,
        tokenizer: TextTokenizer | None,
        task: Task,
        origin: "inspection.Origin | None" = None,
    ) -> None:
        self.network, self.task, self.origin, self._tokenizer = network.eval(), task, origin, tokenizer

    def __repr__(self) -> str:
        return inspection.describe(type(self).__name__, self.network, self.task, self.origin)

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
        """The maximum length of a text in tokens, including the special tokens around it."""
        return self.network.encoder.max_seq_len

    def tokenize(self, texts: Texts) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, " batch"]]:
        """Token ids, padded on the right, and the length of each text in tokens.

        Raises:
            ArgumentError: there is no text, one is too long, or a token id is unknown.
        """
        rows = self._rows(texts)
        for index, row in enumerate(rows):
            if not 0 < len(row) <= self.max_seq_len:
                limit = f"must be 1 to {self.max_seq_len:,} tokens, including the special tokens around a text"
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
        return without_padding(self.network.encoder(tokens, mask), lengths)

    @torch.no_grad()
    def logits(self, texts: Texts) -> Float[Tensor, "batch *seq scores"]:
        """The logits: of shape (batch, seq, vocab_size), or (batch, num_classes) from a classifier.

        Raises:
            ArgumentError: see `tokenize`.
        """
        tokens, lengths = self.tokenize(texts)
        logits = self.network(tokens, self.task.mask({"inputs": tokens, "lengths": lengths}))
        return without_padding(logits, lengths) if logits.ndim == 3 else logits

    @overload
    def attention(self, texts: str) -> "inspection.TextMaps": ...

    @overload
    def attention(self, texts: Sequence[str | tuple[str, str]] | Tensor) -> "list[inspection.TextMaps]": ...

    def attention(self, texts: Texts) -> "inspection.TextMaps | list[inspection.TextMaps]":
        """The exact attention maps of a text: `maps[layer, head]`, queries × keys; see `TextMaps`.

        Args:
            texts: a text; for several, or for token ids, the result is a list with the maps of each, without padding.

        Raises:
            ArgumentError: see `tokenize`.
        """
        ids, lengths = self.tokenize(texts)
        maps = [self._maps(row[:length]) for row, length in zip(ids, lengths.tolist(), strict=True)]
        return maps[0] if isinstance(texts, str) else maps

    def _maps(self, tokens: Int[Tensor, " seq"]) -> "inspection.TextMaps":
        return inspection.maps_of_tokens(self.network, self.task, self._tokenizer, tokens, str(self.origin or ""))

    def run(
        self, texts: Texts, capture: str | Sequence[str] = (), replace: Mapping[str, Replacement] | None = None
    ) -> ForwardPass:
        """A forward pass that returns activations, or replaces them and recomputes everything downstream.

            logits, activations = model.run("The cat", capture=["layers.*.residual_post"])
            model.run("The cat", replace={"layers.0.attention.values": torch.zeros_like})

        It is exact for every attention backend and for a compiled network, which runs uncompiled. Activations are zero
        at padding. Where attention weights are replaced, the layer's output is computed from them by definition.

        Args:
            texts: see `tokenize`.
            capture: names of `points`, with `*` for any characters.
            replace: for points, named in the same way, a tensor of the activation's shape, dtype and device, or a
                function of the activation that returns one. Functions may change their argument in place.

        Raises:
            ArgumentError: there is no such point, a replacement does not fit, or see `tokenize`.
        """
        return self._run(self._batch(texts), capture, replace)

    def ablated(
        self, heads: Sequence[Head], mode: str = "zero", texts: Texts | None = None
    ) -> AbstractContextManager[None]:
        """Ablate heads in all that the model computes inside the block.

            with model.ablated([(0, 1), (2, 3)], mode="mean", texts=texts):
                print(model.loss(texts), model.generate("The cat"))

        In nested blocks, the heads of both are ablated; where both name a head, the inner block decides.

        Args:
            heads: (layer, head) pairs; heads keep their numbers when others are pruned.
            mode: what replaces the output of a head at every token: `zero`; its `mean` over the tokens of the texts
                (Wang et al. 2022, arXiv 2211.00593); `resample`, its output at a token of the texts, drawn at random
                for each position with a fixed seed (Chan et al. 2022, causal scrubbing).
            texts: the texts that the replacement is taken from, without padding; not needed for `zero`.

        Raises:
            ArgumentError: there is no such head or mode, or no text where one is needed.
        """
        return self._ablated(heads, mode, None if texts is None else self._batch(texts))

    @torch.no_grad()
    def loss(self, texts: Texts, labels: int | str | Sequence[int | str] | None = None) -> Float[Tensor, " batch"]:
        """The loss of each text in nats per target.

        Targets are the tokens after the first one; with a masked language model, each token but the special ones is
        masked in turn, so that exp(loss) is the pseudo-perplexity (Salazar et al. 2020, arXiv 1910.14659). A classifier
        has one target, the label.

        Args:
            texts: see `tokenize`.
            labels: for a classifier, the label of each text, or its index.

        Raises:
            ArgumentError: a text has no target, a label is missing or unknown, or see `tokenize`.
        """
        batch = self._batch(texts)
        if isinstance(self.task, Classification):
            batch["labels"] = self._label_ids(labels, len(batch["inputs"])).to(batch["inputs"].device)
        elif labels is not None:
            raise ArgumentError("labels", labels, f"must be None: {type(self.task).__name__} has no labels")
        elif self._tokenizer is not None:
            special = torch.tensor(sorted(self._tokenizer.special_ids), device=batch["inputs"].device)
            batch["targets"] = batch["inputs"].masked_fill(torch.isin(batch["inputs"], special), IGNORED)
        nats, targets = self.task.nats_of_texts(self.network, batch, getattr(self._tokenizer, "mask_id", None))
        for index in (targets == 0).nonzero().flatten().tolist():
            reason = "must be more tokens: the first one has no loss, nor has a special one where tokens are masked"
            raise ArgumentError(f"len(texts[{index}])", int(batch["lengths"][index]), reason, {"texts": SOME_TEXTS})
        return nats / targets

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
        integers = {"num_tokens": num_tokens, "seed": seed} | ({} if top_k is None else {"top_k": top_k})
        require_numbers(int, {"num_tokens": 200, "seed": 0, "top_k": 20}, **integers)
        numbers = {"temperature": temperature} | ({} if top_p is None else {"top_p": top_p})
        require_numbers(float, {"temperature": 0.8, "top_p": 0.9}, **numbers)
        prompts = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(prompts, Sequence) or not all(isinstance(prompt, str) for prompt in prompts):
            raise ArgumentError("prompts", prompts, "must be a text, or a list of texts", {"prompts": SOME_TEXTS})
        rows = self._rows(prompts) if prompts else []
        sampling = Sampling(temperature, top_k, top_p, self.tokenizer.missing_ids(self.network.encoder.vocab_size))
        new = generate(self.network, rows, num_tokens, sampling, seed, stop_token=self.tokenizer.eos_id)
        return [
            prompt + self.tokenizer.continuation(ids, after=row)
            for prompt, row, ids in zip(prompts, rows, new, strict=True)
        ]

    def _batch(self, texts: Texts) -> Batch:
        """Texts as the task's batch, without targets."""
        tokens, lengths = self.tokenize(texts)
        return {"inputs": tokens, "lengths": lengths}

    def _label_ids(self, labels: Any, number: int) -> Int[Tensor, " batch"]:
        """The indices of the labels of some texts.

        Raises:
            ArgumentError: there are not as many labels as texts, or one of them is unknown.
        """
        known = cast(Classification, self.task).labels
        labels = [labels] if isinstance(labels, int | str) else labels
        if not isinstance(labels, Sequence) or len(labels) != number:
            works = {"labels": known[:1] * number}
            raise ArgumentError("labels", labels, f"must be {number}, one for each text", works)
        for label in labels:
            if isinstance(label, bool):
                raise ArgumentError("labels", label, "must be a label or its index", {"labels": known[:1]})
            require_choice("labels", label, [*known, *range(len(known))])
        return torch.tensor([known.index(label) if isinstance(label, str) else label for label in labels])

    def _rows(self, texts: Any) -> list[list[int]]:
        """The token ids of each text."""
        if isinstance(texts, Tensor):
            require_token_ids("texts", texts, self.network.encoder.vocab_size)
            return texts.tolist()
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, Sequence) or not texts or not all(map(self.task.takes, texts)):
            kinds = {1: "a text, a list of texts", 2: "a list of pairs of texts, (first, second)"}
            kind = kinds.get(self.task.num_texts or 0, "a text, a list of texts or of (first, second)")
            works = {"texts": [tuple(SOME_TEXTS)] if self.task.num_texts == 2 else SOME_TEXTS}
            raise ArgumentError("texts", texts, f"must be {kind}, or token ids of shape (batch, seq)", works)
        return self.tokenizer.read(texts)


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
