"""What the config files can compute, and whether what they say can work."""

import difflib
import inspect
import pydoc
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from tinyformer.app.keys import key_of

RUNTIME_KEYS = frozenset({"model.vocab_size"})
"""Keys that are null until the run fills them in."""


def config_dir() -> Path:
    """The folder of the config files: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    return next(folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir())


def register_resolvers(config_dir: Path) -> None:
    """Make `${default_num_kv_heads:…}` and `${axes:}` known to the config files."""
    register_head_resolver()
    OmegaConf.register_new_resolver("axes", lambda *names: describe_axes(config_dir, names), replace=True)


def register_head_resolver() -> None:
    """Make `${default_num_kv_heads:…}` known, the only function that a stored config calls."""
    OmegaConf.register_new_resolver("default_num_kv_heads", default_num_kv_heads, replace=True)


def default_num_kv_heads(num_heads: Any) -> Any:
    """The largest divisor of a number of heads that is at most half of it; 1 for a single head."""
    if not isinstance(num_heads, int) or num_heads < 2:
        return num_heads  # what is no number of heads is refused where its key is known
    return next(n for n in range(num_heads // 2, 0, -1) if num_heads % n == 0)


def describe_axes(config_dir: Path, names: Sequence[str] = ()) -> str:
    """The axes for `--help`: each with its choices, and the first comment line of each choice's file.

    Args:
        config_dir: where the config files are.
        names: of the axes; all of them unless given.
    """
    lines = []
    for group in sorted(path for path in config_dir.iterdir() if path.is_dir()):
        if names and group.name not in names:
            continue
        lines.append(group.name)
        for choice in sorted(group.glob("[!_]*.yaml")):
            lines.append(f"  {choice.stem:<16} {_first_comment(choice)}".rstrip())
    return "\n".join(lines)


def _first_comment(path: Path) -> str:
    """What a file says of itself; "# @package" is said to Hydra."""
    comments = (line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@package")), "")


def check_types(config: DictConfig, part: str = "") -> None:
    """Check every value of a config against the signature of the class that it is meant for.

    Args:
        config: all of it.
        part: the key of the node to check, such as `network`; everything unless given.

    Raises:
        ValueError: a class has no such argument, or its type is another.
    """
    written = OmegaConf.to_container(config, resolve=False)
    for path, node in _targets(config, part):
        target = node["_target_"]
        for name, value in node.items():
            key = key_of(written, f"{path}.{name}")
            if not name.startswith("_") and not (value is None and key in RUNTIME_KEYS):
                check_value(_callable(target, f"{path}._target_"), name, value, key)


def check_value(function: Any, name: str, value: Any, key: str) -> None:
    """Check one argument of a function.

    Args:
        function: or class.
        name: of the argument.
        value: that it would get, as plain containers.
        key: of the config, for the error.

    Raises:
        ValueError: there is no such argument, or its type is another.
    """
    taking = _parameters(function)
    if name not in taking:
        if None in taking:
            return
        close = difflib.get_close_matches(name, [known for known in taking if known], n=1)
        hint = f" Did you mean {key.rpartition('.')[0]}.{close[0]}?" if close else ""
        raise ValueError(f"{key}: {function.__name__} has no argument {name}.{hint}")
    if isinstance(value, dict):
        return  # a node of its own, or the arguments of one
    owner, parameter = taking[name]
    hint = _hint(owner, name)
    problem = _type_problem(hint, value)
    if problem:
        example = default_of(key)
        if example is None and parameter.default is not parameter.empty:
            example = parameter.default
        works = "" if example is None else f"; {key}={example} works"
        raise ValueError(f"{key}={value}: {problem}{works}.")


def _parameters(function: Any) -> dict[str | None, tuple[Any, inspect.Parameter]]:
    """The parameters of a function, or of a class and the bases that it passes keywords on to, each with its owner.

    None is among them where any keyword is taken and nobody says which.
    """
    signature = inspect.signature(function).parameters.values()
    found: dict[str | None, tuple[Any, inspect.Parameter]] = {p.name: (function, p) for p in signature}
    rest = next((p for p in signature if p.kind is p.VAR_KEYWORD), None)
    if rest is None:
        return found
    del found[rest.name]
    base = function.__base__ if inspect.isclass(function) else object
    return {**({None: (function, rest)} if base is object else _parameters(base)), **found}


def default_of(key: str) -> Any:
    """What the config files say for a key of a group, such as `model.num_heads`; None if they say nothing plain."""
    hydra = HydraConfig.get()
    group, _, rest = key.partition(".")
    folder = next(Path(source.path) for source in hydra.runtime.config_sources if source.provider == "main")
    for choice in (hydra.runtime.choices.get(group), "_shared"):
        file = folder / group / f"{choice}.yaml"
        value = OmegaConf.to_container(OmegaConf.load(file)).get(rest) if file.exists() else None  # type: ignore[union-attr]
        if isinstance(value, int | float | str) and "$" not in str(value):
            return value
    return None


def _type_problem(hint: Any, value: Any) -> str | None:
    """Why a value is not of a type, in words; None if it is."""
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
        # Of a union every member complains: the longest complaint lists the most that would do. A sequence complains
        # of text in words that say nothing of what would do.
        return max(messages, key=lambda message: (not message.startswith("'str' instances"), len(message)))
    return None


def _hint(function: Any, name: str) -> Any:
    called = function.__init__ if inspect.isclass(function) else function
    try:
        return typing.get_type_hints(called).get(name, Any)
    except (NameError, TypeError):
        return Any


def _callable(target: str, key: str) -> Any:
    found = pydoc.locate(target)
    if found is None:
        raise ValueError(
            f"{key}={target} cannot be found; PACKAGE.CLASS of a package that can be imported from here can."
        )
    return found


def _targets(config: DictConfig, part: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node of a part with a `_target_`, resolved, with its dotted path."""

    def walk(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(node, dict):
            if "_target_" in node:
                yield path, node
            for name, value in node.items():
                yield from walk(value, f"{path}.{name}" if path else str(name))

    node = OmegaConf.select(config, part) if part else config
    yield from walk(OmegaConf.to_container(node, resolve=True, throw_on_missing=True), part)
