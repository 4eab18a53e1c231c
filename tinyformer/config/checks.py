"""Checks of a config: its values against the signatures of the classes that receive them, and what needs no torch."""

import contextlib
import difflib
import functools
import inspect
import math
import pydoc
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError

from tinyformer.config.conf import axes_of, format_value, key_of, read, values_of_keys
from tinyformer.config.errors import ConfigError
from tinyformer.data.sources.text_paths import find_files
from tinyformer.errors import argument_path, head_dim_of, require_sizes

RUNTIME_KEYS = frozenset({"model.vocab_size"})  # keys that are null until the run sets them
PASSED_ON = {"lightning.pytorch.strategies.ddp.DDPStrategy": "torch.nn.parallel.DistributedDataParallel"}
"""The function that receives the further keywords of a class, where it is not that of its base."""
OBJECTS = ("network", "datamodule", "task.objective", "optimizer", "schedule")  # nodes that the run instantiates


def check_types(
    config: DictConfig,
    part: str = "",
    choices: Mapping[str, Any] | None = None,
    groups: Mapping[str, Any] | None = None,
) -> None:
    """Check every value of a config, or of its node `part`, against the signature of the class that receives it.

    Args:
        config: the whole config.
        part: the key of the node to check, such as `network`.
        choices: the choice of each axis; errors name the default of its file.
        groups: classes whose arguments are the values of a group without `_target_`, by its key, and a class whose
            arguments are keys in no group, at "".
    """
    written = OmegaConf.to_container(config, resolve=False)
    for path in OBJECTS:
        node = OmegaConf.select(config, path, throw_on_resolution_failure=False)
        if not part and node is not None and (not OmegaConf.is_dict(node) or node.get("_target_") is None):
            raise ConfigError(f"{path}={format_value(node)}: must be a mapping with a _target_; leave it out.")
    for group, function in (groups or {}).items():
        owner: Any = OmegaConf.select(config, group) if group else config
        for name in owner.keys() if group else owner.keys() & _parameters(function):
            value = OmegaConf.to_container(owner[name]) if OmegaConf.is_config(owner[name]) else owner[name]
            check_value(function, name, value, f"{group}.{name}" if group else name, choices)
    for path, node in targets(config, part):
        function = _locate(node["_target_"], f"{path}._target_")
        makes_partial = node.get("_partial_", False)
        if not isinstance(makes_partial, bool) or (makes_partial and path in OBJECTS):
            raise ConfigError(f"{path}._partial_={format_value(makes_partial)}: cannot be changed; leave it out.")
        for name, value in node.items():
            _require_factory(function, name, value, f"{path}.{name}")
            key = key_of(written, f"{path}.{name}")
            is_left_out = name not in _parameters(function) and _is_left_out(written, f"{path}.{name}", key, value)
            if not name.startswith("_") and not (value is None and key in RUNTIME_KEYS) and not is_left_out:
                check_value(function, name, value, key, choices)


def _is_left_out(written: Any, path: str, key: str, value: Any) -> bool:
    """Return true if a user-defined attention need not take an argument: a value of our files, not of the user."""
    owner, _, name = path.rpartition(".")
    is_attention = owner.endswith("attention")
    return is_attention and (key != f"{key_of(written, owner)}.{name}" or value in values_of_keys().get(key, []))


def check_value(function: Any, name: str, value: Any, key: str, choices: Mapping[str, Any] | None = None) -> None:
    """Check the type of the value of one argument of a function or class; a `ConfigError` names its key and default."""
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

    Where the choice of the axis is unknown, the file is `default.yaml`, else `_shared.yaml`.
    """
    axis, _, name = key.partition(".")
    for choice in ((choices or {}).get(axis, "default"), "_shared"):
        value = read(choice, axis).get(name)
        if isinstance(value, int | float | str) and "$" not in str(value):
            return value
    return None


@functools.cache
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
    receiver = PASSED_ON.get(f"{function.__module__}.{function.__qualname__}")
    passed_on = _parameters(pydoc.locate(receiver)) if receiver else {}
    return {**({None: (function, keywords)} if base is object else _parameters(base)), **passed_on, **parameters}


def _type_problem(hint: Any, value: Any) -> str | None:
    """The reason why a value is not of a type, as in "should be a valid integer"; None if it is."""
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
    """Every node of a part with a `_target_`, resolved, with its dotted path."""

    def walk(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(node, dict):
            if "_target_" in node:
                yield path, node
            for name, value in node.items():
                yield from walk(value, f"{path}.{name}" if path else str(name))

    node = OmegaConf.select(config, part) if part else config
    yield from walk(OmegaConf.to_container(node, resolve=True, throw_on_missing=True), part)


def check_early(config: DictConfig, choices: Mapping[str, Any] | None = None) -> None:
    """Report what a config alone shows before torch and Lightning are imported, which takes seconds.

    Refuse a missing axis, sizes of the network that do not fit together, and text files that do not exist.
    """
    for axis, choice in axes_of("train").items():
        if choice and config.get(axis) is None:
            raise ConfigError(f"~{axis}: a run needs this axis; leave ~{axis} out, or choose, as in {axis}={choice}.")
    written = OmegaConf.to_container(config, resolve=False)
    for part in ("network", "datamodule"):
        nodes: list[tuple[str, dict[str, Any]]] = []
        if OmegaConf.is_dict(OmegaConf.select(config, part, throw_on_resolution_failure=False)):
            with contextlib.suppress(InterpolationKeyError):  # which is reported when the part is made
                nodes = list(targets(config, part))
        for path, node in nodes:
            check = EARLY.get(str(node["_target_"]))  # others are refused later
            parameters = inspect.signature(check).parameters.values() if check else ()
            arguments = {each.name: node[each.name] for each in parameters if each.name in node}
            if check is None or any(each.default is each.empty and each.name not in node for each in parameters):
                continue  # a factory gets the others later
            for name, value in arguments.items():
                check_value(check, name, value, key_of(written, f"{path}.{name}"), choices)
            with argument_path(*path.split(".")):
                check(**arguments)


def _require_heads(d_model: int, num_heads: int, num_kv_heads: int | None = None, head_dim: int | None = None) -> None:
    """Refuse numbers of heads that do not fit the width; see `head_dim_of`."""
    head_dim_of(d_model, num_heads, num_heads if num_kv_heads is None else num_kv_heads, head_dim)


def _require_files(files: str | list[str] | None) -> None:
    """Refuse files that do not exist; None stands for a data set of the Hub."""
    find_files([files] if isinstance(files, str) else files or [])


EARLY: dict[str, Callable[..., None]] = {
    "tinyformer.nn.Encoder": require_sizes,
    "tinyformer.nn.Decoder": require_sizes,
    "tinyformer.nn.Attention": _require_heads,
    "tinyformer.nn.LatentAttention": _require_heads,
    "tinyformer.nn.DifferentialAttention": _require_heads,
    "tinyformer.data.TextFiles": _require_files,
    "tinyformer.data.SquadFiles": _require_files,
    "tinyformer.data.LocalOrHub": _require_files,
}
"""The function that checks the arguments of a class without torch, by the name of the class."""
