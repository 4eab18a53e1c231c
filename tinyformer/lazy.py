"""Packages whose names are imported on first use (PEP 562), since torch and the training libraries take seconds."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of a package.

    Args:
        package: the name of the package.
        names: the names that each of its modules defines, by module.
    """
    modules = {name: f"{package}.{module}" for module, of_module in names.items() for name in of_module}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(importlib.import_module(modules[name]), name)

    return get, lambda: [*vars(importlib.import_module(package)), *modules]
