"""The tokens around the two texts of a pair: what begins and ends a source, and a target."""

from collections.abc import Sequence
from dataclasses import dataclass

from tinyformer.errors import ArgumentError, require_at_least


@dataclass(frozen=True)
class PairTokens:
    """The ids of the tokens around sources and targets, and of those that are never generated.

    A source is `[bos] text eos`. The decoder reads `start [bos] text` and predicts `[bos] text eos`.

    Attributes:
        eos: ends a source and a target.
        start: what the decoder reads first.
        bos: the first token of every text, if any.
        forced_bos: what the first token of a decoded target has to be, if anything.
        suppressed: tokens that are never decoded.
    """

    eos: int
    start: int
    bos: int | None = None
    forced_bos: int | None = None
    suppressed: tuple[int, ...] = ()

    @property
    def num_added(self) -> int:
        """Number of tokens that a source has beside its text."""
        return 1 if self.bos is None else 2

    def source(self, text: Sequence[int], max_tokens: int) -> list[int]:
        """The source of a text; one that is too long is truncated at its end."""
        return [*self._first(), *text[: max(0, max_tokens - self.num_added)], self.eos]

    def inputs(self, text: Sequence[int]) -> list[int]:
        """What the decoder reads to predict a text."""
        return [self.start, *self._first(), *text]

    def predicted(self, text: Sequence[int]) -> list[int]:
        """What the decoder predicts: its inputs, one token further."""
        return [*self._first(), *text, self.eos]

    def without_bos(self, target: list[int]) -> list[int]:
        """The text of a decoded target."""
        return target[1:] if self.bos is not None and target[:1] == [self.bos] else target

    def _first(self) -> list[int]:
        return [] if self.bos is None else [self.bos]


@dataclass(frozen=True)
class SpecialTokens:
    """The ids in `PairTokens` that a model does not take from its tokenizer: those of T5, BART and Marian.

    By default the tokenizer's `eos` begins and ends a target, and no token is forced or suppressed.

    Args:
        eos: ends a source and a target; None for the tokenizer's.
        decoder_start: what the decoder reads first; None for `eos`.
        bos: the first token of every text; None for none.
        forced_bos: what the first token of a decoded target has to be; None for any.
        suppressed: tokens that are never decoded.

    Raises:
        ArgumentError: an id is negative.
    """

    eos: int | None = None
    decoder_start: int | None = None
    bos: int | None = None
    forced_bos: int | None = None
    suppressed: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name, number in self.ids():
            require_at_least(0, {name: 0}, **{name: number})

    @classmethod
    def of(cls, given: object) -> "SpecialTokens":
        """The special tokens that were given, or the default ones.

        Raises:
            ArgumentError: it is something else.
        """
        if given is not None and not isinstance(given, cls):
            raise ArgumentError("special_tokens", type(given).__name__, "must be tinyformer.data.SpecialTokens")
        return cls() if given is None else given

    def ids(self) -> list[tuple[str, int]]:
        """The argument and the value of every id that is given."""
        names = ("eos", "decoder_start", "bos", "forced_bos")
        single = [(name, number) for name in names if (number := getattr(self, name)) is not None]
        return [*single, *(("suppressed", number) for number in self.suppressed)]

    def require_known(self, vocab_size: int) -> None:
        """Refuse ids that a vocabulary does not have.

        Raises:
            ArgumentError: an id is `vocab_size` or more.
        """
        for name, number in self.ids():
            if number >= vocab_size:
                raise ArgumentError(name, number, f"must be below {vocab_size}, the size of the vocabulary")

    def with_eos(self, eos: int | None) -> PairTokens:
        """All tokens, given the tokenizer's `eos`, if there is one.

        Raises:
            ArgumentError: there is none, and this names none.
        """
        eos = eos if self.eos is None else self.eos
        if eos is None:
            raise ArgumentError("eos", None, "must be given where there is no tokenizer", {"eos": 0})
        start = eos if self.decoder_start is None else self.decoder_start
        return PairTokens(eos, start, self.bos, self.forced_bos, tuple(self.suppressed))
