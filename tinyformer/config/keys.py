"""The config keys that set the arguments of classes and functions, and values as they are typed on a command line."""

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException

MAX_LENGTH = 120  # maximum number of characters of a value that an error shows

TEXTS = re.compile(
    r"data\.columns|(.+\.)?(checkpoint|resume|init_from|files|path|prompt(_file)?|name|project|entity|revision|stop"
    r"|document_start|separator|eos_token|(\w+_)?(text|column|dir)|clean|corrupted|answer|against|target|labels|pairs)"
)
"""Keys whose value is a text, whatever it looks like; of `LISTS`, one in brackets is a list of texts."""
LISTS = ("files", "prompt", "column", "columns", "analysis.text", "clean", "corrupted", "labels", "pairs", "stop")

COMMA = re.compile(r""",(?=(?:[^'"\[\]{}]|'[^']*'|"[^"]*"|\[[^\]]*\]|\{[^}]*\})*$)""")
"""A comma between two values, not within quotes or brackets."""

WORD = re.compile(r"""(?<=[\[,])\s*(?:('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|([^\[\],]+?))\s*(?=[,\]])""")
"""A word of a list, quoted or not; an apostrophe within it, as in `aren't`, is no quotation mark."""

OPTIONS = ("--help", "--cfg", "--package", "--resolve", "--multirun", "--config-dir", "--shell-completion")
"""The options of a program."""


class NoOverrideError(OverrideParseException):
    """A word of a command line is no KEY=VALUE; the message says what it may have been meant to be."""


def is_multirun(words: Sequence[str]) -> bool:
    """Return True if a command line describes a sweep."""
    return any(word in ("-m", "--multirun") for word in words)


def readable(words: Sequence[str], is_sweep: bool = False) -> list[str]:
    """A command line in Hydra's grammar: what that has no words for is a text, and a path or a prompt always is one.

    So `data.files=café.txt` and `generate.prompt=a, b` need no other quotes than those of the shell. In a sweep, commas
    separate the values of several runs.
    """
    found = []
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        key, equals, value = word.partition("=")
        if key.startswith("--") and key not in OPTIONS:
            raise NoOverrideError(key, "is no option; values are set by KEY=VALUE")
        if not equals and not word.startswith(("-", "~")) and not before.startswith("-"):
            cure = "such as attention=gqa"
            if word.endswith(".ckpt"):
                cure = f"such as init_from={word}, or checkpoint={word} of evaluate"
            elif after and "=" not in after and not after.startswith("-"):
                cure = f"such as {word}={after}"
            if TEXTS.fullmatch(before.partition("=")[0]):
                cure = f"and a text with a space is quoted, as in {shell_word(f'{before} {word}')}"
            raise NoOverrideError(word, f"is no KEY=VALUE, {cure}")
        is_set = equals and not word.startswith("-")
        found.append(f"{key}={_readable(key.lstrip('+'), value, is_sweep)}" if is_set else word)
    return found


def _readable(key: str, value: str, is_sweep: bool) -> str:
    is_text = TEXTS.fullmatch(key)
    takes_list = value.startswith("[") and (not is_text or key.endswith(LISTS))
    of_word = hydra_value if is_text else lambda word: _readable("", word, False)
    words = WORD.sub(lambda word: word[1] or of_word(word[2]), value) if takes_list else value
    for text in (words, value) if is_text else (value, words):
        with contextlib.suppress(ValueError):
            override = parsed(f"k={text}")
            read, is_swept = override.value(), is_sweep and override.is_sweep_override()
            is_meant = is_swept or read is None or (isinstance(read, list) and takes_list)
            is_meant |= isinstance(read, str) and (read == value or value[0] in "'\"" or "\\" in value)
            if is_meant or (text == value and not is_text):
                return text
    if is_sweep and len(values := COMMA.split(value)) > 1:
        return ",".join(_readable(key, one, is_sweep) for one in values)
    return quoted(value)


def text_of(word: str) -> str:
    """The text that an override sets, without quotes; as it stands where Hydra reads something else."""
    with contextlib.suppress(ValueError):
        if isinstance(value := parsed(word).value(), str):
            return value
    return word.partition("=")[2]


def key_of_word(word: str) -> str:
    """The key that an override sets, adds or deletes."""
    return word.lstrip("+~").partition("=")[0]


def parsed(word: str) -> Override:
    """An override; a ValueError says that Hydra's grammar has no words for it."""
    try:
        return OverridesParser.create().parse_override(word)
    except (HydraException, RecursionError) as error:  # a number of thousands of digits is a ValueError
        raise ValueError(word) from error


def key_of(written: Any, path: str | Sequence[str]) -> str:
    """The key under which the user sets a value: interpolations such as `${model.d_model}` are followed.

    `written` is the config as plain containers, its interpolations unresolved; a KeyError if it has no such node.
    """
    keys = path.split(".") if isinstance(path, str) else path
    node = written
    for index, key in enumerate(keys):
        if not isinstance(node, Mapping):
            raise KeyError(".".join(keys))
        node = node[key]
        if isinstance(node, str) and (reference := re.fullmatch(r"\$\{(oc\.select:)?([\w.]+)(?(1),.*)\}", node)):
            followed = [*reference[2].split("."), *keys[index + 1 :]]
            with contextlib.suppress(*[KeyError] if reference[1] else []):  # what oc.select names may not be there
                return key_of(written, followed)
    return ".".join(keys)


def key_of_argument(written: Any, path: Sequence[str]) -> str:
    """The key that sets an argument, at the path of its object and its name; its own name where the config has no key.

    An argument that the object's own node does not set was passed on by an enclosing object, as an encoder passes
    `num_layers` on to its blocks; the nearest enclosing node with that name sets it.
    """
    *owner, name = path
    for depth in range(len(owner), min(len(owner), 1) - 1, -1):
        with contextlib.suppress(KeyError):
            return key_of(written, [*owner[:depth], name])
    return name


def format_value(value: Any) -> str:
    """A value as it is typed in a shell, such as `[16,16,null]` or `'book (1).txt'`; a long one is cut."""
    text = str(value) if isinstance(value, PurePath) else value
    is_plain = isinstance(text, str) and "," not in text and parsed(f"k={_readable('', text, False)}").value() == text
    text = text if is_plain else hydra_value(text)
    return shell_word(text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]}…")


def hydra_value(value: Any) -> str:
    """A value in Hydra's grammar."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra_value(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    if isinstance(value, str | PurePath):
        return str(value) if _is_plain(str(value)) else quoted(str(value))
    return str(value) if isinstance(value, int | float) else type(value).__name__


def shell_word(text: str) -> str:
    """A word in the quotes that a shell needs for it."""
    if re.fullmatch(r"[\w@%+=:,./\[\]…-]+", text):
        return text
    return f'"{text}"' if "'" in text and not re.search(r'["$`\\!]', text) else shlex.quote(text)


def quoted(text: str) -> str:
    """A text in the quotes of Hydra's grammar, where a backslash stands for itself, except before a quote."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"


def _is_plain(text: str) -> bool:
    """Return True if Hydra reads a text as itself without quotes."""
    return bool(re.fullmatch(r"[\w./:@%+*?|$-]+( +[\w./:@%+*?|$-]+)*", text, re.ASCII)) and not re.fullmatch(
        r"(?i)null|true|false|[+-]?(\d[\d_]*\.?|(\d[\d_]*)?\.\d[\d_]*)(e[+-]?[\d_]+)?|[+-]?(inf|nan)", text
    )
