"""Checks of a config: its values must fit the signatures of the classes that receive them; no axis may be missing."""

import difflib
import functools
import inspect
import pydoc
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tinyformer.config.conf import axes_of, format_value, key_of, values_of_keys
from tinyformer.config.errors import ConfigError

RUNTIME_KEYS = frozenset({"model.vocab_size"})  # keys that are null until the run sets them


def check_types(config: DictConfig, part: str = "", groups: Mapping[str, Any] | None = None) -> None:
    """Check every value of a config, or of its node `part`, against the signature of the class that receives it.

    Args:
        config: the whole config.
        part: the key of the node to check, such as `network`.
        groups: for groups without `_target_`, the key of each and the class that receives its values; the class at the
            key "" receives top-level values of the config.
    """
    written = OmegaConf.to_container(config, resolve=False)
    for group, function in (groups or {}).items():
        owner: Any = OmegaConf.select(config, group) if group else config
        for name in owner.keys() if group else owner.keys() & _parameters(function):
            value = OmegaConf.to_container(owner[name]) if OmegaConf.is_config(owner[name]) else owner[name]
            check_value(function, name, value, f"{group}.{name}" if group else name)
    for path, node in targets(config, part):
        functions = [_locate(each["_target_"], f"{path}._target_") for each in (*_kinds_of(node), node)]
        for name, value in node.items():
            function = next((each for each in functions if name in _parameters(each)), functions[0])
            key = key_of(written, f"{path}.{name}")
            may_lack = path.endswith("attention") or len(functions) > 1
            is_ours = name not in _parameters(function) and _is_left_out(written, f"{path}.{name}", key, value)
            is_left_out = may_lack and is_ours
            if not name.startswith("_") and not (value is None and key in RUNTIME_KEYS) and not is_left_out:
                check_value(function, name, value, key)


def _kinds_of(node: Mapping[str, Any]) -> list[Any]:
    """The nodes of the kinds that `by_layer` chooses among; its other values are their arguments."""
    kinds, pattern = node.get("kinds"), node.get("pattern")
    return [kinds[kind] for kind in pattern if kind in kinds] if kinds and isinstance(pattern, list) else []


def _is_left_out(written: Any, path: str, key: str, value: Any) -> bool:
    """Return True if our config files set an argument, not the user, so that a class of attention may lack it."""
    owner, _, name = path.rpartition(".")
    return key != f"{key_of(written, owner)}.{name}" or value in values_of_keys().get(key, [])


def check_value(function: Any, name: str, value: Any, key: str) -> None:
    """Check the type of an argument's value; the `ConfigError` names the config key and an example of a value."""
    parameters = _parameters(function)
    if name not in parameters:
        if None in parameters:
            return
        close = difflib.get_close_matches(name, [known for known in parameters if known], n=1)
        hint = f" Did you mean {key.rpartition('.')[0]}.{close[0]}?" if close else ""
        raise ConfigError(f"{key}: {function.__name__} has no argument {name}.{hint}")
    if isinstance(value, dict) and "_target_" in value:
        return  # `check_types` checks this node separately
    if problem := _type_problem(_type_hint(parameters[name], name), value):
        plain = (own for own in values_of_keys().get(key, []) if isinstance(own, int | float | str))
        example = next((own for own in plain if "$" not in str(own)), None)
        cure = "" if example is None else f", such as {key}={format_value(example)}"
        raise ConfigError(f"{key}={format_value(value)}: {problem}{cure}.")


@functools.cache
def _parameters(function: Any) -> dict[str | None, Any]:
    """The parameters of a function or class by name, each with the function or class that declares it.

    If a class passes keywords on to its base, it has the base's parameters, too. A key None means: any name is valid.
    """
    signature = inspect.signature(function).parameters.values()
    parameters: dict[str | None, Any] = {p.name: function for p in signature}
    keywords = next((p for p in signature if p.kind is p.VAR_KEYWORD), None)
    if keywords is None:
        return parameters
    del parameters[keywords.name]
    base = function.__base__ if inspect.isclass(function) else object
    return {**({None: function} if base is object else _parameters(base)), **parameters}


def _type_problem(hint: Any, value: Any) -> str | None:
    """The reason why a value is not of a type, as in "should be a valid integer"; None for a valid value."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError
    from pydantic.errors import PydanticUserError

    try:
        adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:
        adapter = TypeAdapter(hint)
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError as error:
        messages = [detail["msg"].removeprefix("Input ") for detail in error.errors()]
        # Each member of a union has a message; the longest lists the most choices. The message of a sequence about a
        # text, "'str' instances are not allowed", does not name an allowed type.
        return max(messages, key=lambda message: (not message.startswith("'str' instances"), len(message)))
    return None


@functools.cache
def _type_hint(function: Any, name: str) -> Any:
    called = function.__init__ if inspect.isclass(function) else function
    try:
        return typing.get_type_hints(called).get(name, Any)
    except (NameError, TypeError):
        return Any


def _locate(target: Any, key: str) -> Any:
    function = pydoc.locate(target) if isinstance(target, str) else None
    if not callable(function):
        raise ConfigError(
            f"{key}={format_value(target)}: cannot be imported from here; MODULE.CLASS of a module next to train.py, "
            "or in a folder of PYTHONPATH, works."
        )
    return function


def targets(config: DictConfig, part: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node with a `_target_` in a config, or in its node `part`: the dotted path and the resolved values."""

    def walk(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(node, dict):
            if "_target_" in node:
                yield path, node
            for name, value in node.items():
                yield from walk(value, f"{path}.{name}" if path else str(name))

    node = OmegaConf.select(config, part) if part else config
    yield from walk(OmegaConf.to_container(node, resolve=True, throw_on_missing=True), part)


def check_early(config: DictConfig) -> None:
    """Refuse a config that lacks an axis, before torch and Lightning are imported: their import takes seconds."""
    for axis, choice in axes_of("train").items():
        if choice and config.get(axis) is None:
            raise ConfigError(f"~{axis}: a run needs this axis; leave ~{axis} out, or choose, as in {axis}={choice}.")
