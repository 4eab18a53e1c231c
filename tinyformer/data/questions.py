"""Questions and windows of their contexts as rows of batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Bool, Int64, UInt

from tinyformer.data.batches.windows import Batch, Rows
from tinyformer.data.row_format import RowFormat
from tinyformer.data.sources.documents import Source
from tinyformer.data.sources.squad import Question, from_questions
from tinyformer.data.stream import Encoded, Prepared, Split, TokenSplit
from tinyformer.data.tokenizer.tokenizer import TextTokenizer
from tinyformer.errors import require_at_least

EXTRA_TOKENS = 2
"""Number of tokens of a window that belong to neither question nor context: an `eos` before each of them."""


@dataclass(frozen=True)
class QuestionTexts:
    """The tokenised questions of one split, each with its context."""

    ids: UInt[np.ndarray, " tokens"]  # texts, each after an `eos`: a question, its context, the next question, …
    begins: Int64[np.ndarray, "questions 2"]  # the index in `ids` of the `eos` before question and context
    lengths: Int64[np.ndarray, "questions 2"]  # the number of tokens of question and context
    spans: Int64[np.ndarray, "questions 2"]  # the first and last token of the first answer in the context; -1: none
    table: pa.Table  # with the columns `text` (the question), `pair` (its context), `answers` and `starts`
    tokenizer: TextTokenizer
    num_bytes: int | None
    num_unknown: int

    @classmethod
    def of(
        cls,
        stream: Encoded | TokenSplit,
        num_unknown: int,
        spans: Int64[np.ndarray, "questions 2"],
        table: pa.Table,
        tokenizer: TextTokenizer,
    ) -> "QuestionTexts":
        """The questions of a stream in which each question is followed by its context."""
        begins, lengths = stream.offsets[:-1].reshape(-1, 2), np.diff(stream.offsets).reshape(-1, 2) - 1
        return cls(stream.ids, begins, lengths, spans, table, tokenizer, stream.num_bytes, num_unknown)

    def cut(self, max_length: int, max_question_length: int = 64, stride: int | None = None) -> "QuestionSplit":
        """Divide the contexts into overlapping parts, so that each window of question and part fits a model's length.

        Args:
            max_length: maximum number of tokens of a window.
            max_question_length: maximum number of tokens of a question, and at most half of the window.
            stride: distance in tokens between the beginnings of successive parts of a context, at most the length of a
                part; None: half the length of a part. If an answer is longer than the overlap of two parts, it is
                possible that no part contains the whole answer, see `QuestionSplit.num_lost`.
        """
        longest = min(max_question_length, (max_length - EXTRA_TOKENS) // 2)
        question, context = np.minimum(self.lengths[:, 0], longest), self.lengths[:, 1]
        room = max_length - EXTRA_TOKENS - question
        step = np.maximum(room // 2, 1) if stride is None else np.minimum(room, stride)
        numbers = 1 + -(-np.maximum(context - room, 0) // step)
        rows = np.repeat(np.arange(len(context)), numbers)
        starts = (np.arange(len(rows)) - np.repeat(np.cumsum(numbers) - numbers, numbers)) * step[rows]
        num_truncated = int((question < self.lengths[:, 0]).sum())
        num_bytes = None if num_truncated or len(rows) > len(context) else self.num_bytes
        texts = vars(self) | {"lengths": np.stack([question, context], axis=1), "num_bytes": num_bytes}
        return QuestionSplit(
            **texts,
            num_truncated=num_truncated,
            window_rows=rows,
            window_starts=starts,
            window_lengths=np.minimum(context[rows] - starts, room[rows]),
        )


@dataclass(frozen=True)
class QuestionSplit(QuestionTexts, Split):
    """The questions of one split, each in one or several windows, which are the inputs of a model.

    A window is the sequence `[eos, *question, eos, *part]`, where the part is a piece of the context. The parts of a
    long context overlap.
    """

    num_truncated: int  # number of truncated questions
    window_rows: Int64[np.ndarray, " windows"]  # the question of each window
    window_starts: Int64[np.ndarray, " windows"]  # the index in the context of the window's first context token
    window_lengths: Int64[np.ndarray, " windows"]  # the number of context tokens in the window

    def first(self, number: int) -> "QuestionSplit":
        """A split of the first `number` questions, with their windows."""
        is_kept = self.window_rows < number
        rows = {name: getattr(self, name)[:number] for name in ("begins", "lengths", "spans")}
        windows = {name: getattr(self, name)[is_kept] for name in ("window_rows", "window_starts", "window_lengths")}
        return replace(self, table=self.table.slice(0, number), **rows, **windows)

    @property
    def num_documents(self) -> int:
        return len(self.begins)

    @property
    def num_windows(self) -> int:
        return len(self.window_rows)

    @property
    def sizes(self) -> Int64[np.ndarray, " windows"]:
        """Number of tokens of each window."""
        return EXTRA_TOKENS + self.lengths[self.window_rows, 0] + self.window_lengths

    @property
    def num_tokens(self) -> int:
        return int(self.sizes.sum())

    @property
    def is_answerable(self) -> Bool[np.ndarray, " questions"]:
        return pc.list_value_length(self.table["answers"]).to_numpy() > 0

    @property
    def num_unanswerable(self) -> int:
        return int((~self.is_answerable).sum())

    @property
    def holds_answer(self) -> Bool[np.ndarray, " windows"]:
        """A flag for each window: True if it holds the whole answer to its question."""
        (first, last), part = self.spans[self.window_rows].T, self.window_starts
        return (first >= 0) & (first >= part) & (last < part + self.window_lengths)

    def num_lost(self, max_length: int | None = None) -> int:
        """Number of answers that no window contains whole, so that the targets of all windows are "no answer".

        Answers of more than `max_length` tokens are counted, too, even if a window contains them.
        """
        holds = self.holds_answer
        if max_length is not None:
            first, last = self.spans[self.window_rows].T
            holds = holds & (last - first < max_length)
        return int(np.setdiff1d(np.flatnonzero(self.is_answerable), self.window_rows[holds]).size)

    def question(self, row: int) -> str:
        return self.table["text"][row].as_py()

    def context(self, row: int) -> str:
        return self.table["pair"][row].as_py()

    def answers(self) -> list[list[str]]:
        return self.table["answers"].to_pylist()

    def texts_of(self, spans: Sequence[tuple[int, int]]) -> list[str]:
        """The text of a span (first and last token) of each question's context, without white space around it.

        The text is empty if the last token is before the first.
        """
        texts = [""] * len(spans)
        contexts = self.table["pair"].slice(0, len(spans)).to_pylist()
        for row, offsets in _with_offsets(self.tokenizer, contexts, [first <= last for first, last in spans]):
            first, last = spans[row]
            texts[row] = contexts[row][offsets[first, 0] : offsets[last, 1]].strip()
        return texts


def tokenise_questions(questions: Sequence[Question], tokenizer: TextTokenizer) -> QuestionTexts:
    """Tokenise one or more questions that are given in memory, not by a source."""
    table = from_questions(questions).data.table
    texts = [text for asked in questions for text in (asked.question, asked.context)]
    stream = Encoded.of(texts, tokenizer.encode_batch(texts), tokenizer)
    tokenizer.report_unknown(texts if tokenizer.unk_id in stream.ids else ())
    spans = token_spans(tokenizer, *(table[column].to_pylist() for column in ("pair", "answers", "starts")))
    num_unknown = int((stream.ids == tokenizer.unk_id).sum())
    return QuestionTexts.of(stream, num_unknown, spans, table, tokenizer)


def token_spans(
    tokenizer: TextTokenizer, contexts: list[str], answers: list[list[str]], starts: list[list[int]]
) -> Int64[np.ndarray, "questions 2"]:
    """The first and the last token of each question's first answer; both are -1 if there is no such token.

    `starts` has, for each answer to a question, the index of its first character in the context.
    """
    spans = np.full((len(contexts), 2), -1, np.int64)
    for row, offsets in _with_offsets(tokenizer, contexts, list(map(bool, answers))):
        begin, (token_begins, token_ends) = starts[row][0], offsets.T
        # The tokens that share a character with the answer.
        first = int(np.searchsorted(token_ends, begin, side="right"))
        last = int(np.searchsorted(token_begins, begin + len(answers[row][0]), side="left")) - 1
        if first <= last:
            spans[row] = first, last
    return spans


def _with_offsets(
    tokenizer: TextTokenizer, contexts: Sequence[str], is_needed: Sequence[bool]
) -> Iterator[tuple[int, Int64[np.ndarray, "tokens 2"]]]:
    """For each needed row, its index and the character offsets of its context's tokens; a context is encoded once."""
    rows_of: dict[str, list[int]] = {}
    for row, context in enumerate(contexts):
        if is_needed[row]:
            rows_of.setdefault(context, []).append(row)
    for context, rows in rows_of.items():
        (offsets,) = tokenizer.offsets([context])
        for row in rows:
            yield row, offsets


class Questions(Rows):
    """Batches of the windows of a split, padded on the right with `eos`.

    A batch has the tokens of each window (`inputs`), their number (`lengths`), the index of the first context token
    (`contexts`), and the indices of the answer's first and last token (`starts`, `ends`). Both are 0, the index of the
    first `eos`, if the window does not contain the whole answer. `answerable`: whether the question has an answer.
    """

    def __init__(self, split: QuestionSplit) -> None:
        self._split, self._ids = split, split.ids.view(np.ndarray)
        self._is_answerable, self._holds_answer = split.is_answerable, split.holds_answer

    def __len__(self) -> int:
        return self._split.num_windows

    def __getitems__(self, indices: list[int]) -> Batch:
        split, windows = self._split, np.asarray(indices)
        rows, part, size = (each[windows] for each in (split.window_rows, split.window_starts, split.window_lengths))
        (question_begin, context_begin), length = split.begins[rows].T, split.lengths[rows, 0]
        contexts = length + EXTRA_TOKENS
        place = np.arange((contexts + size).max())
        positions = np.where(
            place < contexts[:, None] - 1,
            question_begin[:, None] + place,
            (context_begin + 1 + part - contexts)[:, None] + place,
        )
        ids = self._ids.take(positions, mode="clip").astype(np.int64)
        is_eos = (place == contexts[:, None] - 1) | (place >= (contexts + size)[:, None])
        ids = np.where(is_eos, split.tokenizer.eos_id, ids)
        first, last = split.spans[rows].T
        holds_answer = self._holds_answer[windows]
        starts, ends = (np.where(holds_answer, token - part + contexts, 0) for token in (first, last))
        arrays = {"inputs": ids, "lengths": contexts + size, "contexts": contexts, "starts": starts, "ends": ends}
        arrays |= {"answerable": self._is_answerable[rows], "rows": windows}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return tensors  # type: ignore[return-value]


class QuestionFormat(RowFormat):
    """The row format of question answering: questions, their contexts, and the positions of the answers.

    Args:
        seq_len: maximum number of tokens of a question and a part of its context, with an `eos` before each.
        stride: distance in tokens between successive windows of a long context; see `QuestionTexts.cut`.
        max_question_length: maximum number of tokens of a question; longer questions are truncated.
    """

    source_rows = "questions"
    lacking = "has no questions about contexts; docstring_questions and files in SQuAD's layout do"
    row, document = "window", "question"
    compared = ("pair",)  # otherwise, training would contain questions about held-out contexts

    def __init__(
        self, seq_len: int, stride: int | None = None, max_question_length: int = 64, max_examples: int | None = None
    ) -> None:
        require_at_least(EXTRA_TOKENS + 2, {"seq_len": 256}, seq_len=seq_len)  # one token of question and of context
        super().__init__(seq_len, max_examples)
        require_at_least(
            1, {"stride": 32, "max_question_length": 64}, stride=stride, max_question_length=max_question_length
        )
        self._stride, self._max_question_length = stride, max_question_length

    def write(self, folder: Path, name: str, rows: datasets.Dataset, tokenizer: TextTokenizer) -> None:
        columns = (list(rows[column]) for column in ("pair", "answers", "starts"))
        np.save(folder / f"{name}.spans.npy", token_spans(tokenizer, *columns))
        super().write(folder, name, rows, tokenizer)

    def open(self, prepared: Prepared, source: Source, whole: bool) -> dict[str, QuestionSplit]:
        splits = {}
        for name, stream in prepared.splits.items():
            spans, table = np.load(prepared.folder / f"{name}.spans.npy"), prepared.rows(name)
            texts = QuestionTexts.of(stream, stream.num_unknown, spans, table, prepared.tokenizer)
            splits[name] = texts.cut(self.seq_len, self._max_question_length, self._stride)
        return splits

    def rows(self, split: QuestionSplit, seed: int) -> Questions:
        return Questions(split)

    def lengths(self, split: QuestionSplit) -> Int64[np.ndarray, " windows"]:
        return split.sizes

    def judged(self, split: QuestionSplit, rows: Rows) -> Int64[np.ndarray, " judged"]:
        """The windows with a whole answer, and all windows of unanswerable questions; if there are none, all windows.

        The other windows of a long context, often most of its windows, have no answer that a model could find.
        """
        is_judged = split.holds_answer | ~split.is_answerable[split.window_rows]
        return np.flatnonzero(is_judged if is_judged.any() else np.ones_like(is_judged))
