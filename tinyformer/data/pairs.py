"""Pairs of a source text and its target, such as a translation, as rows of batches; and their special tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Int64, UInt

from tinyformer.data.batches.windows import IGNORED, Batch, Rows
from tinyformer.data.row_format import RowFormat
from tinyformer.data.sources.documents import TEXTS, Source
from tinyformer.data.stream import Prepared, Split, TokenSplit
from tinyformer.data.tokenizer.tokenizer import TextTokenizer
from tinyformer.errors import ArgumentError, require_at_least, require_choice


@dataclass(frozen=True)
class PairTokens:
    """The ids of the tokens around sources and targets, and of tokens that are never generated.

    A source or target is `[*before, *text, *end]`. The decoder's input is `start` and the target minus its last token.
    """

    eos: int  # ends a decoded target
    start: int  # the first token of the decoder's input
    end: tuple[int, ...]  # after every text
    before: tuple[int, ...] = ()  # before every text, such as BART's `<s>`
    forced_bos: int | None = None  # the required first token of a decoded target; None: any token
    suppressed: tuple[int, ...] = ()  # never decoded
    vocab_size: int | None = None  # ids from `vocab_size` on have no token and are never decoded; None: no such ids

    @property
    def num_added(self) -> int:
        """Number of tokens that a source has in addition to its text."""
        return len(self.before) + len(self.end)

    def source(self, text: Sequence[int], max_tokens: int) -> list[int]:
        """The source of a text, whose end is truncated if the source would have more than `max_tokens` tokens."""
        return self.wrapped(text[: max(0, max_tokens - self.num_added)])

    def inputs(self, text: Sequence[int]) -> list[int]:
        """The decoder's input for predicting a text: `start`, and the target without its last token."""
        return [self.start, *self.wrapped(text)[:-1]]

    def wrapped(self, text: Sequence[int]) -> list[int]:
        """A text with the tokens around it: a source, or a target as the decoder predicts it."""
        return [*self.before, *text, *self.end]

    def without_bos(self, target: list[int]) -> list[int]:
        """The text of a decoded target: the target without the tokens `before` at its beginning."""
        return target[len(self.before) :] if target[: len(self.before)] == [*self.before] else target


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens of a model that its tokenizer does not determine, as for T5, BART and Marian; see `PairTokens`.

    By default the tokenizer's `eos` begins and ends a target, and no token is forced or suppressed.
    """

    eos: int | None = None  # ends a source and a target; None: the tokenizer's `eos`
    decoder_start: int | None = None  # the first token of the decoder's input; None: `eos`
    bos: int | None = None  # the first token of every text; None: no such token
    forced_bos: int | None = None  # the required first token of a decoded target; None: any token
    suppressed: Sequence[int] = ()  # tokens that are never decoded

    def __post_init__(self) -> None:
        for name, number in self.ids():
            require_at_least(0, {name: 0}, **{name: number})

    def ids(self) -> list[tuple[str, int]]:
        """The argument name and the value of each special token id that is not None."""
        names = ("eos", "decoder_start", "bos", "forced_bos")
        single = [(name, number) for name in names if (number := getattr(self, name)) is not None]
        return [*single, *(("suppressed", number) for number in self.suppressed)]

    def require_known(self, vocab_size: int) -> None:
        """Refuse ids of `vocab_size` or more."""
        for name, number in self.ids():
            if number >= vocab_size:
                raise ArgumentError(name, number, f"must be below {vocab_size}, the size of the vocabulary")

    def around(self, tokenizer: TextTokenizer | None) -> PairTokens:
        """The `PairTokens` of a model; the tokenizer's post-processor, if it is used, sets the tokens around a text."""
        eos = tokenizer.eos_id if self.eos is None and tokenizer is not None else self.eos
        if eos is None:
            raise ArgumentError("eos", None, "must be given, since there is no tokenizer", {"eos": 0})
        start = eos if self.decoder_start is None else self.decoder_start
        before, after = [] if self.bos is None else [self.bos], [eos]
        suppressed, vocab_size = [*self.suppressed], None
        if tokenizer is not None:
            before, after = tokenizer.around if tokenizer.post_processed else (before, after)
            suppressed, vocab_size = [*suppressed, *tokenizer.missing_ids(tokenizer.vocab_size)], tokenizer.vocab_size
        return PairTokens(eos, start, tuple(after), tuple(before), self.forced_bos, tuple(suppressed), vocab_size)


@dataclass(frozen=True)
class PairSplit(Split):
    """The pairs of one split."""

    ids: UInt[np.ndarray, " tokens"]  # a stream of texts, each after an `eos`
    begins: Int64[np.ndarray, "pairs 2"]  # the index in `ids` of the `eos` before each source and each target
    lengths: Int64[np.ndarray, "pairs 2"]  # tokens of source and target, with the tokens around them, after truncation
    targets: pa.ChunkedArray  # the target texts, not truncated
    tokenizer: TextTokenizer
    tokens: PairTokens
    num_bytes: int | None  # UTF-8 bytes of the targets; None if a target was truncated
    num_unknown: int  # `<unk>` tokens before truncation
    num_truncated: int  # pairs with a text that was truncated
    num_truncated_targets: int  # pairs whose target was truncated
    num_skipped: int  # pairs that were left out

    @property
    def num_documents(self) -> int:
        return len(self.begins)

    @property
    def num_tokens(self) -> int:
        """Number of scored tokens: all tokens of the targets, including the tokens around each text."""
        return int(self.lengths[:, 1].sum())

    @property
    def num_targets(self) -> int:
        """Number of tokens that count for the measured speed: those of the sources and of the targets."""
        return int(self.lengths.sum())

    def first(self, number: int) -> "PairSplit":
        """A split of the first `number` pairs."""
        targets = self.targets.slice(0, number)
        return replace(self, begins=self.begins[:number], lengths=self.lengths[:number], targets=targets)

    def source(self, row: int) -> str:
        """The source text of a pair, truncated as for the model."""
        begin = self.begins[row, 0] + 1
        return self.tokenizer.decode(self.ids[begin : begin + self.lengths[row, 0] - self.tokens.num_added].tolist())

    def target(self, row: int) -> str:
        """The whole target text of a pair, not truncated: the reference for a decoded text."""
        return self.targets[row].as_py()


class Pairs(Rows):
    """Batches of the pairs of a split, padded on the right.

    A batch has the sources (`source`), their numbers of tokens (`source_lengths`), the targets that the decoder
    predicts (`targets`) and its inputs (`inputs`); see `PairTokens`. `Seq2Seq.read` makes a batch of a user's texts.
    """

    def __init__(self, split: PairSplit) -> None:
        self._split, self._ids = split, split.ids.view(np.ndarray)

    def __len__(self) -> int:
        return self._split.num_documents

    def __getitems__(self, indices: list[int]) -> Batch:
        rows, tokens = np.asarray(indices), self._split.tokens
        (source_begin, begin), (source_lengths, lengths) = self._split.begins[rows].T, self._split.lengths[rows].T
        source = self._texts(source_begin, source_lengths, padding=tokens.eos)
        targets = self._texts(begin, lengths, padding=IGNORED)
        read = np.where(targets == IGNORED, tokens.eos, targets)[:, :-1]
        inputs = np.concatenate([np.full((len(rows), 1), tokens.start), read], 1)
        return {
            "source": torch.from_numpy(source),
            "source_lengths": torch.from_numpy(source_lengths),
            "inputs": torch.from_numpy(inputs),
            "targets": torch.from_numpy(targets),
            "rows": torch.from_numpy(rows),
        }

    def _texts(
        self, begins: Int64[np.ndarray, " batch"], lengths: Int64[np.ndarray, " batch"], padding: int
    ) -> Int64[np.ndarray, "batch seq"]:
        """The tokens of texts, with the tokens around each text; rows are padded on the right with `padding`."""
        tokens = self._split.tokens
        place, ends = np.arange(lengths.max()), lengths - len(tokens.end)
        ids = self._ids.take(begins[:, None] + 1 + place - len(tokens.before), mode="clip").astype(np.int64)
        ids[:, : len(tokens.before)] = tokens.before
        for index, token in enumerate(tokens.end):
            ids[np.arange(len(ids)), ends + index] = token
        return np.where(place < lengths[:, None], ids, padding)


class PairFormat(RowFormat):
    """The row format of pairs of a source text and its target, such as a sentence and its translation.

    Args:
        seq_len: maximum number of tokens of a source, and of a target, including the tokens around the text.
        too_long: what to do with a pair that has a longer text: "truncate" the text, or "skip" the pair.
        special_tokens: the tokens around texts; by default, the tokenizer's `eos`.
    """

    source_rows, compared = "pairs", TEXTS
    lacking = "has no pairs of a source and a target; files and Hub data sets with two columns do"
    row = document = "pair"

    def __init__(
        self,
        seq_len: int,
        too_long: str = "truncate",
        special_tokens: SpecialTokens | None = None,
        max_examples: int | None = None,
    ) -> None:
        self._special_tokens = special_tokens or SpecialTokens()
        num_added = 1 if self._special_tokens.bos is None else 2
        require_at_least(1 + num_added, {"seq_len": 128}, seq_len=seq_len)  # at least one token of text
        super().__init__(seq_len, max_examples)
        require_choice("too_long", too_long, ("truncate", "skip"))
        self.too_long = too_long

    def key(self, source: Source) -> list[Any]:
        return [*super().key(source), *getattr(source, "pair_columns", ())]

    def open(self, prepared: Prepared, source: Source, whole: bool) -> dict[str, PairSplit]:
        return {name: self._split(prepared, name, stream) for name, stream in prepared.splits.items()}

    def _split(self, prepared: Prepared, name: str, stream: TokenSplit) -> PairSplit:
        begins, targets = np.asarray(stream.offsets[:-1]).reshape(-1, 2), prepared.rows(name)["pair"]
        tokens = self._special_tokens.around(prepared.tokenizer)
        # In the stream, each text has the tokenizer's `eos` before it.
        lengths = np.diff(stream.offsets).reshape(-1, 2) + (tokens.num_added - 1)
        is_long = np.asarray((lengths > self.seq_len).any(axis=1))
        num_long = int(is_long.sum())
        skips = num_long if self.too_long == "skip" else 0
        if skips:
            begins, lengths, targets = begins[~is_long], lengths[~is_long], targets.filter(pa.array(~is_long))
        num_cut = int((lengths[:, 1] > self.seq_len).sum())
        return PairSplit(
            stream.ids,
            begins,
            np.minimum(lengths, self.seq_len),
            targets,
            prepared.tokenizer,
            tokens,
            None if num_cut else pc.sum(pc.binary_length(targets)).as_py() or 0,
            stream.num_unknown,
            num_truncated=num_long - skips,
            num_truncated_targets=num_cut,
            num_skipped=skips,
        )

    def rows(self, split: PairSplit, seed: int) -> Pairs:
        return Pairs(split)

    def lengths(self, split: PairSplit) -> Int64[np.ndarray, " pairs"]:
        """A sort key of each pair: the length of the longer of source and target, then of the shorter.

        In batches of Spanish and English verses, 8 % of the tokens are padding; with the target's length as key, 17 %.
        """
        longer, shorter = split.lengths.max(axis=1), split.lengths.min(axis=1)
        return longer * (int(longer.max(initial=0)) + 1) + shorter
