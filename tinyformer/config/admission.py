"""The choices and values that an untrusted checkpoint, run folder or finding may set in a config.

There is one rule, `admit`: a file chooses among our own config files and sets plain values at keys that they have, and
a class is one of ours, unless the command line names it.
"""

import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException

from tinyformer.config.conf import choices_of, files, values_of_keys
from tinyformer.config.keys import hydra_value, parsed

Plain: TypeAlias = dict[str, Any]
Trust: TypeAlias = Callable[[str, Any], bool]
"""Whether the user has named a class at a key: a function of the key and the dotted name of the class."""

DERIVED = ("data", "tokenizer", "network", "datamodule")
"""Nodes in which a file names no class, since classes of data read files and download. A checkpoint sets no key there
that our YAML computes from others."""

OF_MODELS = ("tinyformer.nn.", "tinyformer.tasks.")  # the packages whose classes a file may name
SCORE_KEYS = ("attention.score", "cross_attention.score")  # keys whose plain value may be the name of a class

TYPED_AGAIN = {
    "cache_dir": "makes a folder",  # which could be a new group of config files
    "entity": "sends the run to a team",
}
"""Last parts of keys that only the command line may set, and what each of them does."""

MAX_DEPTH = 2  # maximum depth of nested lists


class NotAdmittedError(ValueError):
    """A file says more of a config than it may: a key, and what it does there, as in "calls 'os.system'".

    `target` is the class that it names, if a user who trusts it can name it, too.
    """

    def __init__(self, key: str, problem: str, target: str | None = None) -> None:
        super().__init__(problem)
        self.key, self.target = key, target


def never_instantiated(key: str, name: Any) -> bool:
    """Trust in any class, for a config that is only read."""
    return True


def admit(key: str, value: Any, trust: Trust = lambda key, name: False, is_argument: bool = False) -> None:
    """Refuse what a file may not set at the key of an axis, of a value or of a class, such as "norm._target_".

    With `is_argument`, the file also names the class of the key's node, which may have arguments that our YAML lacks.
    """
    if key in files():
        if value not in (None, *choices_of(key)):
            raise NotAdmittedError(key, f"chooses {_shown(value)}, which is not a choice of this axis")
        return
    known, last = values_of_keys().get(key, []), key.rpartition(".")[2]
    if not known and not (is_argument and re.fullmatch(r"[A-Za-z]\w*", last, re.ASCII)):
        raise NotAdmittedError(key, "is not a key of the config files")
    if last in TYPED_AGAIN and value is not None:
        raise NotAdmittedError(key, f"{TYPED_AGAIN[last]}, {_shown(value)}")
    if problem := problem_of_value(value):
        raise NotAdmittedError(key, problem)
    if last == "_target_" or (key in SCORE_KEYS and not (isinstance(value, str) and "." not in value)):
        name = value if isinstance(value, str) else None
        is_ours = key.partition(".")[0] not in DERIVED and (name in known or _is_class_of_models(name or ""))
        if name is None or not (is_ours or trust(key, name)):
            what = f"calls {_shown(value)}, which is not a class of tinyformer and could run any code"
            raise NotAdmittedError(key, what, name)
    elif last.startswith("_") and value not in known:
        raise NotAdmittedError(key, "cannot be set by a file")


def problem_of_value(value: Any) -> str | None:
    """The reason that a file may not set a value, as in "is '${x}': an interpolation"; None if it is plain."""
    entries = [value]
    for _ in range(MAX_DEPTH):
        entries = [one for entry in entries for one in (entry if isinstance(entry, list) else [entry])]
    for entry in entries:
        if isinstance(entry, str) and "${" in entry:
            return f"is {entry[:100]!r}: an interpolation, which a file cannot bring"
        if not isinstance(entry, str | int | float | None) or (isinstance(entry, float) and not math.isfinite(entry)):
            return "must be a finite number, a text, true, false, null or a list of these"
    return None


def _shown(value: Any) -> str:
    """A value of a file as text of bounded length."""
    return repr(value[:100]) if isinstance(value, str) else f"a value of the type {type(value).__name__}"


def _is_class_of_models(name: str) -> bool:
    """Return True if a dotted name is that of a class that one of the packages of models defines."""
    module_name, _, attribute = name.rpartition(".")
    if not name.startswith("tinyformer."):
        return False
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return False
    value = getattr(module, attribute, None)
    return isinstance(value, type) and value.__module__.startswith(OF_MODELS)


def admit_override(entry: str, in_sweep: bool = False) -> str:
    """An override from a run folder or a finding, parsed, admitted (see `admit`) and written anew.

    In a sweep it may have several values; each of them is checked.
    """
    try:
        override = parsed(entry)
    except ValueError as error:
        raise NotAdmittedError(entry, "is not an override") from error
    key, start = override.key_or_group, override.get_key_element()
    if override.package is not None:
        raise NotAdmittedError(key, "moves a config file to another key")
    if key.partition("/")[0].partition(".")[0].casefold() == "hydra":
        raise NotAdmittedError(key, "changes Hydra itself")
    if key not in values_of_keys():
        raise NotAdmittedError(key, "is not a key of the config files")
    if override.is_delete() and "=" not in entry:
        return start
    if not override.is_sweep_override():
        return f"{start}={_admit_value(key, override.value())}"
    if not in_sweep:
        raise NotAdmittedError(key, "has several values")
    if getattr(override.value(), "shuffle", False):
        raise NotAdmittedError(key, "shuffles its values")
    texts = alternatives(entry)
    if not texts:
        raise NotAdmittedError(key, "is no list of values")
    return f"{start}={','.join(_admit_value(key, parsed(f'{key}={text}').value()) for text in texts)}"


def alternatives(entry: str) -> list[str]:
    """The values of an override as they are typed, empty if it lists none; those of `glob` are choices of an axis."""
    if not is_swept(entry):
        return [entry.partition("=")[2]]
    override = parsed(entry)
    values, axis = override.value(), override.key_or_group
    if isinstance(values, Glob):
        is_ours = axis in files() and all(isinstance(name, str) for name in values.include + values.exclude)
        return values.filter(choices_of(axis)) if is_ours else []
    try:
        return list(override.sweep_string_iterator())
    except (HydraException, ArithmeticError, ValueError):
        return []


def is_swept(entry: str) -> bool:
    """Return True if an override has several values, each of which makes a job."""
    try:
        return parsed(entry).is_sweep_override()
    except ValueError:
        return False


def _admit_value(key: str, value: Any) -> str:
    """A single value, which may be a mapping, as it is typed."""
    try:
        for path, leaf in [(key, value)] if key in files() else leaves(value, key):
            admit(path, leaf)
    except NotAdmittedError as error:
        inner = "" if error.key == key else f"sets {error.key[:100]}, which "
        raise NotAdmittedError(key, f"{inner}{error}") from error
    return hydra_value(value)


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a nested mapping, each with its dotted key."""
    if isinstance(node, Mapping):
        for name, entry in node.items():
            yield from leaves(entry, f"{key}.{name}" if key else str(name))
    else:
        yield key, node
