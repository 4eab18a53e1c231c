"""Labelled texts, or pairs of texts, as rows of batches."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from jaxtyping import Int64, UInt
from lightning.pytorch.utilities import rank_zero_only

from tinyformer.data.batches.windows import Batch, Rows
from tinyformer.data.module import shortened
from tinyformer.data.row_format import RowFormat
from tinyformer.data.sources.documents import SPLITS, Source, class_name, in_use, natural_order
from tinyformer.data.splits import splitmix64
from tinyformer.data.stream import Prepared, Split, TokenSplit, write_rows
from tinyformer.data.tokenizer.tokenizer import TextTokenizer
from tinyformer.errors import ArgumentError


@dataclass(frozen=True)
class LabelledSplit(Split):
    """The labelled examples of one split, each a sequence `[eos, *text]` or `[eos, *first, eos, *second]`."""

    ids: UInt[np.ndarray, " tokens"]  # the sequences, concatenated, each truncated to the model's length
    offsets: Int64[np.ndarray, " examples_and_end"]  # where in `ids` each sequence begins, and the length of `ids`
    labels: Int64[np.ndarray, " examples"]  # the index of the class in `classes`; -1: the label is not in `classes`
    classes: list[str]
    tokenizer: TextTokenizer
    num_bytes: int | None
    num_unknown: int  # number of `<unk>` tokens before truncation
    num_truncated: int  # number of truncated sequences
    num_texts: int = 1  # number of texts in an example: 1, or 2 for pairs
    unknown: list[str] = field(default_factory=list)  # the labels of this split that are not in `classes`

    @property
    def num_documents(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> Int64[np.ndarray, " examples"]:
        return np.diff(self.offsets)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def label_counts(self) -> dict[str, int]:
        counts = np.bincount(self.labels[self.labels >= 0], minlength=len(self.classes))
        return dict(zip(self.classes, counts.tolist(), strict=True))

    @property
    def absent(self) -> str:
        """The names of classes without examples."""
        return shortened([name for name, number in self.label_counts.items() if not number], 5)

    def text(self, row: int) -> str:
        """An example's text, truncated as for the model; `eos` separates the texts of a pair."""
        return self.tokenizer.decode(self.ids[self.offsets[row] + 1 : self.offsets[row + 1]])


def truncate(
    stream: TokenSplit, texts_per_example: int, max_length: int
) -> tuple[UInt[np.ndarray, " tokens"], Int64[np.ndarray, " examples_and_end"], int]:
    """Truncate the examples of a stream of texts; return their token ids, their offsets and the number truncated.

    In a pair (2 texts per example), the longer text is truncated first.
    """
    begins = stream.offsets[:-1]
    lengths = np.diff(stream.offsets).reshape(-1, texts_per_example)
    new_lengths = np.minimum(lengths, max_length)
    if texts_per_example == 2:
        first, second = lengths.T
        new_lengths[:, 0] = np.minimum(first, np.maximum(max_length - second, max_length - max_length // 2))
        new_lengths[:, 1] = np.minimum(second, max_length - new_lengths[:, 0])
    num_cut = int((new_lengths < lengths).any(axis=1).sum())
    if not num_cut:
        return stream.ids, stream.offsets[::texts_per_example], 0
    sizes = new_lengths.ravel()
    ends = np.cumsum(sizes)
    positions = np.repeat(begins - (ends - sizes), sizes) + np.arange(ends[-1])
    offsets = np.concatenate([[0], ends[texts_per_example - 1 :: texts_per_example]])
    return stream.ids[positions], offsets, num_cut


class Examples(Rows):
    """Batches of the examples of a split.

    Token dropout replaces each token by the tokenizer's mask token with the same probability, except the first token of
    a sequence, which a model may pool. This regularises by hiding single words ("word dropout": Iyyer et al. 2015,
    "Deep Unordered Composition Rivals Syntactic Methods for Text Classification"; Dai and Le 2015, arXiv 1511.01432).
    Both papers remove a word or replace it by `<unk>`, which byte-level BPE lacks. A hash of `key` (the seed and the
    epoch) and of a token's position in the split decides whether the token is replaced, independently of the batch.
    """

    def __init__(self, split: LabelledSplit, token_dropout: float = 0.0, key: tuple[int, ...] = (0,)) -> None:
        self._split = split
        self._ids = split.ids.view(np.ndarray)  # an array is indexed faster than a memory map
        self._threshold = np.uint64(token_dropout * 2**64)
        self._key = np.random.SeedSequence(key).generate_state(1, np.uint64)

    def __len__(self) -> int:
        return self._split.num_documents

    def __getitems__(self, indices: list[int]) -> Batch:
        rows = np.asarray(indices)
        begin = self._split.offsets[rows]
        lengths = self._split.offsets[rows + 1] - begin
        place = np.arange(lengths.max())
        positions = begin[:, None] + place
        ids = self._ids.take(positions, mode="clip").astype(np.int64)
        if self._threshold:
            # The element of a SplitMix64 sequence at each position; an element does not depend on earlier elements.
            drawn = splitmix64(self._key + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
            ids = np.where((place > 0) & (drawn < self._threshold), self._split.tokenizer.mask_id, ids)
        ids = np.where(place < lengths[:, None], ids, self._split.tokenizer.eos_id)
        return {
            "inputs": torch.from_numpy(ids),
            "lengths": torch.from_numpy(lengths),
            "labels": torch.from_numpy(self._split.labels[rows]),
            "rows": torch.from_numpy(rows),
        }


class ExampleFormat(RowFormat):
    """The row format of classification: texts, or pairs of texts, with their classes.

    Args:
        seq_len: maximum number of tokens of a sequence; longer sequences are truncated.
        labels: names of the classes that a model was trained on; None: the classes of the training split.
        num_texts: number of texts in an example that a model was trained on, 1 or 2; None: the number in the data.
        token_dropout: probability that a token is masked in training, see `Examples`.
    """

    source_rows, classes = "examples", "label"
    lacking = "its texts have no class labels; docstrings and files with a label column do"
    row, needs_mask = "example", True

    def __init__(
        self,
        seq_len: int,
        labels: list[str | int | float | bool] | None = None,
        num_texts: int | None = None,
        token_dropout: float | int = 0.0,
        max_examples: int | None = None,
    ) -> None:
        super().__init__(seq_len, max_examples)
        if not 0 <= token_dropout < 1:
            reason = "must be at least 0 and less than 1"
            raise ArgumentError("token_dropout", token_dropout, reason, {"token_dropout": 0.3})
        names = None if labels is None else [class_name(label) or "" for label in labels]
        if names is not None and ("" in names or not len(names) == len(set(names)) >= 2):
            raise ArgumentError("labels", labels, "must be at least two different names", {"labels": ["no", "yes"]})
        self._labels, self._num_texts, self._token_dropout = names, num_texts, float(token_dropout)

    def select(
        self, splits: dict[str, datasets.Dataset], source: Source, whole: bool
    ) -> tuple[dict[str, datasets.Dataset], dict[str, Any]]:
        """Return the splits with labels, and two facts: the names of the `classes`, and the splits `without_labels`.

        The classes are the labels of the training split before rows are held out or, with `whole`, of all splits.
        """
        labels = {split: set(rows["label"]) - {None} for split, rows in splits.items()}
        without = [split for split in SPLITS if split in splits and not labels[split]]
        if not any(labels.values()) or ("train" in without and not whole):
            raise ArgumentError("source", source.name, f"no example of its {without[0]} split has a class label")
        classes = set[str]().union(*labels.values()) if whole else labels["train"]
        facts = {"classes": sorted(classes, key=natural_order), "without_labels": without}
        return {split: rows for split, rows in splits.items() if labels[split]}, facts

    def write(self, folder: Path, name: str, rows: datasets.Dataset, tokenizer: TextTokenizer) -> None:
        write_rows(folder, name, rows.select_columns("label"))

    def open(self, prepared: Prepared, source: Source, whole: bool) -> dict[str, LabelledSplit]:
        # `class_name` again: an earlier version or a user-defined source may have stored "1.0" instead of "1".
        classes = self._labels or list(dict.fromkeys(class_name(name) or name for name in prepared.facts["classes"]))
        if len(classes) < 2:
            reason = f"all examples have the label {classes[0]}; there must be at least two classes"
            raise ArgumentError("source", source.name, reason)
        labels = {name: list(map(class_name, prepared.rows(name)["label"].to_pylist())) for name in prepared.splits}
        warn = partial(rank_zero_only(print), file=sys.stderr)
        has_pairs = any(len(stream.offsets) - 1 > len(labels[name]) for name, stream in prepared.splits.items())
        num_texts = 2 if has_pairs else 1
        if self._num_texts not in (None, num_texts):
            kinds = ("pairs of texts", "single texts") if has_pairs else ("single texts", "pairs of texts")
            raise ArgumentError("source", source.name, f"has {kinds[0]}, and the model classifies {kinds[1]}")
        for name in prepared.facts["without_labels"]:
            column = getattr(in_use(source), "label_column", None) or "label"
            warn(f"{source.name}: the {name} split has no labels in '{column}' and is left out.")
        splits = {}
        for name, stream in prepared.splits.items():
            number = {label: number for number, label in enumerate(classes)}
            ids, offsets, num_truncated = truncate(stream, num_texts, self.seq_len)
            splits[name] = LabelledSplit(
                ids,
                offsets,
                np.fromiter((number.get(label or "", -1) for label in labels[name]), np.int64, len(labels[name])),
                classes,
                prepared.tokenizer,
                None if num_truncated else stream.num_bytes,
                stream.num_unknown,
                num_truncated,
                num_texts,
                sorted(set(filter(None, labels[name])) - set(classes), key=natural_order),
            )
        for name in ("train", "validation"):
            if name in splits and not whole:
                self.check(splits[name], name, source)
        return splits

    def check(self, split: LabelledSplit, name: str, source: Source) -> None:
        """Refuse a split with labels that the model has no class for."""
        if split.unknown:
            reason = f"the label {split.unknown[0]} of the {name} split is not one of the classes trained on "
            reason += f"({', '.join(split.classes)}); {(split.labels < 0).sum():,} examples have such labels: "
            raise ArgumentError("source", source.name, f"{reason}rename or remove them")

    def caveats(self, splits: Mapping[str, LabelledSplit]) -> list[str]:
        """Return a phrase for each split that has no example of some classes; the phrase names these classes."""
        absent = {name: split.absent for name, split in splits.items()}
        return [f"the {name} split has no example of {classes}" for name, classes in absent.items() if classes]

    def rows(self, split: LabelledSplit, seed: int) -> Examples:
        return Examples(split)

    def training_rows(self, split: LabelledSplit, seed: int, epoch: int) -> Examples:
        return Examples(split, self._token_dropout, (seed, epoch))

    def lengths(self, split: LabelledSplit) -> Int64[np.ndarray, " examples"]:
        return split.lengths
