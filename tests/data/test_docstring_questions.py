"""Questions about functions: where the answers are, what is held out, and that the context does not tell the answer."""

import re
from collections import Counter

import pytest

from tinyformer.data import DocstringQuestions
from tinyformer.errors import ArgumentError

LIBRARY = "".join(
    f'def function_{i}():\n    """Returns the number {i} as it is.{" Twice." * (i == 7)}\n\n    More."""\n'
    for i in range(40)
)
LIBRARY += '''
class Kept:
    """No function, this one."""
    async def method(self):
        "Reads the number 4 as it is."
    def function_3(self):
        "Seen before, under this name."
    def same(self):
        "Returns the number 5 as it is."
    def similar(self):
        "Returns a number 6 as it is"
    def __init__(self):
        "Makes an object of it."
    def short(self):
        "Two words."
    def broken(self):
        """A summary that goes
        on in the next line."""
'''


@pytest.fixture
def library(tmp_path, monkeypatch):
    (tmp_path / "numbers.py").write_text(LIBRARY)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    return tmp_path


def lines(context):
    return dict(re.fullmatch(r"def (\w+): (.+)", line).groups() for line in context.splitlines())


def test_the_answer_is_the_summary_of_the_function_that_is_asked_about(library):
    splits = DocstringQuestions(50, 3, 10).load_questions()
    names = {}
    for split, rows in splits.items():
        names[split] = set()
        for question, context, answers, starts in zip(*(rows[name] for name in rows.column_names), strict=True):
            name = re.fullmatch(r"What does (\w+) do\?", question)[1]
            summary_of = lines(context)
            assert len(summary_of) == 3
            assert answers == [summary_of[name]]
            assert context[starts[0] :].splitlines()[0] == answers[0]
            names[split] |= summary_of.keys()
    assert [len(splits[split]) for split in ("train", "validation", "test")] == [50, 30, 30]
    functions = {*(f"function_{i}" for i in range(40)), "method"}
    assert set.union(*names.values()) == functions  # `same` and `similar` have those of others, the rest none
    assert sum(map(len, names.values())) == len(functions)
    assert [len(names[split]) for split in ("validation", "test")] == [4, 4]


def test_every_function_of_a_held_out_context_is_asked_about_and_any_of_a_training_context(library):
    splits = DocstringQuestions(600, 3, 10).load_questions()
    for split in ("validation", "test"):
        rows = splits[split]
        asked = Counter(zip(rows["pair"], rows["text"], strict=True))
        for context in set(rows["pair"]):
            numbers = [number for (pair, _), number in asked.items() if pair == context]
            assert len(numbers) == 3
            assert len(set(numbers)) == 1  # of so few functions, the same context may be drawn twice
    train = splits["train"]
    place = Counter(
        context[: start[0]].count("\n") for context, start in zip(train["pair"], train["starts"], strict=True)
    )
    assert all(abs(number - 200) < 50 for number in place.values())


def test_the_arguments_and_the_library_determine_the_questions(library):
    first, again = (DocstringQuestions(9, 3, 2).load_questions()["test"]["text"] for _ in range(2))
    assert first == again
    prints = {DocstringQuestions(*sizes).fingerprint() for sizes in ((9,), (8,), (9, 3), (9, 3, 2), (9, 3, 2, 1))}
    (library / "other.py").write_text("")
    assert len({*prints, DocstringQuestions(9).fingerprint()}) == 6
    contexts = DocstringQuestions(9, 3, 1).load()
    assert {name: len(rows) for name, rows in contexts.items()} == {"train": 9, "validation": 1, "test": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_contexts": 0}, "num_contexts=0: must be at least 1"),
        ({"num_functions": 1}, "num_functions=1: must be at least 2"),
        ({"num_contexts": 10**6, "num_functions": 20}, "num_contexts=1000000: must be at most 500000"),
        ({"num_held_out": 10**6}, "num_held_out=1000000: must be at most 277777"),
        ({"num_functions": 5}, "num_functions=5: must be at most 4, the number of functions that are held out"),
    ],
)
def test_mistakes(library, options, message):
    with pytest.raises(ArgumentError, match=message):
        DocstringQuestions(**options).load_questions()


@pytest.mark.slow
def test_the_library_of_this_python_has_thousands_of_functions():
    names = [name for rows in DocstringQuestions(1000).load_questions().values() for name in map(lines, rows["pair"])]
    assert len(set().union(*names)) > 2500
