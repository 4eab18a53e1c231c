"""A trained model in Python: text in; vectors, scores or more text out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from jaxtyping import Float, Int
from omegaconf import OmegaConf
from torch import Tensor

from tinyformer.app.build import make_network
from tinyformer.app.config import register_head_resolver
from tinyformer.app.errors import cause_of
from tinyformer.app.stored_run import CHOSEN_ANEW
from tinyformer.checkpoint import load_checkpoint, load_weights, require_trusted
from tinyformer.data import TextTokenizer
from tinyformer.generation import Sampling, generate
from tinyformer.nn import Transformer
from tinyformer.tasks import Task

Texts: TypeAlias = str | Sequence[str] | Tensor
"""One text, which is a batch of one, several, or the ids of their tokens, `batch seq`."""


def load(checkpoint: str | Path, backend: str = "auto", device: str = "cpu", trusted: Sequence[str] = ()) -> "Model":
    """The model of a checkpoint, in evaluation mode, in the dtype of its weights.

    Nothing in the file is trusted but what `evaluate.py` trusts: it is read without running code of its own, and makes
    classes of this package only.

    Args:
        checkpoint: the file, such as `outputs/…/checkpoints/last.ckpt`.
        backend: of attention; "auto" or a name in `tinyformer.nn.BACKENDS`, whatever the run had.
        device: "cpu", "cuda" or another of torch's.
        trusted: further classes that the checkpoint may make, such as "mine.Block".

    Raises:
        ValueError: the file cannot be read, or names a class that is not trusted; the backend cannot compute the model;
            there is no such device.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device}: this machine has none; device=cpu works.")
    stored = load_checkpoint(checkpoint)
    plain = {key: value for key, value in stored.config.items() if key not in CHOSEN_ANEW}
    require_trusted(plain, stored.path, frozenset(trusted), "load(…, trusted=[{target!r}]) takes it")
    register_head_resolver()
    config = OmegaConf.create(plain)
    config.attention.backend = backend
    tokenizer = TextTokenizer.from_json(stored.tokenizer) if stored.tokenizer else None
    try:
        with torch.random.fork_rng():  # of which weights are drawn that the checkpoint's replace
            network = make_network(config, tokenizer)
    except InstantiationException as error:
        raise cause_of(error) from error
    load_weights(network, stored)
    dtype = next(tensor.dtype for tensor in stored.weights.values() if tensor.is_floating_point())
    return Model(network.to(device, dtype), tokenizer, instantiate(config.task.objective, _convert_="all"))


class Model:
    """A network with its tokenizer and its task; `load` makes one.

    Texts are padded at the right, which changes nothing in the result of any: what stands beyond a text's end is
    zero. A text begins with the token that stands before each document in training, so that an empty one has a token,
    too; token ids are taken as they are.

    Args:
        network: the model.
        tokenizer: of its texts; without one, it takes token ids.
        task: that it was trained for.
    """

    def __init__(self, network: Transformer, tokenizer: TextTokenizer | None, task: Task) -> None:
        self.network, self.task, self._tokenizer = network.eval(), task, tokenizer

    @property
    def tokenizer(self) -> TextTokenizer:
        """Of its texts.

        Raises:
            ValueError: the model came without one.
        """
        if self._tokenizer is None:
            raise ValueError("The model came without a tokenizer; it takes a tensor of token ids, batch seq.")
        return self._tokenizer

    @property
    def max_seq_len(self) -> int:
        """The longest text, in tokens."""
        return self.network.encoder.max_seq_len

    def tokenize(self, texts: Texts) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, " batch"]]:
        """Token ids, padded at the right, and how many are each text's own.

        Raises:
            ValueError: there is no text, one is too long, or a token is none of the model's.
        """
        rows = self._rows(texts)
        for index, row in enumerate(rows):
            if not 0 < len(row) <= self.max_seq_len:
                raise ValueError(
                    f"texts[{index}] has {len(row):,} tokens; from 1 to model.max_seq_len={self.max_seq_len:,} work, "
                    "the one that begins a text included."
                )
        lengths = torch.tensor([len(row) for row in rows])
        # Token ids are all of one length.
        tokens = torch.full((len(rows), int(lengths.max())), self._tokenizer.eos_id if self._tokenizer else 0)
        for row, padded in zip(rows, tokens, strict=True):
            padded[: len(row)] = torch.tensor(row)
        device = self.network.encoder.token_embedding.weight.device
        return tokens.to(device), lengths.to(device)

    @torch.no_grad()
    def encode(self, texts: Texts) -> Float[Tensor, "batch seq d_model"]:
        """The encoder's vector of each token.

        Raises:
            ValueError: see `tokenize`.
        """
        tokens, lengths = self.tokenize(texts)
        mask = self.task.mask({"inputs": tokens, "lengths": lengths})
        return _without_padding(self.network.encoder(tokens, mask), lengths)

    @torch.no_grad()
    def logits(self, texts: Texts) -> Float[Tensor, "batch *seq scores"]:
        """What the readout makes of them: `batch seq vocab_size`, or `batch num_classes` from a classifier.

        Raises:
            ValueError: see `tokenize`.
        """
        tokens, lengths = self.tokenize(texts)
        scores = self.network(tokens, self.task.mask({"inputs": tokens, "lengths": lengths}))
        return _without_padding(scores, lengths) if scores.ndim == 3 else scores

    def generate(
        self,
        prompts: str | Sequence[str],
        num_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> list[str]:
        """Each prompt and what the model makes of it, up to where another document would begin.

        Args:
            prompts: to go on from, of any length; the model sees the last `max_seq_len` tokens.
            num_tokens: how many are drawn, at most.
            temperature: 0 takes the likeliest token; for this and the next two see `Sampling`.
            top_k: among how many.
            top_p: among how much of the probability.
            seed: prompt `i` is drawn with `seed + i`, whatever the others are.

        Raises:
            ValueError: the model's task is no generation of text, or a setting is out of its range.
        """
        if not self.task.generates:
            raise ValueError(
                f"A model of {type(self.task).__name__} sees both sides of a token and goes on from none; "
                "one trained with task=causal_lm does."
            )
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        rows = self._rows(prompts) if prompts else []
        new = generate(
            self.network,
            rows,
            num_tokens,
            Sampling(temperature, top_k, top_p),
            seed,
            stop_token=self.tokenizer.eos_id,
        )
        return [
            prompt + self.tokenizer.continuation(ids, after=row)
            for prompt, row, ids in zip(prompts, rows, new, strict=True)
        ]

    def _rows(self, texts: Any) -> list[list[int]]:
        """The tokens of each text."""
        if isinstance(texts, Tensor):
            return self._checked(texts).tolist()
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError("texts has to be a text, a list of one or more, or a tensor of token ids, batch seq.")
        return [[self.tokenizer.eos_id, *ids] for ids in self.tokenizer.encode_batch(texts)]

    def _checked(self, ids: Tensor) -> Tensor:
        vocab_size = self.network.encoder.vocab_size
        if ids.ndim != 2 or ids.is_floating_point() or ids.is_complex() or len(ids) == 0:
            raise ValueError(
                f"texts is a tensor of {ids.dtype} and shape {list(ids.shape)}; token ids are whole numbers, batch seq."
            )
        if ids.numel() and (ids.min() < 0 or ids.max() >= vocab_size):
            raise ValueError(
                f"texts holds token ids from {int(ids.min())} to {int(ids.max())}; the model has 0 to {vocab_size - 1}."
            )
        return ids


def _without_padding(
    x: Float[Tensor, "batch seq width"], lengths: Int[Tensor, " batch"]
) -> Float[Tensor, "batch seq width"]:
    beyond = torch.arange(x.shape[1], device=x.device) >= lengths.unsqueeze(-1)
    return x.masked_fill(beyond.unsqueeze(-1), 0.0)
