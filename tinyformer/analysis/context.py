"""The interface of an analysis, and its context: the model and the data that are analysed."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

import torch
from matplotlib.figure import Figure

from tinyformer.data import TextTokenizer
from tinyformer.data.batches.windows import Batch, tensors
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.measures.batches import TokenPair, decoded_pair
from tinyformer.measures.capture import attention_calls, head_label, map_names
from tinyformer.measures.intervals import Losses
from tinyformer.nn import BaseAttention, EncoderDecoder, Network
from tinyformer.nn.heads import Address, layer_title
from tinyformer.report.charts import head_grid
from tinyformer.report.result import AnalysisResult, Table, naming_ablated
from tinyformer.tasks import Seq2Seq, Task
from tinyformer.tasks.user_texts import is_row

Text: TypeAlias = str | Sequence[str]  # a text, or the two texts of a pair for a classifier

Key = TypeVar("Key")
Head: TypeAlias = tuple[int, int]
"""The index of a head's layer in `AnalysisContext.layers`, and the head's index within the layer."""


@runtime_checkable
class Trained(Protocol):
    """A trained model to analyse, such as `tinyformer.Model`."""

    def sample(self, num_windows: int) -> "AnalysisContext":
        """Return the model with a random sample of at most `num_windows` windows, examples or pairs."""


class Snapshot(NamedTuple):
    """The network at a step of its training, see `tinyformer.training.Snapshots`."""

    step: int  # number of optimizer steps before the snapshot
    network: Callable[[], Network]  # loads its network in evaluation mode, on the device of the context's network


@dataclass(frozen=True)
class AnalysisContext:
    """A trained model and the data that it is analysed on."""

    network: Network  # in evaluation mode
    batches: Sequence[Batch]  # a sample of the evaluated split, on the network's device; of nearly equal size
    task: Task
    tokenizer: TextTokenizer
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext  # the autocast context of forward passes
    untrained: Callable[..., Network] | None = None  # makes the untrained network; an argument n adds n to its seed
    save_pruned: Callable[[Network, Path], None] | None = None  # writes a checkpoint of a network with fewer heads
    split: Callable[[], Iterable[Batch]] = tuple  # every batch of the evaluated split, always in the same order
    snapshots: Sequence[Snapshot] = ()  # the snapshots of the run, in the order of their steps
    row: str = "window"  # the name of a row of a batch, in the singular
    facts: Mapping[str, str] = field(default_factory=dict)  # the origin of model and data, by name, see `caption`

    def sample(self, num_windows: int) -> "AnalysisContext":
        """Return the context itself, whose data already are a sample; see `Trained`."""
        return self

    @cached_property
    def layers(self) -> list[BaseAttention]:
        """The attention of each layer; an error is raised if a layer has no heads, see `attention_calls`."""
        batch = self.batches[0]
        inputs = (batch["source"], batch["inputs"]) if "source" in batch else (batch["inputs"], self.task.mask(batch))
        with self.precision():
            return [layer for layer, _ in attention_calls(self.network, *inputs)]

    @cached_property
    def heads(self) -> list[Head]:
        return [(index, head) for index, layer in enumerate(self.layers) for head in range(layer.num_heads)]

    @property
    def active_heads(self) -> list[Head]:
        """The heads that are not ablated; ablated heads have no effect to analyse."""
        ablated = [layer.ablated() for layer in self.layers]
        return [(layer, head) for layer, head in self.heads if not ablated[layer][head]]

    @property
    def num_windows(self) -> int:
        """Number of windows, examples or pairs in all batches."""
        return sum(len(batch["inputs"]) for batch in self.batches)

    @property
    def addresses(self) -> list[Address]:
        """The address of each of `layers`: the values of `address_columns`."""
        return self.network.layer_addresses()

    @property
    def address_columns(self) -> list[str]:
        """Columns of a table that distinguish layers: `layer`; in an encoder–decoder, `kind` and `layer`."""
        return ["kind", "layer"][-len(self.network.stacks()) :]

    @property
    def kinds(self) -> list[str]:
        """The kind of attention of each of `layers`; "" where there is only one kind."""
        return [str(address[0]) if len(address) > 1 else "" for address in self.addresses]

    def head_address(self, layer: int, head: int) -> Address:
        """The address of one of `heads`: (3, 0), or ("cross", 3, 0)."""
        return (*self.addresses[layer], self.layers[layer].head_map.ids[head])

    def head_title(self, layer: int, head: int) -> str:
        """One of `heads` in words: "layer 3 head 0", or "cross layer 3 head 0"."""
        *layer_address, number = self.head_address(layer, head)
        return f"{layer_title(tuple(layer_address))} head {number}"

    @property
    def map_addresses(self) -> list[Address]:
        """The address of each attention map: the address of its layer, and its name, see `map_names`."""
        layers = zip(self.addresses, self.layers, strict=True)
        return [(*address, name) for address, layer in layers for name in map_names(layer)]

    def networks(self) -> dict[str, Network]:
        return {"trained": self.network, "untrained": self.untrained()}

    def facts_of_text(self, text: Text) -> dict[str, str]:
        """The `facts` of a picture of a text, or of a pair; the text's first words replace the name of the data."""
        others = {name: fact for name, fact in self.facts.items() if name != "data"}
        words = text if isinstance(text, str) else " / ".join(text)
        return others | {"text": f'"{shorten(words, 60, placeholder=" …")}"'}

    def tokens_of(self, text: Text, around: bool = True, argument: str = "text") -> list[int]:
        """The token ids of a text, with the special tokens of the model's input, or without them if not `around`."""
        row: Any = text if isinstance(text, str) else tuple(text or ())
        if not text or not is_row(row, self.task.num_texts):
            kind = {1: "one text", 2: "two texts, since the model classifies pairs"}.get(self.task.num_texts or 0)
            raise ArgumentError(argument, text, f"must be {kind or 'one text, or two for a pair'}")
        with argument_path(passed={"text": argument}):
            return self.tokenizer.read([row], around)[0]

    def pair_of(self, source: Sequence[int], target: Sequence[int] | None, num_tokens: int) -> TokenPair:
        """A source and its target, which the encoder–decoder generates if `target` is None. See `TokenPair.of`."""
        task, device = cast(Seq2Seq, self.task), self.batches[0]["inputs"].device
        tokens = task.special_tokens.around(self.tokenizer)
        if target is not None:
            return TokenPair.of(source, target, tokens, num_tokens).to(device)
        with self.precision():
            return decoded_pair(cast(EncoderDecoder, self.network), source, tokens, task.beam, num_tokens)

    def head_table(self, columns: Sequence[str], values: Mapping[Head, Sequence[Any]]) -> Table:
        """A table with a row for each head in `values`, see `naming_ablated`."""
        rows = [[*self.head_address(*head), *row] for head, row in values.items()]
        ablated = [self.layers[layer].ablated()[head] for layer, head in values]
        return naming_ablated([*self.address_columns, "head", *columns], rows, ablated)

    def head_grid(self, values: Mapping[Head, float], title: str, label: str, diverging: bool = False) -> Figure:
        """A grid of values by head, see `charts.head_grid`; ablated heads are hatched."""
        names = [[str(head) for head in layer.head_map.ids] for layer in self.layers]
        ablated = [layer.ablated() for layer in self.layers]
        grid = [[values.get((at, head), math.nan) for head in range(len(of_at))] for at, of_at in enumerate(names)]
        return head_grid(grid, names, title, diverging, self.addresses, label, ablated)

    def map_grid(self, values: Iterable[float], title: str, label: str, kind: str | None = None) -> Figure:
        """A grid with a value for each attention map, of one kind of attention or of all; ablated heads are hatched."""
        at = [index for index, of in enumerate(self.kinds) if kind in (None, of)]
        layers, addresses = [self.layers[index] for index in at], [self.addresses[index] for index in at]
        names, remaining = [[head_label(name) for name in map_names(layer)] for layer in layers], iter(values)
        grid, ablated = [list(islice(remaining, len(of))) for of in names], [layer.ablated_maps() for layer in layers]
        return head_grid(grid, names, title, layers=addresses, label=label, ablated=ablated)

    def losses(self, changed: Callable[[Batch], AbstractContextManager[Any]] = lambda batch: nullcontext()) -> Losses:
        """The loss of each window; `changed` returns, for a batch, a context manager that changes the network."""
        parts = []
        for batch in self.batches:
            with torch.no_grad(), self.precision(), changed(batch):
                parts.append(self.task.nats(self.network, batch))
        nats, targets = (torch.cat(part).double().cpu() for part in zip(*parts, strict=True))
        return Losses(nats, targets)

    def describe_losses(self, losses: Losses) -> str:
        return (
            f"{len(losses.nats)} {self.row}s with a loss of {losses.mean:.4f} nats per {self.task.unit}; change of the "
            "loss [95 % interval]:"
        )


def largest(values: Mapping[Key, float], number: int | None = None) -> list[Key]:
    """The keys of the `number` largest values, by default of all values, in decreasing order."""
    return sorted(values, key=values.__getitem__, reverse=True)[:number]


def every_second(context: AnalysisContext, first: int) -> AnalysisContext:
    """The context with every second window, counted over all batches, beginning with the window `first`."""
    parts, before = [], 0
    for batch in context.batches:
        # `document_starts` has no row for each window, and only repeats what `documents` says.
        rows = {name: rows for name, rows in tensors(batch).items() if name != "document_starts"}
        parts.append({name: of_all[(first + before) % 2 :: 2] for name, of_all in rows.items()})
        before += len(batch["inputs"])
    return replace(context, batches=[cast(Batch, part) for part in parts if len(part["inputs"])])


@contextmanager
def changed(parts: Sequence[Any], **values: Any) -> Iterator[None]:
    """Set attributes of several objects inside a `with` statement, and restore them afterwards."""
    before = [(part, name, getattr(part, name)) for part in parts for name in values]
    try:
        for part, name, _ in before:
            setattr(part, name, values[name])
        yield
    finally:
        for part, name, value in before:
            setattr(part, name, value)


@runtime_checkable
class Analysis(Protocol):
    """An analysis of a trained model; each file of `conf/analysis` names one, and `Model.analyse` takes one.

    A run calls it with an `AnalysisContext`. The analyses of this package take any `Trained` model, such as an
    `AnalysisContext` or a `tinyformer.Model`: `HeadAblation(mode="mean")(model)`. The class attribute `version`, by
    default 1, is increased when the meaning of the tables changes; `tinyformer findings` shows a measurement's version.
    The class attribute `needs_loss`, by default True, is False for an analysis of any model, with or without a loss.
    """

    num_windows: int  # windows, examples or pairs, drawn at random from the evaluated split
    needs_gradient: bool  # whether the analysis runs a backward pass

    def __call__(self, model: AnalysisContext, folder: Path) -> AnalysisResult:
        """Analyse a model, and write files to the folder."""
