"""Rows of batches, and pairs of texts, without padding."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tinyformer.data import PairTokens
from tinyformer.data.batches.windows import IGNORED, Batch, document_starts, tensors
from tinyformer.generation.generation import Beam, beam_search
from tinyformer.nn import EncoderDecoder


def queries_by_kind(batch: Batch) -> dict[str, Bool[Tensor, "batch seq"]]:
    """For each kind of attention, a mask that is True at queries and False at padding; the name of a single kind is "".

    A batch without lengths has no padding.
    """

    def before(lengths: Tensor, tokens: Tensor) -> Tensor:
        return torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1)

    if "source" in batch:
        is_target = batch["targets"] != IGNORED
        return {"encoder": before(batch["source_lengths"], batch["source"]), "decoder": is_target, "cross": is_target}
    inputs = batch["inputs"]
    return {"": before(batch["lengths"], inputs) if "lengths" in batch else torch.ones_like(inputs, dtype=torch.bool)}


def rows_of(batches: Iterable[Batch]) -> list[Batch]:
    """Split batches into batches of one row, without `document_starts`, which refer to all rows together."""
    found = []
    for batch in batches:
        of_rows = {name: of.split(1) for name, of in tensors(batch).items() if name != "document_starts"}
        found += [cast(Batch, dict(zip(of_rows, row, strict=True))) for row in zip(*of_rows.values(), strict=True)]
    return found


def without_padding(batches: Iterable[Batch]) -> list[Batch]:
    """The rows of batches of windows or examples without their padding, regrouped into one batch for each length.

    Only tensors with one entry per token are kept.
    """
    by_length: dict[int, list[dict[str, Tensor]]] = defaultdict(list)
    for batch in batches:
        lengths = queries_by_kind(batch)[""].sum(dim=1)
        of_tokens = {name: rows for name, rows in tensors(batch).items() if name in ("inputs", "targets", "documents")}
        for length in lengths.unique().tolist():
            by_length[length].append({name: rows[lengths == length, :length] for name, rows in of_tokens.items()})
    return [
        cast(Batch, {name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        for parts in by_length.values()
    ]


def of_one_length(batches: Iterable[Batch]) -> Batch:
    """The rows of batches of windows or examples as one batch, all cut to the same length.

    The length is the length of the shortest row that is at least half as long as the longest; shorter rows are left
    out. One batch needs fewer kernel launches than `without_padding`. Only tensors with one entry per token are kept.
    `document_starts` is computed anew, since a kernel would otherwise wait for the GPU to find the documents.
    """
    parts = [tensors(batch) for batch in without_padding(batches)]
    longest = max(part["inputs"].shape[1] for part in parts)
    long = [part for part in parts if 2 * part["inputs"].shape[1] >= longest]
    seq = min(part["inputs"].shape[1] for part in long)
    joined = {name: torch.cat([part[name][:, :seq] for part in long]) for name in long[0]}
    if "documents" in joined:
        joined["document_starts"] = torch.from_numpy(document_starts(joined["documents"].numpy()))
    return cast(Batch, joined)


class TokenPair(NamedTuple):
    """A source and a target, without padding."""

    source: Int[Tensor, "1 source_seq"]  # token ids, with the special tokens around the text, see `PairTokens`
    target: Int[Tensor, "1 seq"]  # the token ids of the decoder's input
    predicted: Int[Tensor, "1 seq"]  # the target shifted by one, with `eos` at its end

    @classmethod
    def of(cls, source: Sequence[int], target: Sequence[int], tokens: PairTokens, num_tokens: int) -> "TokenPair":
        """The pair of two texts, each cut to `num_tokens` tokens, special tokens included."""
        sides = tokens.source(source, num_tokens), tokens.inputs(target), tokens.wrapped(target)
        return cls(*(torch.tensor([ids[:num_tokens]]) for ids in sides))

    def to(self, device: torch.device) -> "TokenPair":
        return TokenPair(*(ids.to(device) for ids in self))

    def ids_by_kind(self) -> dict[str, tuple[list[int], list[int]]]:
        """The token ids of the queries and of the keys of each kind of attention.

        A query of cross-attention has the id of the token that is predicted at its position, since heads align this
        token with the source (Bahdanau et al. 2014, arXiv 1409.0473, figure 3).
        """
        source, target, predicted = (ids[0].tolist() for ids in self)
        return {"encoder": (source, source), "decoder": (target, target), "cross": (predicted, source)}


def pairs_of(batch: Batch) -> list[TokenPair]:
    """The pairs of a batch, each without its padding."""
    lengths = zip(batch["source_lengths"].tolist(), (batch["targets"] != IGNORED).sum(dim=1).tolist(), strict=True)
    return [
        TokenPair(
            batch["source"][row : row + 1, :source],
            batch["inputs"][row : row + 1, :target],
            batch["targets"][row : row + 1, :target],
        )
        for row, (source, target) in enumerate(lengths)
    ]


def decoded_pair(
    network: EncoderDecoder, source: Sequence[int], tokens: PairTokens, beam: Beam, num_tokens: int | None = None
) -> TokenPair:
    """A source and the target that beam search finds for it, on the network's device.

    Source and target are cut to `num_tokens` tokens, special tokens included; the default is the context length.
    """
    device = network.encoder.token_embedding.weight.device
    num_tokens = min(num_tokens or network.max_seq_len, network.max_seq_len)
    ids = torch.tensor([tokens.source(source, num_tokens)], device=device)
    lengths = torch.tensor([ids.shape[1]], device=device)
    (target,) = beam_search(network, ids, lengths, tokens, beam, num_tokens)
    return TokenPair.of(source, target, tokens, num_tokens).to(device)
