"""Values and texts as the user types them, in a shell and for Hydra."""

import subprocess

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from tinyformer.config.keys import format_value, hydra_value, readable, text_of

SHOWN = {
    "outputs/2026-01-31/last.ckpt": "outputs/2026-01-31/last.ckpt",
    "book (1).txt": "'book (1).txt'",
    "a, b": """ "'a, b'" """.strip(),
    "it's": '"it\'s"',
    "": "''",
    "true": "\"'true'\"",
    "1e-3": "\"'1e-3'\"",
    "é": "é",
}


def test_a_value_is_shown_as_it_is_typed():
    values = [*SHOWN, "9.", "-nan", "\\\n", "null", *WORDS, True, None, [16, 16, None], [[0, 1], [1, 0]]]
    values += [["a b", "c, d", "it's", "é"], {"a": [1], "b": "x y"}, ["'", '"'], " ", "a`b` $(c) $HOME !x"]
    assert [format_value(text) for text in SHOWN] == list(SHOWN.values())
    assert format_value(((0, 1), (1, 0))) == "[[0,1],[1,0]]"
    # What is told is pasted into a shell, for a run and for a sweep.
    command = "printf '%s\\0' " + " ".join(f"key={format_value(value)}" for value in values)
    pasted = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    for is_sweep in (False, True):
        assert [read(word, is_sweep) for word in pasted] == values
    assert [override(f"key={hydra_value(value)}").value() for value in values] == values


WITHOUT_SPACES = """
    café.txt book(1).txt epoch=0-step=10.ckpt a,b.txt [draft].txt {a} {a:1} $5 it's 'Tis 007 1e3 2024 true a#b ~a
    a&b;c|d <|endoftext|> range(3) choice(a,b) Ωμέγα *.txt a! say`x` 100% a\\b end\\
"""
WORDS = [
    *WITHOUT_SPACES.split(),
    *("book (1).txt", "a, b: (c)", "[draft] a.txt", '"So," he said', " a ", "a\nb", "a\tb", "a\u00a0b"),
]
"""Texts and names of files, many of which Hydra's grammar cannot read, or reads as something else."""


@pytest.mark.parametrize("key", ["data.files", "generate.prompt", "analysis.text", "resume", "++hydra.run.dir"])
def test_a_path_and_a_text_need_no_quotes_beside_those_of_the_shell(key):
    assert [read(f"{key}={text}") for text in WORDS] == WORDS
    for text in [*WORDS, "[a]"]:
        (word,) = readable([f"{key}={text}"])
        assert readable([word]) == [word]
        assert text_of(word) == text or text == "[a]"
    is_list = key in ("data.files", "generate.prompt", "analysis.text")
    assert read(f"{key}=[a, é (1)]") == (["a", "é (1)"] if is_list else "[a, é (1)]")
    assert read(f"{key}=null") is None
    assert read(f"{key}=${{oc.env:HOME}}/é") == "${oc.env:HOME}/é"


def test_what_hydra_reads_is_left_alone():
    words = ["-m", "--cfg", "job", "model.num_heads=1,2", "seed=range(3)", "~norm", "model=nano", "data.columns=[a,b]"]
    words += [
        "callbacks.finite={action:skip}",
        "data.files=a.txt,b.txt",
        "generate.prompt='a, b'",
        "attention=glob(m*)",
    ]
    assert readable(words, is_sweep=True) == words
    swept = ["data.files=é.txt,'a,b.txt',c", "task.labels=[a,é],[b,c]"]
    assert readable(swept, is_sweep=True) == ["data.files='é.txt','a,b.txt',c", "task.labels=[a,'é'],[b,c]"]


def test_a_text_that_the_shell_has_split_is_shown_in_quotes():
    with pytest.raises(OverrideParseException, match=r"^is no KEY=VALUE; .* 'data\.files=my book\.txt'$"):
        readable(["data.files=my", "book.txt", "seed=1"])


def override(word):
    return OverridesParser.create().parse_override(word)


def read(word, is_sweep=False):
    (one,) = readable([word], is_sweep)
    return override(one).value()
