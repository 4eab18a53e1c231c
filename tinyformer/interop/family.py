"""The description of a model family: its config fields and weights, with their counterparts in tinyformer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from tinyformer.errors import ArgumentError, require_choice
from tinyformer.nn import Network
from tinyformer.nn.attention import BaseAttention

Fields: TypeAlias = dict[str, Any]
"""The fields of a `config.json` by name."""

Weights: TypeAlias = dict[str, Tensor]

REQUIRED = object()
"""The marker of a field that has no default and must be present."""

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
}
"""Our activations by their names in `transformers`; of several names of an activation, an export writes the first."""

ANYWHERE: Fields = {"quantization_config": None, "is_encoder_decoder": False, "pruned_heads": {}}
"""Fields that change what a model of any family computes, with the only supported value."""


@dataclass(frozen=True)
class Field:
    """A field of `config.json` and its counterpart in our config."""

    theirs: str  # the name of the field in `config.json`
    ours: str  # the key of our config, such as `model.d_model`
    kind: Any  # the type of the field's values, or a union of types
    default: Any = REQUIRED  # the field's default in `transformers`
    choices: Mapping[Any, Any] | None = None  # our values by the field's values, if they differ
    nullable: bool = False  # whether the field may be null, which means the default of our key

    def read(self, fields: Fields) -> Any:
        """Our value for a field, None for null; a missing field, a wrong type and an unsupported value are refused."""
        value = fields.get(self.theirs, self.default)
        if value is REQUIRED:
            raise ArgumentError(f"fields.{self.theirs}", None, "is missing")
        if value is None and self.nullable:
            return None
        if not self._is_of_kind(value):
            raise ArgumentError(f"fields.{self.theirs}", value, f"must be {getattr(self.kind, '__name__', self.kind)}")
        if self.choices is None:
            return value
        require_choice(f"fields.{self.theirs}", value, self.choices)
        return self.choices[value]

    def write(self, value: Any) -> Any:
        """The family's value for our value, or the default if there is none; `find_differences` then reports this."""
        if self.choices is None:
            value = bool(value) if self.kind is bool else value  # a bias of some projections: the others have zeros
            return value if self._is_of_kind(value) else self.default
        return next((theirs for theirs, ours in self.choices.items() if ours == value), self.default)

    def _is_of_kind(self, value: Any) -> bool:
        return isinstance(value, (int, float) if self.kind is float else self.kind)


SIZES = (
    Field("vocab_size", "model.vocab_size", int),
    Field("hidden_size", "model.d_model", int),
    Field("num_hidden_layers", "model.num_layers", int),
    Field("num_attention_heads", "model.num_heads", int),
    Field("intermediate_size", "model.d_ff", int),
    Field("initializer_range", "model.init_std", float, 0.02),
)
"""The fields of most families with a single stack of layers."""


@dataclass(frozen=True)
class Module:
    """A module of a family and its counterpart in tinyformer; in names, `{}` stands for the index of the layer."""

    theirs: str  # the name in the family, without the family's prefix
    ours: str  # our name; several names, separated by spaces, if theirs concatenates the outputs of several modules
    transposed: bool = False  # whether its matrix is stored as (inputs, outputs)
    by_head: bool = False  # whether the outputs of our modules are concatenated head by head, not module by module
    skipped: int = 0  # the number of the family's rows before the first of ours, which have no effect
    # The index of the family's row for each row of ours within a head, if their order differs.
    order: Callable[[BaseAttention], Int[Tensor, " head_dim"]] | None = None

    def names(self, network: Network) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield pairs of the family's name and our names, for the weight and the bias of every layer of our network."""
        stack = self.ours.partition(".")[0]
        for layer in range(len(getattr(network, stack).layers)) if "{}" in self.theirs else [0]:
            for part in ("weight", "bias"):
                ours = tuple(f"{name.format(layer)}.{part}" for name in self.ours.split())
                yield f"{self.theirs.format(layer)}.{part}", ours

    def read(self, tensor: Tensor, names: Sequence[str], network: Network) -> Sequence[Tensor]:
        """Split a tensor of the family into our tensors with these names."""
        if self.by_head or self.order:
            attention = network.attentions()[0]
            if self.order:
                return [tensor.unflatten(0, (-1, attention.head_dim))[:, self.order(attention)].flatten(0, 1)]
            split = tensor.unflatten(0, (attention.num_heads, len(names), -1))
            return split.transpose(0, 1).flatten(1, 2).unbind()
        if len(names) == 1:
            return [self._transpose(tensor)[self.skipped :]]
        modules = (network.get_submodule(name.rpartition(".")[0]) for name in names)
        return self._transpose(tensor).split([module.out_features for module in modules])

    def write(self, tensors: Sequence[Tensor], network: Network) -> Tensor:
        """Join our tensors into one tensor, as the family stores them."""
        attention = network.attentions()[0]
        if self.order:
            inverse = self.order(attention).argsort()
            return tensors[0].unflatten(0, (-1, attention.head_dim))[:, inverse].flatten(0, 1)
        if self.by_head:
            split = [tensor.unflatten(0, (attention.num_heads, -1)) for tensor in tensors]
            return torch.stack(split, dim=1).flatten(0, 2)
        joined = torch.cat([tensors[0].new_zeros(self.skipped, *tensors[0].shape[1:]), *tensors])
        return self._transpose(joined).contiguous()

    def _transpose(self, tensor: Tensor) -> Tensor:
        return tensor.T if self.transposed and tensor.ndim == 2 else tensor


def in_layers(
    theirs: str, names: Mapping[str, str], ours: str = "encoder.layers.{}.", transposed: bool = False
) -> tuple[Module, ...]:
    """The modules of all layers; `names` maps the family's names, without prefix `theirs`, to ours, without `ours`."""
    return tuple(
        Module(f"{theirs}{name}", " ".join(f"{ours}{our}" for our in module.split()), transposed)
        for name, module in names.items()
    )


@dataclass(frozen=True)
class Family:
    """A family of models, which has one class in `transformers`."""

    name: str
    model_type: str  # the field of this name in its `config.json`
    architecture: str  # its class in `transformers`, with the output layer
    prefix: str  # prefix of the weights' names in that class, except the output layer's; some files omit it
    groups: Mapping[str, str]  # the option in each of our config groups
    fields: tuple[Field, ...]
    modules: tuple[Module, ...]
    values: Mapping[str, Any] = field(default_factory=dict)  # further values of our config, by key
    # Fields that change what the model computes, each with its only supported value, which is also the default.
    fixed: Fields = field(default_factory=dict)
    outside: str | tuple[str, ...] = "lm_head."  # prefixes of the output layer's tensors, which do not have `prefix`
    unused: tuple[str, ...] = ()  # prefixes and suffixes of tensors that do not affect the output
    read_fields: Callable[[Fields], Fields] = dict  # flattens nested fields
    write_fields: Callable[[Fields], Fields] = dict  # the inverse of `read_fields`
    read_weights: Callable[[Weights], Weights] = dict  # converts weights, without `prefix`, to those of `modules`
    write_weights: Callable[[Weights], Weights] = dict  # the inverse of `read_weights`
    generates: bool = True  # whether a model can generate text
    note: str = ""  # a sentence about what an import changes; empty if it changes nothing
    # Whether a `config.json` with its `model_type` belongs to this family, if several share this type.
    covers: Callable[[Fields], bool] = lambda fields: True

    def like(
        self,
        names: tuple[str, str, str],
        *fields: Field,
        without: Sequence[str] = (),
        defaults: Fields | None = None,
        **changes: Any,
    ) -> "Family":
        """A family with other `names`: its name, `model_type` and `architecture`.

        It has the fields of this family, except those in `without` and with other `defaults`, and further `fields`;
        `changes` are the attributes that differ.
        """
        kept = (field for field in self.fields if field.theirs not in without)
        kept = (replace(field, default=(defaults or {}).get(field.theirs, field.default)) for field in kept)
        own = dict(zip(("name", "model_type", "architecture"), names, strict=True), fields=(*kept, *fields))
        return replace(self, **own | changes)

    def settings(self, fields: Fields) -> dict[str, Any]:
        """The values of our config by key, without keys that keep their defaults; unsupported fields are refused."""
        fields = self.read_fields(fields)
        for name, only in (ANYWHERE | self.fixed).items():
            value = fields.get(name, only)
            if value != only and value is not None:
                # The error suggests no value: with another value, the weights would compute another function.
                raise ArgumentError(f"fields.{name}", value, "changes what the model computes and is not supported")
        read: dict[str, tuple[str, Any]] = {}
        for entry in self.fields:
            if (value := entry.read(fields)) is None:
                continue
            first, known = read.setdefault(entry.ours, (entry.theirs, value))
            if value != known:
                reason = f"must be {known}, the value of {first}: encoder and decoder must have the same size"
                raise ArgumentError(f"fields.{entry.theirs}", value, reason)
        return dict(self.values) | {key: value for key, (_, value) in read.items()}

    def describe(self, values: Mapping[str, Any]) -> Fields:
        """The fields of a `config.json` from values of our config by key; fields without a value are left out."""
        written = {
            entry.theirs: None if values.get(entry.ours) is None else entry.write(values[entry.ours])
            for entry in self.fields
            if entry.nullable or values.get(entry.ours) is not None
        }
        return {"architectures": [self.architecture], "model_type": self.model_type, **self.write_fields(written)}

    def read(self, tensors: Weights, network: Network) -> tuple[Weights, list[str]]:
        """The weights under our names, and the names of tensors that the family does not have.

        `network` is our network on any device, whose sizes determine how tensors are split.
        """
        plain = {name.removeprefix(self.prefix): tensor for name, tensor in tensors.items()}
        used = (name for name in plain if not name.startswith(self.unused) and not name.endswith(self.unused))
        remaining = self.read_weights({name: plain[name] for name in used})
        weights: Weights = {}
        for module in self.modules:
            for theirs, ours in module.names(network):
                if theirs in remaining:
                    weights |= zip(ours, module.read(remaining.pop(theirs), ours, network), strict=True)
        return weights, sorted(remaining)

    def write(self, weights: Weights, network: Network) -> Weights:
        """The weights of our network under the names of the family."""
        written = {
            theirs: module.write([weights[name] for name in ours], network)
            for module in self.modules
            for theirs, ours in module.names(network)
            if all(name in weights for name in ours)
        }
        return {self._full(name): tensor for name, tensor in self.write_weights(written).items()}

    def name_of(self, ours: str, network: Network) -> str:
        """The family's name of the tensor that contains one of our weights."""
        pairs = (pair for module in self.modules for pair in module.names(network))
        return self._full(next((theirs for theirs, names in pairs if ours in names), ours))

    def _full(self, name: str) -> str:
        return name if name.startswith(self.outside) else f"{self.prefix}{name}"
