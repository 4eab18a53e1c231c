"""Plain values: what a file of a stranger may set."""

from typing import Any

MAX_TEXT, MAX_ENTRIES, MAX_DEPTH, MAX_NUMBER = 1000, 20_000, 2, 2**63
"""Bounds: characters of a text, entries of a list, nesting depth of lists, and the magnitude of a number."""

SCORE_KEYS = ("attention.score", "cross_attention.score")
"""Keys whose plain value may be the name of a class."""

LIMIT = 2**20
"""The largest whole number at keys that are not in `LIMITS`: a file cannot ask for more memory than models need."""

LIMITS = {
    "model.num_layers": 10_000,
    "model.num_encoder_layers": 10_000,
    "model.d_ff": 10_000_000,  # compared with the weights before a network is made
    "model.vocab_size": 100_000_000,
    "position.relative.base": MAX_NUMBER,
    "data.max_tokens": MAX_NUMBER,
    "data.max_examples": MAX_NUMBER,
    "data.num_workers": 256,
    "trainer.devices": 64,
    "trainer.num_nodes": 1024,
    "trainer.max_steps": MAX_NUMBER,
    "schedule.warmup_steps": MAX_NUMBER,
    "generate.seed": 2**32 - 1,
    "seed": 2**32 - 1,
}


def problem_of_value(key: str, value: Any) -> str | None:
    """Why a file may not set a value, as in "is 20, more than 10"; None if it is plain and small enough.

    Args:
        key: the key that it would be set at.
        value: a number, a text, a boolean, None, or a list of these.
    """
    if problem := _problem(value):
        return problem
    largest, limit = _largest(value), LIMITS.get(key, LIMIT)
    return f"is {largest:,}, more than {limit:,}" if largest > limit else None


def _problem(value: Any, depth: int = 0) -> str | None:
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return None if -MAX_NUMBER <= value < MAX_NUMBER else "must be a finite number below 2**63"
    if isinstance(value, str):
        if "${" in value:
            return f"is {value[:100]!r}: an interpolation, which a file cannot bring"
        return None if len(value) <= MAX_TEXT else f"is a text of more than {MAX_TEXT} characters"
    if isinstance(value, list) and depth < MAX_DEPTH:
        if sum(len(entry) if isinstance(entry, list) else 1 for entry in value) > MAX_ENTRIES:
            return f"is a list of more than {MAX_ENTRIES:,} entries"
        return next((problem for entry in value if (problem := _problem(entry, depth + 1))), None)
    return "must be a number, a text, true, false, null or a list of these"


def _largest(value: Any) -> int:
    """The largest whole number in a plain value."""
    if isinstance(value, list):
        return max(map(_largest, value), default=0)
    return value if isinstance(value, int) else 0
