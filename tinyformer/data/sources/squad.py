"""Questions whose answers are spans of a context: files in SQuAD's layouts, or questions about Python's functions."""

import hashlib
import json
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from numpy.random import Generator

from tinyformer.data.sources.documents import dataset_of, from_columns, strings
from tinyformer.data.sources.files import Layout, json_values, read_rows
from tinyformer.data.sources.pydoc import Library
from tinyformer.data.sources.text_files import LocalFiles
from tinyformer.data.sources.text_paths import stem_and_format
from tinyformer.errors import ArgumentError

COLUMNS = ("question", "context", "answers")
"""The columns of a row; `answers` is a mapping with the keys `text` and `answer_start`, whose values are lists."""

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)

MIN_WORDS = 3  # minimum number of words of a summary

PREFIX = "def "
"""The text before a function's name in the context; its space lets the name have the same tokens as in the question."""

HELD_OUT_SHARE = 0.1
"""The share of the functions that occur only in the validation split, and the equal share for the test split."""

_FORMAT = 2  # increase it when the same arguments would give other questions


def answer_words(answer: str) -> list[str]:
    """The words of an answer that SQuAD's evaluation compares: in lower case, without punctuation and articles."""
    return ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split()


@dataclass(frozen=True)
class Question:
    """A question about a context, with the answers that people gave; an unanswerable question has no answers."""

    question: str
    context: str
    answers: Sequence[str]  # training uses the first
    starts: Sequence[int]  # the index in `context` of the first character of each answer


def from_questions(questions: Sequence[Question]) -> datasets.Dataset:
    """A dataset in memory, with the columns `text` (the question), `pair` (its context), `answers` and `starts`."""
    columns = {
        "text": strings(row.question for row in questions),
        "pair": strings(row.context for row in questions),
        "answers": pa.array([list(row.answers) for row in questions], pa.list_(pa.large_string())),
        "starts": pa.array([list(row.starts) for row in questions], pa.list_(pa.int64())),
    }
    return dataset_of(pa.table(columns))


def contexts_of(questions: Mapping[str, datasets.Dataset]) -> dict[str, datasets.Dataset]:
    """The distinct contexts of the questions of each split, as texts."""
    return {split: from_columns(text=dict.fromkeys(rows["pair"])) for split, rows in questions.items()}


class SquadFiles(LocalFiles):
    """Files of questions about contexts: SQuAD's own .json, or .jsonl and .parquet with the columns of `COLUMNS`.

    SQuAD's published files (Rajpurkar et al. 2016, arXiv 1606.05250; 2018, arXiv 1806.03822) are supported in version
    1.1 and in version 2.0, where a question may have no answer.
    """

    name = "squad"
    rows = ("texts", "questions")

    def fingerprint(self) -> str:
        return self.hash(b"questions")

    def load(self, rows: str = "texts", max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """All questions of each split, in the order of the files; with rows="texts", their distinct contexts."""
        splits = {
            split: from_questions([question for file in files for question in self._read(file)])
            for split, files in self.of_splits.items()
        }
        return splits if rows == "questions" else contexts_of(splits)

    def layout_of(self, rows: str) -> Layout:
        columns = COLUMNS if self.is_labelled else COLUMNS[:2]
        return Layout(columns, arguments=["files"] * len(columns))

    def _read(self, file: Path) -> Iterator[Question]:
        """The questions of one file."""
        refuse, kind = partial(ArgumentError, "files", str(file)), stem_and_format(file)[1]
        if self.is_labelled and kind not in (".json", ".jsonl", ".parquet"):
            raise refuse("cannot hold questions; .json, .jsonl and .parquet files can")
        entries = json_values(file) if self.is_labelled and kind == ".json" else []
        if len(entries) == 1 and isinstance(entries[0], dict) and "data" in entries[0]:
            yield from _published(entries[0], refuse)
            return
        for number, values in enumerate(read_rows(file, self.layout_of("questions")), start=1):
            question, context, answers = (*values, None)[:3]
            yield make_question(question, context, answers, f"row {number}", refuse)


def _published(document: Mapping[str, Any], refuse: Callable[[str], ArgumentError]) -> Iterator[Question]:
    """The questions of a published file of SQuAD; `refuse` makes the error about the file from a reason."""
    for article in document["data"]:
        for paragraph in article["paragraphs"]:
            for number, asked in enumerate(paragraph["qas"], start=1):
                answers = asked.get("answers", [])
                columns = {key: [answer.get(key) for answer in answers] for key in ("text", "answer_start")}
                place = f"question {asked.get('id', number)!s:.60}"
                yield make_question(asked.get("question"), paragraph.get("context"), columns, place, refuse)


def make_question(
    question: Any, context: Any, answers: Any, place: str, refuse: Callable[[str], ArgumentError]
) -> Question:
    """Make a `Question` of the values of `COLUMNS` in a row; malformed values are refused.

    The answers are a mapping with the lists `text` and `answer_start`, or None. `place` describes the row in errors.
    """
    for name, text in (("question", question), ("context", context)):
        if not isinstance(text, str) or not text.strip():
            raise refuse(f"{place} has no {name}; remove it, or fill it in")
    texts, starts = (answers["text"], answers["answer_start"]) if answers is not None else ([], [])
    for text, start in zip(texts, starts, strict=True):
        if not text.strip() or start < 0 or context[start : start + len(text)] != text:
            raise refuse(f"the context of {place} has no answer {text!r:.60} at character {start}; remove or fix it")
    return Question(question, context, texts, starts)


class DocstringQuestions:
    """Questions about functions. The context lists several functions with the first lines of their docstrings.

    A context has a line for each of its functions, as in "def shorten: Collapse and truncate the given text to fit in
    the given width." The question "What does shorten do?" names one of them, and the answer is its summary. All
    functions of a context are equally likely to be asked about, so that the context alone does not determine the
    answer: a model has to find the function's name in the context. The functions of the validation and test splits do
    not occur in training. A context of these splits has a question about every function, a context of training about
    one function, drawn at random. The texts differ between Python versions.

    Args:
        num_contexts: number of contexts for training, each with one question.
        num_functions: number of functions in a context.
        num_held_out: number of contexts of the validation split, and of the test split, each with `num_functions`
            questions.
        seed: determines the contexts, and which functions are held out.
    """

    name = "docstring_questions"
    rows = ("texts", "questions")
    has_own_splits = True

    def __init__(
        self, num_contexts: int = 10_000, num_functions: int = 6, num_held_out: int = 100, seed: int = 0
    ) -> None:
        self.num_contexts, self.num_functions = num_contexts, num_functions
        self.num_held_out, self.seed, self._library = num_held_out, seed, Library()

    def fingerprint(self) -> str:
        parts = [self.num_contexts, self.num_functions, self.num_held_out, self.seed, _FORMAT]
        return hashlib.sha256(json.dumps([self._library.fingerprint(), *parts]).encode()).hexdigest()

    def load(self, rows: str = "texts", max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """The questions of each split; with rows="texts", their distinct contexts."""
        rng = np.random.default_rng(self.seed)
        summaries = self._summaries()
        names = [sorted(summaries)[index] for index in rng.permutation(len(summaries))]
        number = int(len(names) * HELD_OUT_SHARE)
        held_out = {"validation": names[:number], "test": names[number : 2 * number]}
        splits = {"train": self._questions(summaries, names[2 * number :], self.num_contexts, 1, rng)}
        for split, own in held_out.items():
            splits[split] = self._questions(summaries, own, self.num_held_out, self.num_functions, rng)
        return splits if rows == "questions" else contexts_of(splits)

    def _summaries(self) -> dict[str, str]:
        """Map each function's name to the first line of its first docstring; of names with equal summaries, keep one.

        Summaries are equal if their `answer_words` are equal, so that no held-out summary occurs in training.
        """
        summary_of: dict[str, str] = {}
        for docstring in self._library.docstrings():
            is_plain = docstring.is_function and not docstring.name.startswith("__")
            if is_plain and len(docstring.summary.split()) >= MIN_WORDS:
                summary_of.setdefault(docstring.name, docstring.summary)
        name_of = {tuple(answer_words(summary)): name for name, summary in reversed(summary_of.items())}
        return {name: summary_of[name] for name in name_of.values()}

    def _questions(
        self, summary_of: Mapping[str, str], names: Sequence[str], num_contexts: int, num_asked: int, rng: Generator
    ) -> datasets.Dataset:
        """Draw contexts from the named functions, and `num_asked` questions about each context."""
        questions = []
        for _ in range(num_contexts):
            chosen = [names[index] for index in rng.choice(len(names), self.num_functions, replace=False)]
            lines = [f"{PREFIX}{name}: {summary_of[name]}" for name in chosen]
            context = "\n".join(lines)
            for index in rng.permutation(self.num_functions)[:num_asked]:
                # Counted from the function's line, since a summary may also occur within another summary.
                line = len("\n".join(["", *lines[:index]]))
                name, start = chosen[index], line + len(f"{PREFIX}{chosen[index]}: ")
                questions.append(Question(f"What does {name} do?", context, [summary_of[name]], [start]))
        return from_questions(questions)
