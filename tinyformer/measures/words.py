"""The words of a token sequence, and attention maps between words instead of tokens."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from os.path import commonprefix
from textwrap import shorten

import torch
from jaxtyping import Float
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from torch.nn.functional import one_hot

from tinyformer.data import TextTokenizer
from tinyformer.errors import ArgumentError

WORD = r"\p{Han}|[[\p{L}\p{M}\p{N}_]&&\P{Han}]+(?:['’][\p{L}\p{M}]+)*|\X"
"""A Chinese character; a run of letters and digits, with apostrophes inside; or another character, such as a comma."""


@dataclass(frozen=True)
class Words:
    """The words of a token sequence."""

    names: tuple[str, ...]
    of_tokens: tuple[int, ...]  # the index of the word that each token belongs to, ascending from 0

    def tokens(self, word: int, last: int | None = None) -> range:
        """The positions of the tokens of a word, or of all words from `word` to `last`."""
        return range(self.of_tokens.index(word), bisect_right(self.of_tokens, word if last is None else last))

    def find(self, asked: str) -> range:
        """The indices of the words of a phrase, such as "jumps over"; "it:2" is the second "it" if no word is "it:2".

        Raises:
            ArgumentError: the text does not contain the phrase, or contains it several times.
        """
        name, number, runs = asked, "", self._runs(asked)
        if not runs and (parts := asked.rpartition(":"))[2].isdecimal():
            name, _, number = parts
            runs = self._runs(name)
        which = int(number or 1)
        if (number or len(runs) == 1) and 1 <= which <= len(runs):
            return runs[which - 1]
        if runs:
            times = f"{len(runs)} times: {name}:1 to {name}:{len(runs)}" if len(runs) > 1 else "once"
            raise ArgumentError("asked", asked, f"the text has {name} {times}")
        known = shorten(" ".join(self.names), 200, placeholder=" …")
        raise ArgumentError("asked", asked, f"the text has no {name}; its words are {known}")

    def _runs(self, text: str) -> list[range]:
        """The word indices of each occurrence of a phrase; its white space matches only a boundary between words."""
        if text in self.names:
            return [range(at, at + 1) for at, name in enumerate(self.names) if name == text]
        names, parts = ["".join(name.split()) for name in self.names], text.split()
        whole, phrase = "".join(names), "".join(parts)
        ends, inner = ([*accumulate(map(len, each), initial=0)] for each in (names, parts))
        starts = [at for at in {*ends} if whole.startswith(phrase, at) and {at + end for end in inner} <= {*ends}]
        return [range(bisect_right(ends, at) - 1, ends.index(at + len(phrase))) for at in sorted(starts) if phrase]

    def joined(self, phrase: range) -> "Words":
        """A copy in which the words of a phrase are merged into one word, at the index of the first."""
        first, end = phrase[0], phrase[-1] + 1
        names = (*self.names[:first], " ".join(self.names[first:end]), *self.names[end:])
        return Words(names, tuple(word - min(max(word - first, 0), len(phrase) - 1) for word in self.of_tokens))

    def predicted(self) -> "Words":
        """The words that the queries of a causal model predict: each query belongs to the word of the next token."""
        return Words((*self.names, ""), (*self.of_tokens[1:], len(self.names)))


def words_of(ids: Sequence[int], tokenizer: TextTokenizer, texts: Sequence[str | Sequence[str]] = ()) -> Words:
    """The words of a token sequence, for a vocabulary of bytes, characters or pieces of words.

    A word is a run of letters and digits; it may contain apostrophes. Each Chinese character, each punctuation mark and
    each special token, such as `<eos>`, is a separate word. White space belongs to the word that follows it, as in
    GPT-2's vocabulary. Words that share a token are one word, such as a bracket and the full stop behind it.

    If tokens do not keep white space, the pre-tokenizer finds the words in the first of `texts` that is tokenized to
    `ids`; if there is none, in the decoded text.
    """
    special = tokenizer.special_ids
    for text in () if tokenizer.shows_words else (*texts, tokenizer.decode(i for i in ids if i not in special)):
        if (found := _words_of_text(ids, tokenizer, text)) is not None:
            return found
    names: list[str] = []
    of_tokens: list[int] = []
    for is_special, run in groupby(ids, special.__contains__):
        part = list(run)
        pieces = [tokenizer.decode([i]) for i in part] if is_special else _pieces(part, tokenizer)
        words = range(len(part)) if is_special else _words_of_pieces(pieces)
        first = len(names)
        names += [""] * (words[-1] + 1)
        for word, piece in zip(words, pieces, strict=True):
            names[first + word] += piece
        of_tokens += [first + word for word in words]
    return Words(tuple(name.strip() or name for name in names), tuple(of_tokens))


def _words_of_text(ids: Sequence[int], tokenizer: TextTokenizer, text: str | Sequence[str]) -> Words | None:
    """The words that the pre-tokenizer finds in a text; None if the text's tokens differ from `ids`."""
    row, special = text if isinstance(text, str) else tuple(text), tokenizer.special_ids
    (read,) = tokenizer.reader.encode_batch([row])
    keys = [key for key in zip(read.ids, read.sequence_ids, read.word_ids, strict=True) if key[0] not in special]
    if [token for token, *_ in keys] != [token for token in ids if token not in special]:
        return None
    words = (word for _, *word in keys)
    of_tokens = [[place] if token in special else next(words) for place, token in enumerate(ids)]
    runs = [[*run] for _, run in groupby(range(len(ids)), of_tokens.__getitem__)]
    names = ("".join(tokenizer.decode([ids[place] for place in run]).split()) for run in runs)
    return Words(tuple(names), tuple(word for word, run in enumerate(runs) for _ in run))


def merge_words(
    weights: Float[Tensor, "*maps queries keys"], queries: Words, keys: Words
) -> Float[Tensor, "*maps query_words key_words"]:
    """The attention maps of words (Clark et al. 2019, arXiv 1906.04341, §4.1).

    The weight to a word is the sum over its tokens, and the weight from a word is the mean over its tokens, so that the
    sums of rows are preserved.
    """
    from_words, to_words = (  # shape `tokens words`: 1 where a token belongs to a word
        one_hot(torch.tensor(words.of_tokens, device=weights.device), len(words.names)).to(weights.dtype)
        for words in (queries, keys)
    )
    return (from_words / from_words.sum(dim=0)).mT @ weights @ to_words


def _pieces(ids: Sequence[int], tokenizer: TextTokenizer) -> list[str]:
    """The text that each token adds; a character that several tokens encode is added by the last of these tokens."""
    text = tokenizer.decode(ids)
    # Tokens that end within a character decode to a replacement character, which differs from the text.
    ends = [len(commonprefix([tokenizer.decode(ids[: i + 1]), text])) for i in range(len(ids))]  # noqa: RUF071 -- of characters
    return [text[begin:end] for begin, end in pairwise(accumulate(ends, max, initial=0))]


def _words_of_pieces(pieces: Sequence[str]) -> list[int]:
    """The index of the word that each piece of a text belongs to; words that share a piece are one word."""
    split = Split(Regex(WORD), "isolated").pre_tokenize_str("".join(pieces))
    ends = [end for word, (_, end) in split if word.strip()]
    starts = [0, *ends[:-1]]  # a word includes the white space before it
    words: list[int] = []
    begin, reached = 0, -1
    for piece in pieces:
        # White space at either end of a piece does not count, unless the piece is nothing but white space.
        indent = len(piece) - len(piece.lstrip()) if piece.strip() else 0
        first, last = (bisect_right(starts, begin + at) - 1 for at in (indent, max(indent, len(piece.rstrip()) - 1)))
        words.append((words[-1] if words else -1) + (first > reached))
        begin, reached = begin + len(piece), max(reached, last)
    return words
