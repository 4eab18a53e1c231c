"""Trained models in Python: `load` a checkpoint, then encode, score and generate text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from jaxtyping import Float, Int
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from tinyformer.app.checks import check_types
from tinyformer.app.config import register_head_resolver
from tinyformer.app.errors import cause_of
from tinyformer.app.parts import make_network, require_known_tokens
from tinyformer.app.scores import register_score
from tinyformer.app.start import tokenizer_of
from tinyformer.app.stored_config import admit_config
from tinyformer.beam_search import Beam, beam_search
from tinyformer.checkpoint import load_checkpoint, load_weights, require_fitting
from tinyformer.data import Question, TextTokenizer, tokenise_questions
from tinyformer.data.files import SURROGATE
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.generation import Sampling, generate
from tinyformer.nn import EncoderDecoder, SpanReadout, Transformer
from tinyformer.tasks import Prediction, Seq2Seq, SpanExtraction, Task

Texts: TypeAlias = str | Sequence[str] | Tensor
"""A text, a list of texts, or token ids of shape (batch, seq)."""


def load(
    checkpoint: str | Path, backend: str = "auto", device: str = "cpu", trusted: Sequence[str] = ()
) -> "Model | Seq2SeqModel":
    """Load a checkpoint's model, in evaluation mode and in the dtype of its weights.

    As in `evaluate.py`, the file is not trusted: reading it runs none of its code, and its config may only name classes
    of this package.

    Args:
        checkpoint: the file, such as `outputs/…/checkpoints/last.ckpt`.
        backend: attention backend: "auto" or a name in `tinyformer.nn.BACKENDS`, whatever the run used.
        device: the device, as in torch: "cpu", "cuda", …
        trusted: further classes that the checkpoint may use, such as "mine.Block".

    Raises:
        ArgumentError: the file cannot be read or names a class that is not trusted; the backend does not support the
            model; the device does not exist.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device", device, "this machine has none", {"device": "cpu"})
    with argument_path(passed={"path": "checkpoint"}):
        stored = load_checkpoint(checkpoint)
        plain = admit_config(stored, lambda key, name: name in trusted)
        tokenizer = tokenizer_of(stored) if stored.tokenizer else None
    register_head_resolver()
    register_score(plain)
    config = OmegaConf.create(plain)
    config.attention.backend = backend
    try:
        for part in ("network", "task.objective"):
            check_types(config, part)
        require_fitting(make_network(config, tokenizer, "meta"), stored)  # before memory is allocated
        with torch.random.fork_rng():  # which initialises the weights that the checkpoint's replace
            network = make_network(config, tokenizer)
    except InstantiationException as error:
        cause = cause_of(error)
        if isinstance(cause, ArgumentError) and cause.path[-1] == "backend":
            cause.path = ("backend",)
        raise cause from error
    load_weights(network, stored)
    dtype = next(tensor.dtype for tensor in stored.weights.values() if tensor.is_floating_point())
    task = instantiate(config.task.objective, _convert_="all")
    network.to(device, dtype)
    has_spans = isinstance(network.readout, SpanReadout)
    belongs = isinstance(network, task.network_class) and isinstance(task, SpanExtraction) == has_spans
    if not belongs or (tokenizer is None and has_spans):
        names = f"{type(network).__name__} and a {type(task).__name__}"
        raise ArgumentError("checkpoint", str(checkpoint), f"has a {names}, which do not belong together")
    require_known_tokens(task, network)
    if isinstance(network, EncoderDecoder):
        if tokenizer is None and task.special_tokens.eos is None:
            reason = "has no tokenizer, and does not say which token ends a text (model.special_tokens.eos)"
            raise ArgumentError("checkpoint", str(checkpoint), reason)
        return Seq2SeqModel(network.eval(), tokenizer, task)
    assert isinstance(network, Transformer)
    if isinstance(task, SpanExtraction):
        return SpanModel(network, tokenizer, task, **_stored_windows(config, checkpoint))
    return Model(network, tokenizer, task)


@dataclass(frozen=True)
class Seq2SeqModel:
    """A trained encoder–decoder with its tokenizer and task; made by `load`.

    Args:
        network: the model, in evaluation mode.
        tokenizer: its tokenizer; a model without one, such as Marian's, takes token ids.
        task: the task that it was trained for.
    """

    network: EncoderDecoder
    tokenizer: TextTokenizer | None
    task: Seq2Seq

    def generate(
        self, texts: str | Sequence[str], beams: int = 4, length_penalty: float = 1.0, length_offset: float = 0.0
    ) -> list[str]:
        """The target of each source, such as its translation.

        Args:
            texts: the sources; of one that is too long, the beginning is read.
            beams: see `Beam`.
            length_penalty: see `Beam`.
            length_offset: see `Beam`.

        Raises:
            ArgumentError: a setting is out of range, or the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise ArgumentError("texts", "…", "the model has no tokenizer; generate_ids takes token ids")
        texts = [texts] if isinstance(texts, str) else texts
        return self.task.decode_texts(self.network, texts, self.tokenizer, Beam(beams, length_penalty, length_offset))

    def generate_ids(
        self,
        source: Int[Tensor, "batch source_seq"],
        lengths: Int[Tensor, " batch"] | None = None,
        beams: int = 4,
        length_penalty: float = 1.0,
        length_offset: float = 0.0,
        max_tokens: int | None = None,
    ) -> list[list[int]]:
        """The token ids of the target of each source, without those that begin and end it.

        Args:
            source: token ids, with those that begin and end a source, padded on the right.
            lengths: the number of tokens of each source without padding; by default, all of them.
            beams: see `Beam`.
            length_penalty: see `Beam`.
            length_offset: see `Beam`.
            max_tokens: maximum number of tokens of a target, see `beam_search`.

        Raises:
            ArgumentError: a setting is out of range, a source is longer than the context, or an id is unknown.
        """
        require_token_ids("source", source, self.network.vocab_size)
        source = source.to(self.network.encoder.token_embedding.weight.device)
        lengths = torch.full((len(source),), source.shape[1]) if lengths is None else lengths
        if lengths.shape != source.shape[:1] or not bool(((lengths > 0) & (lengths <= source.shape[1])).all()):
            reason = f"must hold {len(source)} lengths from 1 to {source.shape[1]}"
            raise ArgumentError("lengths", lengths.tolist(), reason)
        tokens = self.task.special_tokens.with_eos(self.tokenizer.eos_id if self.tokenizer else None)
        beam = Beam(beams, length_penalty, length_offset)
        return beam_search(self.network, source, lengths.to(source.device), tokens, beam, max_tokens)


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


class SpanModel(Model):
    """A trained model that answers questions with spans of their contexts; made by `load`.

    Args:
        network: the model.
        tokenizer: its tokenizer.
        task: the task that it was trained for.
        max_question_length: maximum number of tokens of a question, of which the beginning is read.
        stride: see `tinyformer.data.QuestionTexts.cut`.
    """

    task: SpanExtraction

    def __init__(
        self,
        network: Transformer,
        tokenizer: TextTokenizer | None,
        task: SpanExtraction,
        max_question_length: int = 64,
        stride: int | None = None,
    ) -> None:
        super().__init__(network, tokenizer, task)
        self.max_question_length, self.stride = max_question_length, stride

    def answer(
        self, questions: str | Sequence[str], contexts: str | Sequence[str], stride: int | None = None
    ) -> list[Prediction]:
        """The answer to each question; its text is empty where the model holds that the context has none.

        Args:
            questions: the questions; of long ones the beginning is read, as in the model's run.
            contexts: the context of each question, of any length; a single one is that of all.
            stride: see `tinyformer.data.QuestionTexts.cut`; None: that of the model's run.

        Raises:
            ArgumentError: a text is empty or no text, there are not as many contexts as questions, or the stride is no
                positive integer.
        """
        asked, told = _texts("questions", questions), _texts("contexts", contexts)
        told = told * len(asked) if isinstance(contexts, str) else told
        if len(told) != len(asked):
            raise ArgumentError("contexts", contexts, f"must be one text, or {len(asked)}, as many as `questions`")
        stride = self.stride if stride is None else stride
        if stride is not None and not _is_positive(stride):
            raise ArgumentError("stride", stride, "must be a positive integer", {"stride": self.max_seq_len // 2})
        rows = [Question(question, context, [], []) for question, context in zip(asked, told, strict=True)]
        split = tokenise_questions(rows, self.tokenizer).cut(self.max_seq_len, self.max_question_length, stride)
        return self.task.answer(self.network, split)


def _texts(argument: str, value: Any) -> list[str]:
    """One text or several.

    Raises:
        ArgumentError: it is something else, or one of them is empty or cannot be encoded.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(one, str) and one.strip() for one in texts):
        raise ArgumentError(argument, value, "must be a text, or a list of texts, none of them empty")
    if any(map(SURROGATE.search, texts)):
        raise ArgumentError(argument, value, "holds half of a surrogate pair, which is no text")
    return list(texts)


def _is_positive(value: Any) -> bool:
    """Whether a value is a positive integer that fits into 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63


def _stored_windows(config: DictConfig, checkpoint: str | Path) -> dict[str, Any]:
    """How the run of a checkpoint cut contexts into windows: arguments of `SpanModel`.

    Raises:
        ArgumentError: a value of the file is no positive integer.
    """
    names = [name for name in ("max_question_length", "stride") if OmegaConf.select(config, f"data.{name}") is not None]
    found = {name: OmegaConf.select(config, f"data.{name}") for name in names}
    for name, value in found.items():
        if not _is_positive(value):
            raise ArgumentError("checkpoint", str(checkpoint), f"its data.{name}={value!r:.60} is no positive integer")
    return found


def _without_padding(
    x: Float[Tensor, "batch seq width"], lengths: Int[Tensor, " batch"]
) -> Float[Tensor, "batch seq width"]:
    is_padding = torch.arange(x.shape[1], device=x.device) >= lengths.unsqueeze(-1)
    return x.masked_fill(is_padding.unsqueeze(-1), 0.0)
