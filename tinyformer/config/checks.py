"""Type checks of a config against the signatures of the classes that its nodes name."""

import difflib
import inspect
import math
import pydoc
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tinyformer.config.errors import ConfigError
from tinyformer.config.invocation import config_dir
from tinyformer.config.keys import format_value, key_of

RUNTIME_KEYS = frozenset({"model.vocab_size"})
"""Keys that are null until the run sets them."""


OBJECTS = ("network", "datamodule", "task.objective", "optimizer", "schedule")
"""Nodes that the run instantiates."""


def check_types(config: DictConfig, part: str = "", choices: Mapping[str, Any] | None = None) -> None:
    """Check every value of a config against the signature of the class that receives it.

    Args:
        config: the whole config.
        part: the key of the node to check, such as `network`; the whole config by default.
        choices: the choice of each axis; errors name the default of its file.

    Raises:
        ConfigError: a class has no such argument, or its type is another.
    """
    written = OmegaConf.to_container(config, resolve=False)
    for path in OBJECTS:
        node = OmegaConf.select(config, path, throw_on_resolution_failure=False)
        if not part and node is not None and (not OmegaConf.is_dict(node) or node.get("_target_") is None):
            raise ConfigError(f"{path}={format_value(node)}: must be a mapping with a _target_; leave it out.")
    for path, node in targets(config, part):
        function = _locate(node["_target_"], f"{path}._target_")
        makes_partial = node.get("_partial_", False)
        if not isinstance(makes_partial, bool) or (makes_partial and path in OBJECTS):
            raise ConfigError(f"{path}._partial_={format_value(makes_partial)}: cannot be changed; leave it out.")
        for name, value in node.items():
            _require_factory(function, name, value, f"{path}.{name}")
            key = key_of(written, f"{path}.{name}")
            if not name.startswith("_") and not (value is None and key in RUNTIME_KEYS):
                check_value(function, name, value, key, choices)


def check_value(function: Any, name: str, value: Any, key: str, choices: Mapping[str, Any] | None = None) -> None:
    """Check the value of one argument.

    Args:
        function: the function or class that receives it.
        name: the argument.
        value: its value, as plain containers.
        key: the config key of the value.
        choices: the choice of each axis, for the default that the error names.

    Raises:
        ConfigError: the function has no such argument, or its type is another.
    """
    parameters = _parameters(function)
    if name not in parameters:
        if None in parameters:
            return
        close = difflib.get_close_matches(name, [known for known in parameters if known], n=1)
        hint = f" Did you mean {key.rpartition('.')[0]}.{close[0]}?" if close else ""
        raise ConfigError(f"{key}: {function.__name__} has no argument {name}.{hint}")
    if isinstance(value, dict) and "_target_" in value:
        return  # a node of its own
    owner, parameter = parameters[name]
    problem = "must be finite" if _has_non_finite(value) else _type_problem(_type_hint(owner, name), value)
    if problem:
        example = default_of(key, choices)
        if example is None and parameter.default is not parameter.empty:
            example = parameter.default
        cure = "" if example is None else f"; {key}={format_value(example)} is the default"
        raise ConfigError(f"{key}={format_value(value)}: {problem}{cure}.")


def _require_factory(function: Any, name: str, value: Any, key: str) -> None:
    """Refuse a module where its owner takes a factory, with which it makes modules itself."""
    if not isinstance(value, dict) or "_target_" not in value or value.get("_partial_"):
        return
    owner = _parameters(function).get(name)
    if owner is None or "Callable" not in str(_type_hint(owner[0], name)):
        return
    made = _locate(value["_target_"], f"{key}._target_")
    if inspect.isclass(made) and any(base.__module__.startswith("torch.nn") for base in made.__mro__):
        raise ConfigError(f"{key}._partial_: must be true, since {function.__name__} makes it itself; leave it out.")


def _has_non_finite(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_non_finite, value))
    return isinstance(value, float) and not math.isfinite(value)


def default_of(key: str, choices: Mapping[str, Any] | None = None) -> Any:
    """The plain value that the config files give a key of a group, such as `model.num_heads`; None without one.

    Args:
        key: the key.
        choices: the choice of each axis; where it is unknown, the file is `default.yaml`, else `_shared.yaml`.
    """
    group, _, rest = key.partition(".")
    for choice in ((choices or {}).get(group, "default"), "_shared"):
        file = config_dir() / group / f"{choice}.yaml"
        value = OmegaConf.to_container(OmegaConf.load(file)).get(rest) if file.exists() else None  # type: ignore[union-attr]
        if isinstance(value, int | float | str) and "$" not in str(value):
            return value
    return None


def _parameters(function: Any) -> dict[str | None, tuple[Any, inspect.Parameter]]:
    """The parameters of a function, or of a class and the bases that receive its keywords, each with its owner.

    The key None stands for keywords of unknown names.
    """
    signature = inspect.signature(function).parameters.values()
    parameters: dict[str | None, tuple[Any, inspect.Parameter]] = {p.name: (function, p) for p in signature}
    keywords = next((p for p in signature if p.kind is p.VAR_KEYWORD), None)
    if keywords is None:
        return parameters
    del parameters[keywords.name]
    base = function.__base__ if inspect.isclass(function) else object
    return {**({None: (function, keywords)} if base is object else _parameters(base)), **parameters}


def _type_problem(hint: Any, value: Any) -> str | None:
    """Why a value is not of a type, as in "should be a valid integer"; None if it is."""
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
            f"{key}={format_value(target)}: cannot be imported from here; MODULE.CLASS of a module beside train.py, "
            "or in a folder of PYTHONPATH, works."
        )
    return function


def targets(config: DictConfig, part: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node of a part with a `_target_`, resolved, with its dotted path."""

    def walk(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(node, dict):
            if "_target_" in node:
                yield path, node
            for name, value in node.items():
                yield from walk(value, f"{path}.{name}" if path else str(name))

    node = OmegaConf.select(config, part) if part else config
    yield from walk(OmegaConf.to_container(node, resolve=True, throw_on_missing=True), part)
