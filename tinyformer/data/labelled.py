"""Labelled text as Lightning wants it."""

import sys
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from tinyformer.batch import Batch
from tinyformer.data.base import DataModule, hold_out_settings, how_to_hold_out, require_at_least_one, share
from tinyformer.data.example_cache import ExampleRecipe, PreparedExamples, open_examples, prepare_examples
from tinyformer.data.examples import EvaluationBatches, ExampleLoader, LabelledSplit, cut_sequences
from tinyformer.data.sources import LabelledSource, Source, lacks_own_splits
from tinyformer.data.tokenizer import TextTokenizer
from tinyformer.data.tokenizer_recipes import MaskedTokenizer, TokenizerRecipe


class LabelledDataModule(DataModule):
    """Batches of texts, or of pairs of texts, and the class of each.

    Args:
        source: Where the texts and their labels come from: a `LabelledSource`.
        tokenizer: A recipe, built on the training texts, or a finished tokenizer; a token that stands for a hidden
            one is added.
        seq_len: Tokens of a sequence, at most; longer ones are cut.
        batch_size: Examples in a batch, on each device.
        labels: Names of the classes, for a model that knows them; None: those of the source's training split.
        validation_fraction: Share of the training examples to hold out, unless the source has its own labelled
            validation split.
        test_fraction: The same for testing.
        group_near_copies: Keep texts that nearly equal one another on one side of the hold-out.
        token_dropout: Probability of a token to be hidden in training, see `Examples`.
        max_examples: Train on no more examples than this, drawn by the seed.
        cache_dir: Where tokenised text is kept.
        num_workers: See `DataModule`.
        seed: Decides which examples are held out, the order of training, and which tokens are hidden.

    Raises:
        ValueError: If the source has no labels, or a number is not one that works.
    """

    splits: dict[str, LabelledSplit]
    row = "example"

    def __init__(
        self,
        source: Source,
        tokenizer: TokenizerRecipe,
        seq_len: int,
        batch_size: int,
        *,
        labels: list[str] | None = None,
        validation_fraction: float | int = 0.05,
        test_fraction: float | int = 0.05,
        group_near_copies: bool = True,
        token_dropout: float | int = 0.0,
        max_examples: int | None = None,
        cache_dir: str = "data/cache",
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(seq_len, batch_size, num_workers, seed)
        if not isinstance(source, LabelledSource):
            raise ValueError(  # noqa: TRY004 -- what a user can get wrong is a ValueError
                f"data={source.name}: its texts have no labels to classify by; data=docstrings has, or "
                "data=text data.files=... data.label_column=label."
            )
        require_at_least_one("model.max_seq_len", seq_len, 256)
        if max_examples is not None:
            require_at_least_one("data.max_examples", max_examples, 1000)
        self._held_out = hold_out_settings(validation_fraction, test_fraction, group_near_copies)
        if not 0 <= token_dropout < 1:
            raise ValueError(
                f"data.token_dropout={token_dropout}: must be at least 0 and less than 1; data.token_dropout=0.3 works."
            )
        if labels is not None and not len(labels) == len(set(labels)) >= 2:
            raise ValueError(f"task.labels={labels}: must be two different names or more; task.labels=[no,yes] works.")
        self.source, self.name, self.cache_dir = source, source.name, cache_dir
        self._recipe, self._known, self._token_dropout = MaskedTokenizer(tokenizer), labels, float(token_dropout)
        self._max_examples = max_examples

    @property
    def scored_whole(self) -> bool:
        """True for files without a validation split of their own."""
        return lacks_own_splits(self.source)

    def prepare(self, whole: bool = False) -> None:
        """Tokenises the examples, or opens what was tokenised before.

        Args:
            whole: Hold nothing out: all examples become the one split "all", to evaluate other data than trained on.

        Raises:
            ValueError: If the source cannot be read, some rows have no label, or there are no two classes.
        """
        prepared = prepare_examples(self._example_recipe(whole), self.cache_dir)
        self.labels = self._known or prepared.classes
        if len(self.labels) < 2:
            raise ValueError(
                f"data={self.name}: all examples have the label {self.labels[0]}; there must be two to tell apart."
            )
        self.tokenizer, self.fingerprint = prepared.tokenizer, prepared.fingerprint
        self.splits = {name: self._split(prepared, name) for name in prepared.streams}
        self._names = {name: [prepared.names[i] for i in np.unique(prepared.labels[name])] for name in self.splits}
        for name in prepared.without_labels:
            _say(f"data={self.name}: the split {name} has no labels, and is left out.")
        for name in ("train", "validation"):
            if name in self.splits and not whole:
                self._check_labels(name)

    def is_prepared(self, tokenizer: TextTokenizer, whole: bool = False) -> bool:
        """Whether the examples lie in the cache already, in the tokens of a given tokenizer (and a mask)."""
        prepared = open_examples(self._example_recipe(whole), self.cache_dir)
        return prepared is not None and prepared.tokenizer.fingerprint == tokenizer.with_mask().fingerprint

    def _example_recipe(self, whole: bool) -> ExampleRecipe:
        settings: dict[str, Any] = {} if whole else self._held_out | {"seed": self.seed}
        return ExampleRecipe(self.source, self._recipe, max_examples=self._max_examples, whole=whole, **settings)

    def _split(self, prepared: PreparedExamples, name: str) -> LabelledSplit:
        assert self.labels is not None
        stream = prepared.streams[name]
        ids, offsets, num_truncated = cut_sequences(stream, prepared.texts_per_example, self.seq_len)
        numbers = {label: number for number, label in enumerate(self.labels)}
        number_of = np.array([numbers.get(label, -1) for label in prepared.names])
        return LabelledSplit(
            ids,
            offsets,
            number_of[prepared.labels[name]],
            self.labels,
            self.tokenizer,
            stream.num_bytes,
            stream.num_unknown,
            num_truncated,
        )

    def _training_loader(self, **settings: Any) -> ExampleLoader:
        return ExampleLoader(self.splits["train"], token_dropout=self._token_dropout, **settings)

    def _evaluation_loader(self, split_name: str, rank: int, world_size: int) -> DataLoader[Batch]:
        if not self.splits[split_name].num_documents:
            raise ValueError(
                f"the split {split_name} holds no examples; give more in data.files, or a larger "
                f"data.{split_name}_fraction, for instance 0.1."
            )
        self._check_labels(split_name)
        return share(EvaluationBatches(self.splits[split_name], self.batch_size), None, rank, world_size)

    def _check_labels(self, split_name: str) -> None:
        """Refuse labels that the model has no class for.

        Raises:
            ValueError: There is one.
        """
        assert self.labels is not None
        unknown = [label for label in self._names[split_name] if label not in self.labels]
        if unknown:
            number = int((self.splits[split_name].labels < 0).sum())
            raise ValueError(
                f"the label {unknown[0]} of the split {split_name} is none of those trained on "
                f"({', '.join(self.labels)}); {number:,} examples have such labels: rename them, or take them out."
            )

    def _remedy(self, split_name: str) -> str:
        return how_to_hold_out(split_name)


@rank_zero_only
def _say(line: str) -> None:
    print(line, file=sys.stderr)
