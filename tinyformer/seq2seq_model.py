"""A trained encoder–decoder in Python: it translates or summarises text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from tinyformer.beam_search import Beam, beam_search
from tinyformer.data import TextTokenizer
from tinyformer.errors import ArgumentError
from tinyformer.model import require_token_ids
from tinyformer.nn import EncoderDecoder
from tinyformer.tasks import Seq2Seq


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
