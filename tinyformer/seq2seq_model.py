"""A trained encoder–decoder, to translate or summarise text in Python."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tinyformer import inspection
from tinyformer.analysis import TokenPair
from tinyformer.batch import IGNORED, Batch
from tinyformer.beam_search import Beam, beam_search
from tinyformer.data import PairTokens, TextTokenizer
from tinyformer.errors import ArgumentError
from tinyformer.inspection.forward import ForwardPass, Replacement
from tinyformer.inspection.inspected import Head, Inspected
from tinyformer.model import SOME_TEXTS, Texts, require_token_ids
from tinyformer.nn import EncoderDecoder
from tinyformer.tasks import Seq2Seq

Targets: TypeAlias = str | Sequence[str] | Sequence[Sequence[int]]
"""A target, a list of targets, or a list of their token ids, such as `Seq2SeqModel.generate_ids` returns."""


@dataclass(frozen=True, repr=False)
class Seq2SeqModel(Inspected):
    """A trained encoder–decoder with its tokenizer and task; made by `load`.

    Args:
        network: the model, in evaluation mode.
        tokenizer: its tokenizer; a model without one, such as Marian's, takes token ids.
        task: the task that it was trained for.
        origin: the checkpoint of its weights.
    """

    network: EncoderDecoder
    tokenizer: TextTokenizer | None
    task: Seq2Seq
    origin: "inspection.Origin | None" = None

    def __repr__(self) -> str:
        return inspection.describe(type(self).__name__, self.network, self.task, self.origin)

    @overload
    def attention(self, texts: str, targets: str | None = None) -> "inspection.TextMaps": ...

    @overload
    def attention(
        self, texts: Sequence[str] | Tensor, targets: Sequence[str] | Sequence[Sequence[int]] | None = None
    ) -> "list[inspection.TextMaps]": ...

    def attention(
        self, texts: str | Sequence[str] | Tensor, targets: str | Sequence[str] | Sequence[Sequence[int]] | None = None
    ) -> "inspection.TextMaps | list[inspection.TextMaps]":
        """The exact attention maps of a source and its target: `maps["cross", layer, head]`; see `TextMaps`.

        Args:
            texts: a source; for several, or for token ids as in `generate_ids`, the result is a list with the maps of
                each, without padding.
            targets: the target of each source, as a text or as token ids without those that begin and end it; by
                default, what the model decodes.

        Raises:
            ArgumentError: there is no source, or not one target for each; one is too long, or a token id is unknown; or
                the model has no tokenizer for texts.
        """
        tokens, sources, found = self._sides(texts, targets, decodes=True)
        device = self.network.encoder.token_embedding.weight.device
        maps = []
        for source, target in zip(sources, found, strict=True):
            sides = source, tokens.inputs(target), tokens.predicted(target)
            pair = TokenPair(*(torch.tensor([ids], device=device) for ids in sides))
            maps.append(inspection.maps_of_pair(self.network, self.tokenizer, pair, str(self.origin or "")))
        return maps[0] if isinstance(texts, str) else maps

    def generate(
        self, texts: str | Sequence[str], beams: int = 4, length_penalty: float = 1.0, length_offset: float = 0.0
    ) -> list[str]:
        """The target of each source, such as its translation.

        Args:
            texts: the sources; those that are too long are truncated.
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
        lengths: Int[Tensor, " lengths"] | None = None,
        beams: int = 4,
        length_penalty: float = 1.0,
        length_offset: float = 0.0,
        max_tokens: int | None = None,
    ) -> list[list[int]]:
        """The token ids of the target of each source, without those that begin and end it.

        Args:
            source: token ids, with those that begin and end a source, padded on the right.
            lengths: the number of tokens of each source without padding; by default, there is no padding.
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
        tokens = self.task.special_tokens.around(self.tokenizer)
        beam = Beam(beams, length_penalty, length_offset)
        return beam_search(self.network, source, lengths.to(source.device), tokens, beam, max_tokens)

    def run(
        self,
        texts: Texts,
        targets: Targets,
        capture: str | Sequence[str] = (),
        replace: Mapping[str, Replacement] | None = None,
    ) -> ForwardPass:
        """A forward pass that returns activations, or replaces them, see `Model.run`.

        Args:
            texts: the sources, or their token ids, as in `generate_ids`.
            targets: the target of each source, as a text or as token ids without those that begin and end it.
            capture: names of `points`, such as `decoder.layers.*.cross_attention.weights`.
            replace: for points, the replacement.

        Raises:
            ArgumentError: see `Model.run`; there are not as many targets as sources, or one is too long.
        """
        self._require_no_point("targets", targets, capture)
        return self._run(self._batch(texts, targets), capture, replace)

    def ablated(
        self, heads: Sequence[Head], mode: str = "zero", texts: Texts | None = None, targets: Targets | None = None
    ) -> AbstractContextManager[None]:
        """Ablate heads in all that the model computes inside the block, see `Model.ablated`.

        Args:
            heads: such as ("cross", 0, 1), with `encoder`, `decoder` or `cross`, the layer, and the head.
            mode: `zero`, `mean` or `resample`.
            texts: the sources that the replacement is taken from; not needed for `zero`.
            targets: their targets.

        Raises:
            ArgumentError: see `Model.ablated`.
        """
        return self._ablated(heads, mode, None if texts is None else self._batch(texts, targets))

    @torch.no_grad()
    def loss(self, texts: Texts, targets: Targets) -> Float[Tensor, " batch"]:
        """The loss of each target, given its source, in nats per token, including the token that ends it.

        Args:
            texts: the sources, see `run`.
            targets: the target of each.

        Raises:
            ArgumentError: see `run`.
        """
        nats, num_tokens = self.task.nats(self.network, self._batch(texts, targets))
        return nats / num_tokens

    def _batch(self, texts: Texts, targets: Targets | None) -> Batch:
        """Sources and targets as a batch."""
        tokens, sources, outputs = self._sides(texts, targets)
        device = self.network.encoder.token_embedding.weight.device

        def padded(rows: list[list[int]], padding: int) -> Int[Tensor, "batch seq"]:
            return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=padding).to(device)

        return {
            "source": padded(sources, tokens.eos),
            "source_lengths": torch.tensor([len(row) for row in sources], device=device),
            "inputs": padded([tokens.inputs(ids) for ids in outputs], tokens.eos),
            "targets": padded([tokens.predicted(ids) for ids in outputs], IGNORED),
        }

    def _sides(
        self, texts: Texts, targets: Targets | None, decodes: bool = False
    ) -> tuple[PairTokens, list[list[int]], list[list[int]]]:
        """The special tokens, the ids of the sources with them, and those of the targets without.

        Args:
            texts: see `run`.
            targets: see `run`.
            decodes: whether the model decodes the targets if none are given.

        Raises:
            ArgumentError: see `run`.
        """
        tokens = self.task.special_tokens.around(self.tokenizer)
        if isinstance(texts, Tensor):
            require_token_ids("texts", texts, self.network.vocab_size)
            sources = texts.tolist()
        else:
            sources = [tokens.source(ids, len(ids) + tokens.num_added) for ids in self._encoded("texts", texts)]
        found = self._decoded(sources, tokens) if decodes and targets is None else self._encoded("targets", targets)
        if len(found) != len(sources):
            raise ArgumentError("targets", targets, f"must be {len(sources)}, as many as `texts`")
        self._require_short("texts", sources)
        self._require_short("targets", [tokens.inputs(ids) for ids in found])
        return tokens, sources, found

    def _encoded(self, argument: str, texts: Any) -> list[list[int]]:
        """The token ids of texts, without those that begin and end them; ids are used as they are.

        Raises:
            ArgumentError: there is no text, the model has no tokenizer for texts, or a token id is unknown.
        """
        texts = [texts] if isinstance(texts, str) else texts
        rows: Any = texts if isinstance(texts, Sequence) and texts else [None]
        if all(isinstance(text, str) for text in rows):
            if self.tokenizer is None:
                raise ArgumentError(argument, texts, "the model has no tokenizer, so it takes token ids")
            return self.tokenizer.read(texts, around=False)
        are_rows = all(isinstance(ids, Sequence) and not isinstance(ids, str) for ids in rows)
        if argument == "texts" or not are_rows or not all(type(token) is int for ids in rows for token in ids):
            works = {argument: SOME_TEXTS}
            raise ArgumentError(argument, texts, "must be a text, a list of texts, or token ids", works)
        for ids in rows:
            require_token_ids(argument, torch.tensor([ids], dtype=torch.long), self.network.vocab_size)
        return [list(ids) for ids in rows]

    def _decoded(self, sources: Sequence[Sequence[int]], tokens: PairTokens) -> list[list[int]]:
        """The target that the model decodes for each source, cut to fit into its context."""
        self._require_short("texts", sources)
        room = self.network.max_seq_len - len(tokens.inputs([]))
        rows = [torch.tensor([ids], device=self.network.encoder.token_embedding.weight.device) for ids in sources]
        found = (beam_search(self.network, row, torch.tensor([row.shape[1]]).to(row), tokens) for row in rows)
        return [target[:room] for (target,) in found]

    def _require_short(self, argument: str, rows: Sequence[Sequence[int]]) -> None:
        """Refuse sequences that do not fit into the model's context.

        Raises:
            ArgumentError: one is empty or too long.
        """
        for index, row in enumerate(rows):
            if not 0 < len(row) <= self.network.max_seq_len:
                reason = f"must be 1 to {self.network.max_seq_len:,} tokens, with those that begin and end it"
                raise ArgumentError(f"len({argument}[{index}])", len(row), reason)
