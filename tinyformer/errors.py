"""The error for invalid arguments in all packages, checks that raise this error, and paths as messages show them."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unicodedata import category


class ArgumentError(ValueError):
    """An invalid value of an argument, with the reason and with values that would work.

    The message names Python arguments. A program whose users set the same values under other names, such as config
    keys, obtains the message with these names from `describe`. Every other ValueError is a bug.

    Args:
        argument: the name of the argument.
        value: the invalid value.
        reason: the reason why the value is invalid, as in "must be at least 1". Names of other arguments are in
            backticks, as in "must divide `d_model`=64".
        works: values that would work, by argument, which may be another argument than the invalid one.

    Attributes:
        path: the names of the arguments that lead to the invalid argument, outermost first, such as ("block",
            "attention", "num_heads") if an encoder creates its attention by a factory; see `argument_path`.
    """

    def __init__(self, argument: str, value: Any, reason: str, works: Mapping[str, Any] | None = None) -> None:
        super().__init__(argument, value, reason, works)
        self.path: tuple[str, ...] = tuple(argument.split("."))
        self.value, self.reason, self.works = value, reason, dict(works or {})

    @property
    def owner(self) -> tuple[str, ...]:
        """The path of the object with the invalid argument; names in `reason` and `works` are relative to it."""
        return self.path[:-1]

    def describe(self, name_of: Callable[[tuple[str, ...]], str] = ".".join, show: Callable[[Any], str] = repr) -> str:
        """The error as one sentence; `name_of` converts an argument's path to a name, and `show` formats values."""

        def named(argument: str) -> str:
            return name_of((*self.owner, *argument.split(".")))

        reason = re.sub(r"`([A-Za-z_][\w.]*)`", lambda found: named(found[1]), self.reason)
        cures = " ".join(f"{named(argument)}={show(value)}" for argument, value in self.works.items())
        return f"{name_of(self.path)}={show(self.value)}: {reason}" + (f"; {cures} works." if cures else ".")

    def __str__(self) -> str:
        return self.describe()


def printable(line: str) -> str:
    """A line of untrusted text with its control characters as escapes."""
    # "Zs" are spaces.
    return "".join(c if c.isprintable() or c == "\t" or category(c) == "Zs" else repr(c)[1:-1] for c in line)


@contextlib.contextmanager
def argument_path(*outer: str, passed: Mapping[str, str] | None = None) -> Iterator[None]:
    """A context that prefixes the path of a raised `ArgumentError` with the arguments that lead to the invalid one.

    Code that calls a factory passed to it wraps the call, as in `with argument_path("attention"):`.

    Args:
        outer: the names of the arguments, outermost first.
        passed: for arguments of the factory, the arguments of the caller that set them, such as {"head_dim":
            "rope_head_dim"}; an error about an argument of the factory becomes an error about the caller's argument.
    """
    try:
        yield
    except ArgumentError as error:
        own = (passed or {}).get(".".join(error.path))
        if own is None:
            error.path = (*outer, *error.path)
        else:
            error.works = {own if name == error.path[-1] else name: value for name, value in error.works.items()}
            error.path = (own,)
        raise


def require_at_least(minimum: float, works: Mapping[str, Any] | None = None, **arguments: float | None) -> None:
    """Raise an `ArgumentError` for the first keyword argument below a minimum; None is accepted.

    The error suggests the argument's value in `works`; for an argument that `works` lacks, the minimum.
    """
    for argument, value in arguments.items():
        if value is not None and not value >= minimum:  # nan is neither above nor below
            example = (works or {}).get(argument, minimum)
            raise ArgumentError(argument, value, f"must be at least {minimum:g}", {argument: example})


def require_at_most(maximum: float, works: Mapping[str, Any], **arguments: float | None) -> None:
    """Raise an `ArgumentError` for the first keyword argument above a maximum; None is accepted.

    The check prevents computations that take minutes or all memory. The error suggests the argument's value in `works`.
    """
    for argument, value in arguments.items():
        if value is not None and not value <= maximum:
            raise ArgumentError(argument, value, f"must be at most {maximum}", {argument: works[argument]})


def require_choice(argument: str, value: Any, choices: Iterable[Any]) -> None:
    """Raise an `ArgumentError`, which lists the choices, if a value is not among the choices."""
    known = list(choices)
    if value not in known:
        raise ArgumentError(argument, value, f"must be one of {', '.join(map(str, known))}")


def relative_path(path: Path) -> str:
    """A path relative to the working directory; for a path outside of this directory, the absolute path."""
    path, here = path.resolve(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def require_sizes(num_layers: int, d_model: int, max_seq_len: int, vocab_size: int | None = None) -> None:
    """Raise an `ArgumentError` if a size is below 1."""
    sizes = {"num_layers": num_layers, "vocab_size": vocab_size, "d_model": d_model, "max_seq_len": max_seq_len}
    require_at_least(1, {"vocab_size": 256, "d_model": 128, "max_seq_len": 128}, **sizes)


def head_dim_of(d_model: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> int:
    """The size of each head: `head_dim`; if `head_dim` is None, d_model / num_heads.

    For an invalid number of heads, the error suggests the largest valid number that is smaller.
    """
    require_at_least(1, {"head_dim": 32, "d_model": 128}, head_dim=head_dim, d_model=d_model)
    if num_heads < 1 or (head_dim is None and d_model % num_heads):
        # An even head_dim, which rotary positions need.
        works = max((n for n in range(1, min(num_heads, d_model) + 1) if d_model % (2 * n) == 0), default=1)
        raise ArgumentError("num_heads", num_heads, f"must divide `d_model`={d_model}", {"num_heads": works})
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        works = max((n for n in range(1, min(num_kv_heads, num_heads) + 1) if num_heads % n == 0), default=1)
        reason = f"must divide `num_heads`={num_heads}"
        raise ArgumentError("num_kv_heads", num_kv_heads, reason, {"num_kv_heads": works})
    return head_dim or d_model // num_heads
