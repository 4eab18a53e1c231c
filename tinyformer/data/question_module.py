"""Questions about contexts as the data of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from jaxtyping import Int64

from tinyformer.data.base import RowDataModule
from tinyformer.data.cache import Prepared, Recipe, open_rows
from tinyformer.data.questions import EXTRA_TOKENS, Questions, QuestionSplit, QuestionTexts, token_spans
from tinyformer.data.sources.source import QuestionSource, Source
from tinyformer.data.tokenizer.recipes import TokenizerRecipe
from tinyformer.data.tokenizer.tokenizer import TextTokenizer
from tinyformer.errors import ArgumentError, require_at_least


@dataclass(frozen=True)
class QuestionRecipe(Recipe):
    """Everything that determines the tokenised questions of a `QuestionSource`."""

    method = "load_questions"
    compared = ("pair",)  # else training would have questions about held-out contexts

    def _write(self, folder: Path, name: str, rows: datasets.Dataset, tokenizer: TextTokenizer) -> None:
        columns = (list(rows[column]) for column in ("pair", "answers", "starts"))
        np.save(folder / f"{name}.spans.npy", token_spans(tokenizer, *columns))
        super()._write(folder, name, rows, tokenizer)


class QuestionDataModule(RowDataModule):
    """Batches of questions with their contexts, and where the answers are.

    Args:
        source: where the questions come from: a `QuestionSource`.
        tokenizer: a recipe, built on questions and contexts of the training split, or a finished tokenizer.
        seq_len: maximum number of tokens of a question and a part of its context, with an `eos` before each.
        batch_size: windows in a batch, on each device.
        stride: tokens from the beginning of a window of a long context to that of the next; see `QuestionTexts.cut`.
        max_question_length: maximum number of tokens of a question; longer ones are truncated.
        settings: further arguments of `RowDataModule`.

    Raises:
        ArgumentError: the source has no questions, or a value is out of range.
    """

    splits: dict[str, QuestionSplit]
    row = "window"
    document = "question"
    kind = QuestionSource
    lacking = "has no questions about contexts; docstring_questions and files in SQuAD's layout do"
    recipe, rows = QuestionRecipe, Questions

    def __init__(
        self,
        source: Source,
        tokenizer: TokenizerRecipe,
        seq_len: int,
        batch_size: int,
        *,
        stride: int | None = None,
        max_question_length: int = 64,
        **settings: Any,
    ) -> None:
        require_at_least(EXTRA_TOKENS + 2, {"seq_len": 256}, seq_len=seq_len)  # a token of each
        super().__init__(source, tokenizer, seq_len, batch_size=batch_size, **settings)
        room = seq_len - EXTRA_TOKENS - 1  # of the context, beside a question of one token
        works = {"stride": max(room // 2, 1), "max_question_length": 64}
        require_at_least(1, works, stride=stride, max_question_length=max_question_length)
        if stride is not None and stride >= max(room, 2):
            reason = f"must be less than {room}, or no two windows of `seq_len`={seq_len} would share a token, and an "
            reason += "answer would be cut wherever two of them meet"
            raise ArgumentError("stride", stride, reason, {"stride": max(room // 2, 1)})
        self._stride, self._max_question_length = stride, max_question_length

    def _take(self, prepared: Prepared, whole: bool) -> None:
        self.splits = {
            name: QuestionTexts(
                stream.ids,
                np.asarray(stream.offsets[:-1]).reshape(-1, 2),
                np.diff(stream.offsets).reshape(-1, 2) - 1,
                np.load(prepared.folder / f"{name}.spans.npy"),
                open_rows(prepared.folder, name),
                self.tokenizer,
                stream.num_bytes,
                stream.num_unknown,
            ).cut(self.seq_len, self._max_question_length, self._stride)
            for name, stream in prepared.splits.items()
        }

    def _judged(self, split: str) -> Int64[np.ndarray, " windows"]:
        """The windows that hold the answer, and those of questions without one; all where there are none of these.

        The other windows of a long context, often most of them, have no answer for any model to find.
        """
        questions = self.splits[split]
        is_judged = questions.holds_answer | ~questions.is_answerable[questions.window_rows]
        return np.flatnonzero(is_judged if is_judged.any() else np.ones_like(is_judged))

    def _order(self, split: str) -> Int64[np.ndarray, " windows"]:
        return self.splits[split].sizes
