"""What a family of models is: its config fields and its weights, each beside ours, read in both directions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

Fields: TypeAlias = dict[str, Any]
"""Of a `config.json`, by name."""

Weights: TypeAlias = dict[str, Tensor]

NEEDED = object()
"""Stands for the default of a field without which there is no model."""

KINDS: dict[type, tuple[str, tuple[type, ...]]] = {
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    bool: ("true or false", (bool,)),
    str: ("a name", (str,)),
}
"""What a value of a field is called, and the types that JSON gives it."""

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "silu": "silu",
    "swish": "silu",
    "relu2": "relu2",
}
"""Their names of activations and ours; of several that mean the same, the first is written."""

ANYWHERE: Fields = {"quantization_config": None, "auto_map": None, "is_encoder_decoder": False, "pruned_heads": {}}
"""Fields that change what a model of any family computes, and the only value of each that comes in."""


@dataclass(frozen=True)
class Field:
    """A field of `config.json`, and the key of our config that says the same.

    Args:
        theirs: its name.
        ours: the key, such as `model.d_model`.
        kind: the type of its values, a key of `KINDS`.
        default: what `transformers` takes where the field is missing.
        choices: their values and ours, where these differ.
        nullable: whether null is a value: the key keeps its own default, which means the same.
    """

    theirs: str
    ours: str
    kind: type
    default: Any = NEEDED
    choices: Mapping[Any, Any] | None = None
    nullable: bool = False

    def read(self, fields: Fields) -> Any:
        """Our value, or None for null.

        Raises:
            ValueError: there is none, or none that we have.
        """
        value = fields.get(self.theirs, self.default)
        if value is NEEDED:
            raise ValueError(f"config.json has no {self.theirs}.")
        if value is None and self.nullable:
            return None
        if not self._is_of_kind(value):
            raise ValueError(f"config.json: {self.theirs}={value!r} is not {KINDS[self.kind][0]}.")
        if self.choices is None:
            return value
        if value not in self.choices:
            known = ", ".join(map(str, self.choices))
            raise ValueError(f"config.json: {self.theirs}={value} has no counterpart here; {known} have.")
        return self.choices[value]

    def write(self, value: Any) -> Any:
        """Their value; the default, which is another, where they have none."""
        if self.choices is None:
            return value if self._is_of_kind(value) else self.default
        return next((theirs for theirs, ours in self.choices.items() if ours == value), self.default)

    def _is_of_kind(self, value: Any) -> bool:
        return isinstance(value, KINDS[self.kind][1]) and isinstance(value, bool) is (self.kind is bool)


@dataclass(frozen=True)
class Module:
    """A module of theirs, and ours.

    Args:
        theirs: its name, with `{}` for the number of the layer, without the family's prefix.
        ours: its name; several where theirs holds the outputs of one after the other.
        transposed: whether its matrix is stored as inputs by outputs.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False

    def names(self, num_layers: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Their name and ours, of every weight and bias in every layer."""
        for layer in range(num_layers) if "{}" in self.theirs else [0]:
            for part in ("weight", "bias"):
                ours = tuple(f"{name.format(layer)}.{part}" for name in self.ours)
                yield f"{self.theirs.format(layer)}.{part}", ours

    def read(self, tensor: Tensor) -> Sequence[Tensor]:
        """Ours, of theirs."""
        return self._turned(tensor).chunk(len(self.ours)) if tensor.ndim else [tensor]

    def write(self, tensors: Sequence[Tensor]) -> Tensor:
        """Theirs, of ours."""
        return self._turned(torch.cat(list(tensors))).contiguous()

    def _turned(self, tensor: Tensor) -> Tensor:
        return tensor.T if self.transposed and tensor.ndim == 2 else tensor


def unchanged(values: dict[str, Any]) -> dict[str, Any]:
    """The same: most families' fields and weights need no more than their tables."""
    return values


@dataclass(frozen=True)
class Family:
    """Models that `transformers` has one class for.

    Args:
        name: what people call it.
        model_type: in its `config.json`.
        architecture: the class with its output layer.
        prefix: of the weights' names in that class, but for the output layer's; files have them without it, too.
        overrides: the choices of our config that make it, as of Hydra's command line.
        fields: of its `config.json` that become keys of ours.
        fixed: fields that change what it computes, each with the only value that comes in. Missing, they have it.
        modules: that hold its weights.
        outside: those of `modules` that have no prefix, by the beginning of their names.
        unused: beginnings and ends of names of tensors that its output does not depend on.
        read_fields: makes plain fields of nested ones.
        write_fields: the reverse.
        read_weights: of their weights, without their prefix, what `modules` expects.
        write_weights: the reverse.
        generates: whether text can be drawn from it.
        note: what is left behind when a model comes in, if anything is.
    """

    name: str
    model_type: str
    architecture: str
    prefix: str
    overrides: tuple[str, ...]
    fields: tuple[Field, ...]
    modules: tuple[Module, ...]
    fixed: Fields = field(default_factory=dict)
    outside: str = "lm_head."
    unused: tuple[str, ...] = ()
    read_fields: Callable[[Fields], Fields] = unchanged
    write_fields: Callable[[Fields], Fields] = unchanged
    read_weights: Callable[[Weights], Weights] = unchanged
    write_weights: Callable[[Weights], Weights] = unchanged
    generates: bool = True
    note: str = ""

    def settings(self, fields: Fields) -> dict[str, Any]:
        """The keys of our config and their values; a key that keeps its default is left out.

        Raises:
            ValueError: a field is malformed, or says what we have no counterpart of.
        """
        fields = self.read_fields(fields)
        for name, only in (ANYWHERE | self.fixed).items():
            value = fields.get(name, only)
            if value != only and value is not None:
                raise ValueError(
                    f"config.json: {name}={str(value)[:100]} changes what the model computes and has no counterpart "
                    f"here; {name}={str(only).lower()} has."
                )
        values = {one.ours: one.read(fields) for one in self.fields}
        return {key: value for key, value in values.items() if value is not None}

    def describe(self, values: Mapping[str, Any]) -> Fields:
        """The fields of a `config.json`, given the values of our keys; of keys that are not given, none."""
        written = {
            one.theirs: None if values.get(one.ours) is None else one.write(values[one.ours])
            for one in self.fields
            if one.nullable or values.get(one.ours) is not None
        }
        return {"architectures": [self.architecture], "model_type": self.model_type, **self.write_fields(written)}

    def read(self, tensors: Weights, num_layers: int) -> tuple[Weights, list[str]]:
        """Our weights, under our names, and the names of tensors that are nothing of this family's.

        Args:
            tensors: of the files.
            num_layers: of the model.
        """
        plain = {name.removeprefix(self.prefix): tensor for name, tensor in tensors.items()}
        given = self.read_weights({name: w for name, w in plain.items() if not self._is_unused(name)})
        weights: Weights = {}
        for module in self.modules:
            for theirs, ours in module.names(num_layers):
                if theirs in given:
                    weights |= zip(ours, module.read(given.pop(theirs)), strict=False)
        return weights, sorted(given)

    def write(self, weights: Weights, num_layers: int) -> Weights:
        """Their weights, under their names, of ours."""
        written = {
            theirs: module.write([weights[name] for name in ours])
            for module in self.modules
            for theirs, ours in module.names(num_layers)
            if all(name in weights for name in ours)
        }
        return {self._full(name): tensor for name, tensor in self.write_weights(written).items()}

    def name_of(self, ours: str, num_layers: int) -> str:
        """Their name of the tensor that holds a weight of ours."""
        pairs = (pair for module in self.modules for pair in module.names(num_layers))
        return self._full(next((theirs for theirs, names in pairs if ours in names), ours))

    def _full(self, name: str) -> str:
        return name if name.startswith(self.outside) else f"{self.prefix}{name}"

    def _is_unused(self, name: str) -> bool:
        return name.startswith(self.unused) or name.endswith(self.unused) if self.unused else False
