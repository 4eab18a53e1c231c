"""Questions about functions of Python's standard library, whose answers are spans of a context."""

import hashlib
import json
from collections.abc import Mapping, Sequence

import datasets
import numpy as np
from numpy.random import Generator

from tinyformer.data.sources.pydoc import Library
from tinyformer.data.sources.squad import Question, answer_words, contexts_of, from_questions
from tinyformer.errors import ArgumentError, require_at_least

MIN_WORDS = 3  # of a summary

PREFIX = "def "
"""The text before a name in the context, with a space as in the question, so that the name may have the same tokens."""

HELD_OUT_SHARE = 0.1
"""The share of the functions that only the validation split names, and of those that only the test split names."""

_FORMAT = 2  # increase it when the same arguments would give other questions


class DocstringQuestions:
    """Questions about functions. The context lists several functions with the first lines of their docstrings.

    A context has a line for each of its functions, as in "def shorten: Collapse and truncate the given text to fit in
    the given width."; the question "What does shorten do?" names one of them, and its summary is the answer. Each
    function of a context is as likely to be asked about as any other, so that the context alone does not tell the
    answer: a model has to find the question's name in the context. The functions of the validation and test splits do
    not occur in training. In these splits all functions of a context are asked about, in training one that is drawn at
    random. The texts differ between Python versions.

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
        works = {"num_contexts": 10_000, "num_functions": 6, "num_held_out": 100}
        require_at_least(1, works, num_contexts=num_contexts, num_held_out=num_held_out)
        require_at_least(2, works, num_functions=num_functions)
        self.num_contexts, self.num_functions = num_contexts, num_functions
        self.num_held_out, self.seed, self._library = num_held_out, seed, Library()

    def fingerprint(self) -> str:
        parts = [self.num_contexts, self.num_functions, self.num_held_out, self.seed, _FORMAT]
        return hashlib.sha256(json.dumps([self._library.fingerprint(), *parts]).encode()).hexdigest()

    def load(self, rows: str = "texts", max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """The questions of each split; as texts, their contexts."""
        rng = np.random.default_rng(self.seed)
        summaries = self._summaries()
        names = [sorted(summaries)[index] for index in rng.permutation(len(summaries))]
        number = int(len(names) * HELD_OUT_SHARE)
        if self.num_functions > number:
            reason = f"must be at most {number}, the number of functions that are held out"
            raise ArgumentError("num_functions", self.num_functions, reason, {"num_functions": 6})
        held_out = {"validation": names[:number], "test": names[number : 2 * number]}
        splits = {"train": self._questions(summaries, names[2 * number :], self.num_contexts, 1, rng)}
        for split, own in held_out.items():
            splits[split] = self._questions(summaries, own, self.num_held_out, self.num_functions, rng)
        return splits if rows == "questions" else contexts_of(splits)

    def _summaries(self) -> dict[str, str]:
        """The first line of the first docstring of each name; of several names with one summary, the first is kept.

        Summaries are the same if their `answer_words` are: otherwise, a summary that is held out could be trained on.
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
        """The questions about contexts of some functions, `num_asked` about each."""
        questions = []
        for _ in range(num_contexts):
            chosen = [names[index] for index in rng.choice(len(names), self.num_functions, replace=False)]
            lines = [f"{PREFIX}{name}: {summary_of[name]}" for name in chosen]
            context = "\n".join(lines)
            for index in rng.permutation(self.num_functions)[:num_asked]:
                # From the line of the function, since a summary may also stand within another.
                line = len("\n".join(["", *lines[:index]]))
                name, start = chosen[index], line + len(f"{PREFIX}{chosen[index]}: ")
                questions.append(Question(f"What does {name} do?", context, [summary_of[name]], [start]))
        return from_questions(questions)
