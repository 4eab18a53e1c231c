"""The config files in `conf`: their axes, choices and keys, their resolvers, and the syntax of values."""

import contextlib
import functools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf

MAX_LENGTH = 120  # maximum number of characters of a value that an error shows

TEXTS = re.compile(
    r"data\.columns|(.+\.)?(checkpoint|resume|init_from|files|path|prompt(_file)?|name|project|entity|revision|stop"
    r"|document_start|separator|eos_token|(\w+_)?(text|column|dir)|clean|corrupted|answer|against|target|labels|pairs)"
)
"""Keys whose value is always a string; for a key that ends in a name of `LISTS`, brackets make a list of strings."""
LISTS = ("files", "prompt", "column", "columns", "analysis.text", "clean", "corrupted", "labels", "pairs", "stop")

COMMA = re.compile(r""",(?=(?:[^'"\[\]{}]|'[^']*'|"[^"]*"|\[[^\]]*\]|\{[^}]*\})*$)""")
"""A comma between two values, not within quotes or brackets."""

WORD = re.compile(r"""(?<=[\[,])\s*(?:('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|([^\[\],]+?))\s*(?=[,\]])""")
"""A word of a list, quoted or not; an apostrophe within it, as in `aren't`, is no quotation mark."""

OPTIONS = ("--help", "--cfg", "--package", "--resolve", "--multirun", "--config-dir", "--shell-completion")
"""The options that `train` and `evaluate` accept in addition to KEY=VALUE."""

AXES = (
    *("model", "attention", "cross_attention", "position", "block", "feed_forward", "norm", "network"),
    *("task", "data", "tokenizer"),
)
"""The axes that a checkpoint stores; an evaluation chooses trainer, logger, callbacks and the others itself."""

STORED = (*AXES, "datamodule", "seed", "deterministic")  # the top-level keys of a config that a checkpoint stores

NO_AXES = ("finding",)  # folders of `conf` that are not axes of any program

NEVER_SET = ("defaults", "hydra", "resume", "checkpoint")  # entries of our config files that are not values of a run

FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's fast loader, or the slow one if PyYAML was built without C: a sweep has hundreds of files."""


class NoOverrideError(OverrideParseException):
    """A word of a command line is not KEY=VALUE; the message suggests what the user may have meant."""


def is_multirun(words: Sequence[str]) -> bool:
    """Return True if a command line describes a sweep."""
    return any(word in ("-m", "--multirun") for word in words)


def readable(words: Sequence[str], is_sweep: bool = False) -> list[str]:
    """Quote values on a command line that Hydra's grammar allows only in quotes, such as some paths and prompts.

    Users type quotes around `generate.prompt=a, b` only for the shell, and none around `data.files=café.txt`. In a
    sweep, commas separate the values of several runs.
    """
    found = []
    for before, word in zip(["", *words], words, strict=False):
        key, equals, value = word.partition("=")
        if key.startswith("--") and key not in OPTIONS:
            raise NoOverrideError(key, "is no option; values are set by KEY=VALUE")
        if not equals and not word.startswith(("-", "~")) and not before.startswith("-"):
            cure = "such as attention=gqa"
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
    """The string that an override sets, without quotes; a value that is no string for Hydra is returned as typed."""
    with contextlib.suppress(ValueError):
        if isinstance(value := parsed(word).value(), str):
            return value
    return word.partition("=")[2]


def key_of_word(word: str) -> str:
    """The key that an override sets, adds or deletes."""
    return word.lstrip("+~").partition("=")[0]


def parsed(word: str) -> Override:
    """Parse an override by Hydra's grammar; raise a ValueError if that is not possible."""
    try:
        return OverridesParser.create().parse_override(word)
    except (HydraException, RecursionError) as error:  # a number of thousands of digits raises a ValueError itself
        raise ValueError(word) from error


def key_of(written: Any, path: str | Sequence[str]) -> str:
    """The key under which the user sets a value: interpolations such as `${model.d_model}` are followed.

    `written` is the config as plain containers, with unresolved interpolations. Raises a KeyError for an unknown path.
    """
    keys = path.split(".") if isinstance(path, str) else path
    node = written
    for index, key in enumerate(keys):
        if not isinstance(node, Mapping):
            raise KeyError(".".join(keys))
        node = node[key]
        if isinstance(node, str) and (reference := re.fullmatch(r"\$\{(oc\.select:)?([\w.]+)(?(1),.*)\}", node)):
            followed = [*reference[2].split("."), *keys[index + 1 :]]
            with contextlib.suppress(*[KeyError] if reference[1] else []):  # the key in oc.select may be missing
                return key_of(written, followed)
    return ".".join(keys)


def key_of_argument(written: Any, path: Sequence[str]) -> str:
    """The config key that sets the argument at `path` (its object's path, then its name); the name if no key does.

    If the object's own node does not set the argument, an enclosing object passes the argument on, as an encoder passes
    `num_layers` on to its blocks; the key then belongs to the nearest enclosing node that sets the argument.
    """
    *owner, name = path
    for depth in range(len(owner), min(len(owner), 1) - 1, -1):
        with contextlib.suppress(KeyError):
            return key_of(written, [*owner[:depth], name])
    return name


def format_value(value: Any) -> str:
    """A value as it is typed in a shell, such as `[16,16,null]` or `'book (1).txt'`; a long value is cut."""
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
    """A word as it is typed in a shell, in quotes if the shell needs them."""
    if re.fullmatch(r"[\w@%+=:,./\[\]…-]+", text):
        return text
    return f'"{text}"' if "'" in text and not re.search(r'["$`\\!]', text) else shlex.quote(text)


def quoted(text: str) -> str:
    """A text in single quotes by Hydra's grammar, which takes a backslash literally except before a quote."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"


def _is_plain(text: str) -> bool:
    """Return True if Hydra parses a text without quotes as the same string."""
    return bool(re.fullmatch(r"[\w./:@%+*?|$-]+( +[\w./:@%+*?|$-]+)*", text, re.ASCII)) and not re.fullmatch(
        r"(?i)null|true|false|[+-]?(\d[\d_]*\.?|(\d[\d_]*)?\.\d[\d_]*)(e[+-]?[\d_]+)?|[+-]?(inf|nan)", text
    )


def config_dir() -> Path:
    """The folder of the config files: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).parents[1]
    return next(folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir())


@functools.cache
def files() -> dict[str, dict[str, Path]]:
    """The config files of each axis, by their names."""
    names = sorted(folder.name for folder in config_dir().iterdir() if folder.is_dir() and folder.name not in NO_AXES)
    axes = [*filter(names.__contains__, AXES), *(name for name in names if name not in AXES)]
    return {axis: {file.stem: file for file in sorted((config_dir() / axis).glob("*.yaml"))} for axis in axes}


@functools.cache
def programs() -> dict[str, Path]:
    """The file of each program's primary config, by the name of the program."""
    return {file.stem: file for file in sorted(config_dir().glob("*.yaml"))}


def choices_of(axis: str) -> list[str]:
    """The choices of an axis: the names of its YAML files."""
    return [name for name in files()[axis] if not name.startswith("_")]


def load_plain_yaml(text: str) -> Any:
    """Parse a YAML text, which may be untrusted, into plain data; no other objects are made.

    Raises:
        yaml.YAMLError: the text is not YAML.
    """
    return yaml.load(text, Loader=FAST_LOADER)


@functools.cache
def read(name: str, axis: str | None = None) -> dict[str, Any]:
    """The unresolved config of a program, or of a choice of `axis`, merged with its base files; {} if there is none."""
    file = (programs() if axis is None else files().get(axis, {})).get(name)
    if file is None:
        return {}
    contents: dict[str, Any] = load_plain_yaml(file.read_text(encoding="utf-8")) or {}
    inherited: dict[str, Any] = {}
    for base in contents.get("defaults", []):
        if isinstance(base, str) and base != "_self_":
            # "_shared" is of the same axis, "/attention/gqa@_here_" of another.
            *other, stem = base.partition("@")[0].strip("/").split("/")
            inherited = _merged(inherited, read(stem, other[0] if other else axis))
    return _merged(inherited, contents)


def _merged(base: Any, own: Any) -> Any:
    """Merge the contents of a file onto the contents of its base, as Hydra does."""
    if not (isinstance(base, dict) and isinstance(own, dict)):
        return own
    return base | own | {key: _merged(base[key], own[key]) for key in base.keys() & own.keys()}


def default_choices(chosen: Mapping[str, str]) -> dict[str, str | None]:
    """The choice of each axis of a training run: as in `chosen`, else the default, which the chosen task may set."""
    choices: dict[str, Any] = axes_of("train") | dict(chosen)
    for node in read(choices["task"], "task")["defaults"]:
        if isinstance(node, dict):  # such as "override /data@_global_.data: summaries"
            choices |= {key.partition("/")[2].partition("@")[0]: choice for key, choice in node.items()}
    return choices | dict(chosen)


def axes_of(program: str) -> dict[str, str | None]:
    """The config groups, called axes, of a program such as "train", each with its default choice."""
    axes: dict[str, str | None] = {}
    for node in read(program).get("defaults", []):
        axes |= axes_of(node) if isinstance(node, str) else node
    return {axis: choice for axis, choice in axes.items() if not axis.startswith("override ")}


@functools.cache
def values_of_keys() -> dict[str, list[Any]]:
    """The dotted keys of the programs' configs, nodes included, each with its values in the config files."""
    values: dict[str, list[Any]] = {axis: [{}] for axis in files()}

    def add(node: Any, key: str) -> None:
        values.setdefault(key, []).append(node)
        for name, entry in node.items() if isinstance(node, dict) else ():
            add(entry, f"{key}.{name}")

    for axis, names in {None: programs(), **files()}.items():
        for name, file in names.items():
            is_global = axis is None or "# @package _global_" in file.read_text(encoding="utf-8").splitlines()
            for key, node in read(name, axis).items():
                if key not in NEVER_SET:
                    add(node, key if is_global else f"{axis}.{key}")
    return values


def register_resolvers(command: str = "tinyformer") -> None:
    """Register the functions that the config files call; `${command:}` is the program as the user called it."""
    functions: dict[str, Callable[..., Any]] = {
        "default_num_kv_heads": default_num_kv_heads,
        "original_peak_rate": original_peak_rate,
        "axes": lambda *names: describe_axes(names).replace("$", "$$"),  # Hydra substitutes $ in its help template
        "command": lambda: command,
    }
    for name, function in functions.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


def default_num_kv_heads(num_heads: Any) -> Any:
    """The largest divisor of a number of heads that is at most half of it; 1 for a single head."""
    if not isinstance(num_heads, int) or num_heads < 2:
        return num_heads  # refused by the check of model.num_heads
    return next(n for n in range(num_heads // 2, 0, -1) if num_heads % n == 0)


def original_peak_rate(d_model: Any, warmup_steps: Any) -> float:
    """d_model^-0.5 · warmup_steps^-0.5, the highest rate of the original transformer (arXiv 1706.03762, §5.3)."""
    return float((d_model * warmup_steps) ** -0.5)


def describe_axes(axes: Sequence[str] = ()) -> str:
    """The text of `--help` on axes, by default all axes of `train`: each choice with the first comment of its file."""
    lines = []
    for axis in axes or sorted(axes_of("train")):
        lines.append(axis)
        lines += [f"  {choice:<16} {_first_comment(files()[axis][choice])}".rstrip() for choice in choices_of(axis)]
    return "\n".join(lines)


def _first_comment(path: Path) -> str:
    """The first comment of a file, except "# @package", which is for Hydra."""
    comments = (line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@package")), "")
