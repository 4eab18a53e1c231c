"""Labelled sequences of tokens, and batches of them."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int64, UInt

from tinyformer.batch import Batch
from tinyformer.data.cache import TokenSplit
from tinyformer.data.hashing import mix
from tinyformer.data.loader import EpochLoader
from tinyformer.data.tokenizer import TextTokenizer

_POOL = 50  # batches whose examples are sorted by length together


@dataclass(frozen=True)
class LabelledSplit:
    """The examples of one split: sequences `[eos, *text]`, or `[eos, *first, eos, *second]`, and their classes.

    Attributes:
        ids: The sequences one after the other, each cut to what the model takes.
        offsets: Where in `ids` each sequence begins, and the length of `ids`.
        labels: Of each example the number of its class in `classes`; -1 where it is none of them.
        classes: Names of the classes.
        tokenizer: What the ids are of.
        num_bytes: Length of the raw texts in UTF-8, before anything was cut but what follows a million characters.
        num_unknown: Tokens that stand for text outside of the vocabulary, before anything was cut.
        num_truncated: Sequences that were cut.
    """

    ids: UInt[np.ndarray, " tokens"]
    offsets: Int64[np.ndarray, " examples_and_end"]
    labels: Int64[np.ndarray, " examples"]
    classes: list[str]
    tokenizer: TextTokenizer
    num_bytes: int
    num_unknown: int
    num_truncated: int

    @property
    def num_documents(self) -> int:
        """Examples, those without text too."""
        return len(self.labels)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return len(self.ids)

    @property
    def num_targets(self) -> int:
        """Tokens that a model reads to see each example once."""
        return self.num_tokens

    @property
    def label_counts(self) -> dict[str, int]:
        """How many examples each class has."""
        counts = np.bincount(self.labels[self.labels >= 0], minlength=len(self.classes))
        return dict(zip(self.classes, counts.tolist(), strict=True))

    @property
    def majority_share(self) -> float:
        """The accuracy of who always says the most frequent class."""
        return max(self.label_counts.values()) / len(self.labels)

    def text(self, row: int) -> str:
        """An example's text, as far as the model reads it; `eos` stands between the texts of a pair."""
        return self.tokenizer.decode(self.ids[self.offsets[row] + 1 : self.offsets[row + 1]])


def cut_sequences(
    stream: TokenSplit, texts_per_example: int, max_length: int
) -> tuple[UInt[np.ndarray, " tokens"], Int64[np.ndarray, " examples_and_end"], int]:
    """Sequences of limited length from a stream of texts; of a pair, the longer text is cut first.

    Args:
        stream: The texts, each with its `eos`.
        texts_per_example: 1 or 2.
        max_length: Tokens that a sequence may have.

    Returns:
        The sequences, where they begin and the last one ends, and how many were cut.
    """
    begins = stream.offsets[:-1]
    lengths = np.diff(stream.offsets).reshape(-1, texts_per_example)
    kept = np.minimum(lengths, max_length)
    if texts_per_example == 2:
        first, second = lengths.T
        kept[:, 0] = np.minimum(first, np.maximum(max_length - second, max_length - max_length // 2))
        kept[:, 1] = np.minimum(second, max_length - kept[:, 0])
    num_cut = int((kept < lengths).any(axis=1).sum())
    if not num_cut:
        return stream.ids, stream.offsets[::texts_per_example], 0
    sizes = kept.ravel()
    ends = np.cumsum(sizes)
    positions = np.repeat(begins - (ends - sizes), sizes) + np.arange(ends[-1])
    offsets = np.concatenate([[0], ends[texts_per_example - 1 :: texts_per_example]])
    return stream.ids[positions], offsets, num_cut


class Examples(torch.utils.data.Dataset):
    """Batches of the examples of a split.

    Token dropout replaces tokens by the tokenizer's mask token, each with the same probability, but never the first
    of a sequence, from which a class may be read. So no single word decides ("word dropout": Iyyer et al. 2015, "Deep
    Unordered Composition Rivals Syntactic Methods for Text Classification"; Dai and Le 2015, arXiv:1511.01432). They
    remove a word, or put `<unk>` in its place; byte-level BPE has no `<unk>`, and a token of its own does not mean
    anything else. Which tokens are replaced is a hash of the key and of their place in the split, whatever batch they
    are in.

    Args:
        split: The examples.
        token_dropout: The probability.
        key: Decides which tokens are replaced: the seed and the epoch.
    """

    def __init__(
        self,
        split: LabelledSplit,
        token_dropout: float = 0.0,
        key: tuple[int, ...] = (0,),
    ) -> None:
        self._split = split
        self._ids = split.ids.view(np.ndarray)  # an array's indexing is faster than a memory map's
        self._most = np.uint64(token_dropout * 2**64)
        self._key = np.random.SeedSequence(key).generate_state(1, np.uint64)

    def __len__(self) -> int:
        return self._split.num_documents

    def __getitems__(self, indices: list[int]) -> Batch:
        """The examples with these numbers as one batch, padded on the right with `eos` to the longest of them."""
        rows = np.asarray(indices)
        begin = self._split.offsets[rows]
        lengths = self._split.offsets[rows + 1] - begin
        place = np.arange(lengths.max())
        positions = begin[:, None] + place
        ids = self._ids.take(positions, mode="clip").astype(np.int64)
        if self._most:
            ids = np.where((place > 0) & self._dropped(positions), self._split.tokenizer.mask_id, ids)
        ids = np.where(place < lengths[:, None], ids, self._split.tokenizer.eos_id)
        return {
            "inputs": torch.from_numpy(ids),
            "lengths": torch.from_numpy(lengths),
            "labels": torch.from_numpy(self._split.labels[rows]),
            "rows": torch.from_numpy(rows),
        }

    def _dropped(self, positions: Int64[np.ndarray, "batch seq"]) -> Bool[np.ndarray, "batch seq"]:
        # SplitMix64 from the key on: the number that it gives at a position is known without those before.
        return mix(self._key + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) < self._most

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])


class ExampleLoader(EpochLoader):
    """Batches of training examples, every example once an epoch, those of similar length together.

    They are grouped anew in each epoch, see `group_by_length`. Batches differ by at most one example in size, and at
    one step the batches of all ranks are of similar length, so that none waits long for another.

    Args:
        split: The examples: at least one for each rank.
        batch_size: Examples in a batch at most, on each rank.
        token_dropout: See `Examples`.
        seed: The order and the dropped tokens depend on it and on the epoch.
        num_workers: See `EpochLoader`.
        pin_memory: See `EpochLoader`.
        rank: Which of `world_size` processes this is; each gets other examples, and equally many batches.
        world_size: Number of processes that train together.
    """

    def __init__(
        self,
        split: LabelledSplit,
        batch_size: int,
        *,
        token_dropout: float = 0.0,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._split, self._token_dropout, self._seed = split, token_dropout, seed
        self._rank, self._world_size = rank, world_size
        # Rounded up so that all are read; but no rank is without a batch that another has.
        length = min(-(-split.num_documents // (batch_size * world_size)), split.num_documents // world_size)
        super().__init__(length, num_workers, pin_memory)

    def _epoch(self, epoch: int) -> tuple[Examples, list[list[int]]]:
        generator = np.random.default_rng((self._seed, epoch))
        pool = min(_POOL, max(self._length // 4, 1))  # few batches: or they would be the same ones in each epoch
        steps = group_by_length(np.diff(self._split.offsets), self._length, pool, generator)
        batches = [step[self._rank :: self._world_size].tolist() for step in steps]
        return Examples(self._split, self._token_dropout, (self._seed, epoch)), batches


def group_by_length(
    lengths: Int64[np.ndarray, " examples"], num_groups: int, pool: int, generator: np.random.Generator
) -> list[Int64[np.ndarray, " group"]]:
    """The numbers of examples in groups of similar length and of equal size, but for one more or less.

    The examples are shuffled; of as many as fill `pool` groups, those of similar length make a group; and the groups
    are shuffled.

    Args:
        lengths: Of the examples.
        num_groups: At most as many as there are examples.
        pool: The larger it is, the less padding, and the more often the same examples meet in a group.
        generator: Shuffles.
    """
    unsorted = np.array_split(generator.permutation(len(lengths)), num_groups)
    groups: list[Int64[np.ndarray, " group"]] = []
    for begin in range(0, num_groups, pool):
        pooled = np.concatenate(unsorted[begin : begin + pool])
        by_length = pooled[np.argsort(lengths[pooled], kind="stable")]
        groups += np.array_split(by_length, len(unsorted[begin : begin + pool]))
    return [groups[group] for group in generator.permutation(num_groups)]


class EvaluationBatches(torch.utils.data.Dataset):
    """All examples of a split in batches of similar length, the same ones each time.

    The first batch is the one with the longest sequence: what does not fit into memory shows at once, and who looks at
    a single batch sees as much text as there is. The others are a random sample, however the data are sorted.

    Args:
        split: At least one example.
        batch_size: Examples in a batch, at most.
    """

    def __init__(self, split: LabelledSplit, batch_size: int) -> None:
        lengths = np.diff(split.offsets)
        batches = group_by_length(lengths, -(-len(lengths) // batch_size), _POOL, np.random.default_rng(0))
        longest = max(range(len(batches)), key=lambda number: lengths[batches[number]].max())
        self._batches = [batches[longest], *batches[:longest], *batches[longest + 1 :]]
        self._examples = Examples(split)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:
        return self._examples.__getitems__(self._batches[index].tolist())
