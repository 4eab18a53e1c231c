"""The tokens around the two texts of a pair: what begins and ends a source, and a target."""

from collections.abc import Sequence
from dataclasses import dataclass

from tinyformer.data.tokenizer.tokenizer import TextTokenizer
from tinyformer.errors import ArgumentError, require_at_least


@dataclass(frozen=True)
class PairTokens:
    """The ids of the tokens around sources and targets, and of those that are never generated.

    A source and a target are `before text end`. The decoder reads `start` and then the target without its last token.
    """

    eos: int  # ends a decoded target
    start: int  # what the decoder reads first
    end: tuple[int, ...]  # after every text
    before: tuple[int, ...] = ()  # before every text, such as BART's `<s>`
    forced_bos: int | None = None  # what the first token of a decoded target has to be, if anything
    suppressed: tuple[int, ...] = ()  # never decoded
    vocab_size: int | None = None  # ids from here on are never decoded, since they have no token; None: all have one

    @property
    def num_added(self) -> int:
        """Number of tokens that a source has in addition to its text."""
        return len(self.before) + len(self.end)

    def source(self, text: Sequence[int], max_tokens: int) -> list[int]:
        """The source of a text; one that is too long is truncated at its end."""
        return self.wrapped(text[: max(0, max_tokens - self.num_added)])

    def inputs(self, text: Sequence[int]) -> list[int]:
        """The decoder's input for predicting a text: `start`, and the target without its last token."""
        return [self.start, *self.wrapped(text)[:-1]]

    def wrapped(self, text: Sequence[int]) -> list[int]:
        """A text with the tokens around it: a source, or a target as the decoder predicts it."""
        return [*self.before, *text, *self.end]

    def without_bos(self, target: list[int]) -> list[int]:
        """The text of a decoded target: what follows `before`."""
        return target[len(self.before) :] if target[: len(self.before)] == [*self.before] else target


@dataclass(frozen=True)
class SpecialTokens:
    """The ids in `PairTokens` that a model does not take from its tokenizer: those of T5, BART and Marian.

    By default the tokenizer's `eos` begins and ends a target, and no token is forced or suppressed.
    """

    eos: int | None = None  # ends a source and a target; None for the tokenizer's
    decoder_start: int | None = None  # what the decoder reads first; None for `eos`
    bos: int | None = None  # the first token of every text; None for none
    forced_bos: int | None = None  # what the first token of a decoded target has to be; None for any
    suppressed: Sequence[int] = ()  # tokens that are never decoded

    def __post_init__(self) -> None:
        for name, number in self.ids():
            require_at_least(0, {name: 0}, **{name: number})

    @classmethod
    def of(cls, given: object) -> "SpecialTokens":
        """The special tokens that were given, or the default ones; anything else is refused."""
        if given is not None and not isinstance(given, cls):
            raise ArgumentError("special_tokens", type(given).__name__, "must be tinyformer.data.SpecialTokens")
        return cls() if given is None else given

    def ids(self) -> list[tuple[str, int]]:
        """The argument and the value of every id that is given."""
        names = ("eos", "decoder_start", "bos", "forced_bos")
        single = [(name, number) for name in names if (number := getattr(self, name)) is not None]
        return [*single, *(("suppressed", number) for number in self.suppressed)]

    def require_known(self, vocab_size: int) -> None:
        """Refuse ids of `vocab_size` or more."""
        for name, number in self.ids():
            if number >= vocab_size:
                raise ArgumentError(name, number, f"must be below {vocab_size}, the size of the vocabulary")

    def around(self, tokenizer: TextTokenizer | None) -> PairTokens:
        """All tokens, given the tokenizer, if there is one, whose post-processor may decide what is around a text."""
        eos = tokenizer.eos_id if self.eos is None and tokenizer is not None else self.eos
        if eos is None:
            raise ArgumentError("eos", None, "must be given where there is no tokenizer", {"eos": 0})
        start = eos if self.decoder_start is None else self.decoder_start
        before, after = [] if self.bos is None else [self.bos], [eos]
        suppressed, vocab_size = [*self.suppressed], None
        if tokenizer is not None:
            before, after = tokenizer.around if tokenizer.post_processed else (before, after)
            suppressed, vocab_size = [*suppressed, *tokenizer.missing_ids(tokenizer.vocab_size)], tokenizer.vocab_size
        return PairTokens(eos, start, tuple(after), tuple(before), self.forced_bos, tuple(suppressed), vocab_size)
