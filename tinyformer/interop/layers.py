"""Fields of `config.json` about rotary positions, and about windows and positions that differ between layers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tinyformer.errors import ArgumentError, require_choice
from tinyformer.interop.family import SIZES, Field, Fields

FULL, SLIDING = "full_attention", "sliding_attention"
"""The types of layers in the field `layer_types`."""

ROPE_TYPES = {"default": None, "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
"""Our scalings of rotary positions by the value of `rope_type`."""

ROPE_ONLY: dict[str, Fields] = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "mscale": None, "mscale_all_dim": None},
}
"""Further parameters by `rope_type`, each with its only supported value."""

NEWER, OLDER = "rope_parameters", "rope_scaling"
"""Fields with the parameters of rotary positions, in newer and in older files."""

FLAT = ("rope_theta", "partial_rotary_factor")
"""Parameters of rotary positions that older files have at the top level."""

ROPE = (
    Field("rope_theta", "position.relative.base", float, 10_000.0),
    Field("rope_type", "position.relative.scaling", str, None, ROPE_TYPES, nullable=True),
    Field("rope_factor", "position.relative.factor", float, 1.0),
    Field("rope_original", "position.relative.original_seq_len", int, None, nullable=True),
)
"""The fields that `read_rope` adds, with their keys in our config."""

LAYERED_ROPE = tuple(replace(field, kind=float | int | list) if field.kind is float else field for field in ROPE)
"""The fields that `read_layered_rope` adds, with their keys in our config."""

FRACTION = Field("partial_rotary_factor", "position.relative.fraction", float, 1.0)

DEPTH = next(field for field in SIZES if field.ours == "model.num_layers")
"""The number of layers, which determines other fields."""

WINDOWS = Field("windows", "attention.window", int | list, None, nullable=True)
"""The field that `read_windows` adds, with its key in our config."""


def read_rope(fields: Fields) -> Fields:
    """Replace the parameters of rotary positions, in files of any version, by the fields of `ROPE` and `FRACTION`."""
    fields = dict(fields)
    flat = {name: fields.pop(name) for name in FLAT if name in fields}
    newer, older = (fields.get(name) or {} for name in (NEWER, OLDER))
    return fields | _rope_of(flat | older | newer, OLDER if older else NEWER, fields.get("max_position_embeddings"))


def _rope_of(given: Fields, source: str, max_seq_len: Any) -> Fields:
    """The fields of `ROPE` and `FRACTION` for one dictionary of parameters; errors name the field `source`."""
    given, path = dict(given), f"fields.{source}"
    kind: str = given.pop("rope_type", None) or given.get("type") or "default"
    given.pop("type", None)
    if kind not in ROPE_TYPES:
        reason = f"is not supported; supported types are {', '.join(ROPE_TYPES)}"
        raise ArgumentError(f"{path}.rope_type", kind, reason)
    read = {name: given.pop(name) for name in FLAT if given.get(name) is not None}
    if ROPE_TYPES[kind] is None:
        given.pop("original_max_position_embeddings", None)
    else:
        read |= {"rope_type": kind, "rope_factor": given.pop("factor", None)}
        if not isinstance(read["rope_factor"], int | float) or read["rope_factor"] < 1:
            raise ArgumentError(f"{path}.factor", read["rope_factor"], "must be a number of at least 1")
        original = given.pop("original_max_position_embeddings", max_seq_len)
        read |= {"rope_original": original} if kind in ROPE_ONLY else {}
        implied = 0.1 * math.log(read["rope_factor"]) + 1
        if kind == "yarn" and math.isclose(given.get("attention_factor") or implied, implied, rel_tol=1e-6):
            given.pop("attention_factor", None)
    for name, value in given.items():
        if value is not None and value != ROPE_ONLY.get(kind, {}).get(name):
            raise ArgumentError(f"{path}.{name}", value, f"is not supported with rope_type={kind}")
    return {name: value for name, value in read.items() if name in FLAT or read.get("rope_factor") != 1}


def write_rope(fields: Fields) -> Fields:
    """Nest the parameters of rotary positions as newer versions of `transformers` do: the inverse of `read_rope`."""
    others = {name: value for name, value in fields.items() if not name.startswith("rope_")}
    return others | {NEWER: _rope_parameters(fields)}


def _rope_parameters(fields: Fields) -> Fields:
    kind = fields.get("rope_type") or "default"
    written: Fields = {"rope_type": kind}
    written |= {"factor": fields.get("rope_factor", 1.0)} if kind != "default" else {}
    written |= {name: fields[name] for name in FLAT if name in fields}
    if kind in ROPE_ONLY:
        only = {name: value for name, value in ROPE_ONLY[kind].items() if value is not None}
        written |= only | {"original_max_position_embeddings": fields.get("rope_original")}
    return written


def pattern_of(values: Sequence[Any]) -> list[Any]:
    """The shortest pattern that repeats over the layers, given the value of each layer."""
    lengths = range(1, len(values) + 1)
    period = next(n for n in lengths if all(value == values[i % n] for i, value in enumerate(values)))
    return list(values[:period])


def one_or_pattern(values: Sequence[Any]) -> Any:
    """The value of each layer, as one value if all are equal, and else as a pattern: see `pattern_of`."""
    pattern = pattern_of(values)
    return pattern[0] if len(pattern) == 1 else pattern


def in_each_layer(value: Any, num_layers: int) -> list[Any]:
    """The value of each layer, given one value or a pattern that repeats over the layers."""
    pattern = value if isinstance(value, list) else [value]
    return [pattern[layer % len(pattern)] for layer in range(num_layers)]


def layer_types(fields: Fields, pattern: Sequence[str]) -> list[str]:
    """The type of each layer: the field `layer_types`, or a pattern that repeats over the layers."""
    types: list[str] = fields.get("layer_types") or in_each_layer(list(pattern), DEPTH.read(fields))
    for kind in types:
        require_choice("fields.layer_types", kind, (FULL, SLIDING))
    return types


def read_windows(fields: Fields, pattern: Sequence[str], window: int | None = None) -> Fields:
    """Add the field of `WINDOWS`, given the defaults of the types of layers and of `sliding_window`."""
    types, window = layer_types(fields, pattern), fields.get("sliding_window", window)
    return fields | {"windows": one_or_pattern([window if kind == SLIDING else None for kind in types])}


def write_windows(fields: Fields) -> Fields:
    """The inverse of `read_windows`."""
    windows = in_each_layer(fields.get("windows"), DEPTH.read(fields))
    others = {name: value for name, value in fields.items() if name != "windows"}
    types = [FULL if window is None else SLIDING for window in windows]
    return others | {"layer_types": types, "sliding_window": next(filter(None, windows), None)}


def read_layered_rope(
    fields: Fields, pattern: Sequence[str], bases: Mapping[str, tuple[str, float]], scaled: Sequence[str] = (FULL,)
) -> Fields:
    """Replace rotary positions that differ between types of layers by the fields of `ROPE`.

    `bases` maps each type to the older name of its base and the default. Older files scale layers of types in `scaled`.
    """
    types, fields = layer_types(fields, pattern), dict(fields)
    newer, older = (fields.get(name) or {} for name in (NEWER, OLDER))
    read: dict[str, Fields] = {}
    for kind, (name, default) in bases.items():
        given = {"rope_theta": fields.get(name, default)} | (older if kind in scaled else {}) | (newer.get(kind) or {})
        read[kind] = _rope_of(given, OLDER if older else NEWER, fields.get("max_position_embeddings"))
    scalings = [(own["rope_type"], own.get("rope_original")) for own in read.values() if "rope_type" in own]
    if len(set(scalings)) > 1:
        raise ArgumentError(f"fields.{NEWER}", newer, "scales types of layers in different ways")
    if scalings:
        fields |= {"rope_type": scalings[0][0], "rope_original": scalings[0][1]}
    fields["rope_theta"] = one_or_pattern([read[kind].get("rope_theta") for kind in types])
    fields["rope_factor"] = one_or_pattern([read[kind].get("rope_factor", 1.0) for kind in types])
    return fields


def write_layered_rope(fields: Fields) -> Fields:
    """The inverse of `read_layered_rope`, after `write_windows`."""
    types, nested = fields["layer_types"], {}
    bases = in_each_layer(fields.get("rope_theta", 10_000.0), len(types))
    factors = in_each_layer(fields.get("rope_factor", 1.0), len(types))
    for kind in (FULL, SLIDING):
        layer = types.index(kind) if kind in types else 0
        own = {"rope_theta": bases[layer], "rope_factor": factors[layer]}
        own |= {} if factors[layer] > 1 else {"rope_type": None}
        nested[kind] = _rope_parameters(fields | own)
    return write_rope(fields) | {NEWER: nested}
