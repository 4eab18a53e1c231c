"""A thin wrapper of the Rust library `tokenizers`."""

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import SupportsInt

import numpy as np
from jaxtyping import Bool, Int64
from tokenizers import AddedToken, Tokenizer, models, processors

from tinyformer.errors import ArgumentError

# Set explicitly, or the library warns and turns parallelism off in forked processes, which never tokenise.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

EOS = "<eos>"
UNK = "<unk>"
MASK = "<mask>"
_KNOWN_EOS = (EOS, "<|endoftext|>", "</s>", "[SEP]")
_KNOWN_MASKS = (MASK, "[MASK]")


def _byte_alphabet() -> dict[str, int]:
    """The byte that each printable character represents in byte-level vocabularies (GPT-2's `encoder.py`).

    Printable bytes are represented by themselves, all other bytes by the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


@contextlib.contextmanager
def telling(aim: str) -> Iterator[None]:
    """Turn any exception or Rust panic of the library into an `ArgumentError` with the reason "cannot {aim}"."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, ArgumentError):
        raise
    except BaseException as error:
        raise ArgumentError("tokenizer", "tokenizer.json", f"cannot {aim}: {str(error)[:200]}") from error


class TextTokenizer:
    """A `tokenizers.Tokenizer` for the raw text of data (`encode`) and for a text that is given to a model (`read`).

    `encode` adds no special tokens, and encodes the name of a special token in a text ("<eos>") as plain characters.
    `read` adds the special tokens that begin and end a text, and encodes the name of a special token as that token. No
    text is truncated or padded. The same text always has the same tokens: BPE dropout, which a `tokenizer.json` may ask
    for, is off, since data are tokenised once. The class is also a `TokenizerRecipe`: `build` returns the object.

    Args:
        tokenizer: the tokenizer, which is changed in place: truncation, padding and dropout are turned off.
        eos_token: the token that ends a generated text; None: the first of `<eos>`, `<|endoftext|>`, `</s>`, `[SEP]` in
            the vocabulary.
        post_processed: whether the post-processor determines the tokens that `read` adds around a text, as in
            `transformers`; otherwise, `read` adds `eos_token` before each text.
        ends: the ids of all tokens that end a generated text; empty: only the id of `eos_token`.
        mask_token: the mask token; None: `<mask>` or `[MASK]`, if the vocabulary has one.
    """

    name = "given"
    characters_per_token = 8
    vocab_size: int
    eos_id: int
    end_ids: tuple[int, ...]
    start_id: int  # before each document of a stream: the first token that the post-processor adds, or else `eos_id`
    unk_id: int | None  # None: no unknown token, since every string can be encoded
    mask_id: int | None  # None: no mask token, see `with_mask`

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token: str | None = None,
        post_processed: bool = False,
        ends: Iterable[int] = (),
        mask_token: str | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        if isinstance(tokenizer.model, models.BPE):
            tokenizer.model.dropout = None
        self._tokenizer = tokenizer
        self._eos_token, self.post_processed = _find_eos(tokenizer, eos_token), post_processed
        parts = [part.__getstate__() for part in (tokenizer.pre_tokenizer, tokenizer.decoder) if part is not None]
        self._byte_level = any(b'"ByteLevel"' in part for part in parts)
        # Not the vocabulary's length: the ids of other libraries' files may have gaps.
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size, self.eos_id = max(vocabulary.values()) + 1, vocabulary[self._eos_token]
        self.end_ids = tuple(ends) or (self.eos_id,)
        has_all_bytes = self._byte_level and BYTE_OF.keys() <= vocabulary.keys()
        self.unk_id = None if has_all_bytes else _find_unknown(tokenizer)
        self.unknown = None if self.unk_id is None else tokenizer.id_to_token(self.unk_id)  # its name
        self._reported = {self.unknown}
        masks, self._mask_token = (_KNOWN_MASKS if mask_token is None else (mask_token,)), mask_token
        self.mask_id = next((i for token in masks if (i := tokenizer.token_to_id(token)) is not None), None)
        self.around = _around(tokenizer) if post_processed else ([self.eos_id], [])
        self.start_id = next(iter(self.around[0]), self.eos_id)

    @classmethod
    def from_json(cls, text: str) -> "TextTokenizer":
        """Load a tokenizer from the output of `to_json` or from a `tokenizer.json`; text that is neither is refused."""
        with telling("be read"):
            if not text.startswith('{"tokenizer": '):
                return cls(Tokenizer.from_str(text))
            named = json.loads(text)
            return cls(Tokenizer.from_str(named.pop("tokenizer")), **named)

    def to_json(self) -> str:
        """A `tokenizer.json` or, if arguments differ from the defaults, a JSON object with it and these arguments."""
        text = json.dumps(json.loads(self._tokenizer.to_str()))
        named: dict[str, object] = {"ends": self.end_ids} if self.end_ids != (self.eos_id,) else {}
        named |= {"eos_token": self._eos_token} if self._eos_token != _known_eos(self._tokenizer) else {}
        named |= {"mask_token": self._mask_token} if self._mask_token is not None else {}
        named |= {"post_processed": True} if self.post_processed else {}
        return json.dumps({"tokenizer": text} | named) if named else text

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of `to_json`, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def key(self) -> str:
        return self.fingerprint

    def build(self, texts: Iterable[str]) -> "TextTokenizer":
        return self

    def with_mask(self) -> "TextTokenizer":
        """This tokenizer if it has a mask token, else a copy with `<mask>` as its last token."""
        if self.mask_id is not None:
            return self
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.add_special_tokens([MASK])
        return TextTokenizer(tokenizer, self._eos_token, self.post_processed, self.end_ids)

    def for_training(self) -> "TextTokenizer":
        """A tokenizer that puts only the token `start_id` before each text, as for models that tinyformer trains."""
        if not self.post_processed:
            return self
        copy, first = Tokenizer.from_str(self._tokenizer.to_str()), self._tokenizer.id_to_token(self.start_id)
        return TextTokenizer(copy, first, mask_token=self._mask_token)

    @cached_property
    def special_ids(self) -> set[int]:
        """The ids of tokens that represent no text, such as `<eos>` and the mask token, but not the unknown token."""
        added = (i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special)
        known = {self.eos_id, self.mask_id, *added, *self.around[0], *self.around[1]} - {self.unk_id}
        return {i for i in known if i is not None}

    def missing_ids(self, vocab_size: int) -> list[int]:
        """The ids below `vocab_size`, the number of embeddings of a model, that have no token."""
        return sorted({*range(vocab_size)} - {*self._tokenizer.get_vocab(with_added_tokens=True).values()})

    def text_ids(self, vocab_size: int) -> list[int]:
        """The ids below `vocab_size` of tokens that represent text; special, unknown and missing ids are left out."""
        left_out = {*self.special_ids, *self.missing_ids(vocab_size), self.unk_id}
        return [index for index in range(vocab_size) if index not in left_out]

    @cached_property
    def reader(self) -> Tokenizer:
        """The tokenizer for the method `read`; it is a copy, since another thread may encode data at the same time."""
        reader = Tokenizer.from_str(self._tokenizer.to_str())
        known = [*sorted(self.special_ids), *([] if self.unk_id is None else [self.unk_id])]
        add_special(reader, (token for i in known if (token := reader.id_to_token(i)) is not None))
        if not self.post_processed:
            reader.post_processor = template(reader, *self.around)
        return reader

    def read(self, texts: Sequence[str | tuple[str, str]], around: bool = True) -> list[list[int]]:
        """Token ids of texts, or of pairs of texts, for a model; with `around`, special tokens are added around a text.

        A text may contain special tokens, as in "The king is <mask>". With `around`, an empty row becomes `[eos_id]`.
        """
        plain = [*chain.from_iterable([t] if isinstance(t, str) else t for t in texts)]
        for text in plain:  # the library's error would be that the text is no string
            if re.search("[\ud800-\udfff]", text):
                raise ArgumentError("text", text, "contains half of a surrogate pair, which is no text; remove it")
        rows = [e.ids for e in self.reader.encode_batch_fast(list(texts), add_special_tokens=around)]
        if any(self.unk_id in ids for ids in rows):
            self.report_unknown(plain)
        return [ids or [self.eos_id] for ids in rows] if around else rows

    def report_unknown(self, texts: Sequence[str]) -> None:
        """Print the characters or words of texts that are encoded as the unknown token, each only once."""
        from lightning.pytorch.utilities import rank_zero_only  # noqa: PLC0415 -- seconds

        read = zip(texts, self.reader.encode_batch(list(texts), add_special_tokens=False), strict=True)
        parts = {t[slice(*e.offsets[i])] for t, e in read for i, token in enumerate(e.ids) if token == self.unk_id}
        if new := sorted(parts - self._reported):
            self._reported.update(new)
            shown = ", ".join(map(repr, new[:5])) + " …" * (len(new) > 5)
            rank_zero_only(print)(f"The tokenizer encodes {shown} as {self.unknown}.", file=sys.stderr)

    def encode(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, encoded on all cores."""
        return [e.ids for e in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def offsets(self, texts: Sequence[str]) -> list[Int64[np.ndarray, "tokens 2"]]:
        """For each token of each text, the index of its first character and the index after its last one."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.offsets, np.int64).reshape(-1, 2) for encoding in encodings]

    def prefix(self, text: str, num_tokens: int) -> str:
        """The part of a text that its first `num_tokens` tokens encode."""
        ends = self.offsets([text])[0][: max(num_tokens, 0), 1]
        return text[: ends[-1]] if len(ends) else ""

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The text of token ids, special tokens included."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def continuation(self, ids: Sequence[int], after: Sequence[int] = ()) -> str:
        """The text of `ids` when they follow the ids `after`: decoders may treat a text's first token differently."""
        before, whole = self.decode(after), self.decode([*after, *ids])
        return whole[len(before) :] if whole.startswith(before) else self.decode(ids)

    def pieces(self, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
        """Yield the text of `continuation` in pieces, while the ids arrive.

        A character whose bytes are spread over several tokens is yielded with the last of them. Joined, the pieces are
        the text; with the byte fallback of SentencePiece, they may differ from it in bytes that are not UTF-8.
        """
        seen, length = list[int](), 0
        for token in chain(ids, [None]):
            seen += [] if token is None else [token]
            # Decoders write the replacement character for the beginning of an incomplete character.
            text = self.continuation(seen, after).rstrip("" if token is None else "\ufffd")
            if len(text) > length:
                yield text[length:]
                length = len(text)

    def token_strings(self, ids: Iterable[SupportsInt]) -> list[str]:
        r"""A printable, non-empty string for each token: newline is "⏎", space "·", a control character "\xNN"."""
        return [_printable(self._raw(int(i))) for i in ids]

    @cached_property
    def shows_words(self) -> bool:
        """True if tokens contain the white space between words; otherwise, the pre-tokenizer determines the words."""
        before = self._tokenizer.pre_tokenizer
        return before is None or sum(len(part) for part, _ in before.pre_tokenize_str("a b")) > 2

    def continuations(self, texts: Sequence[str]) -> Bool[np.ndarray, " tokens"]:
        """For each token of a stream, whether the pre-tokenizer puts it in the same word as the token before."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        words = (chain([None], encoding.word_ids) for encoding in encodings)
        return np.concatenate([np.zeros(0, bool), *(np.diff(np.array([None, *text], float)) == 0 for text in words)])

    def joins(self) -> tuple[Bool[np.ndarray, " vocab_size"], Bool[np.ndarray, " vocab_size"]]:
        """For each token, whether it can continue a word, and whether a word can continue after it.

        A word is a run of letters and digits; the first token of a word has the space before it. See `shows_words`.
        """
        special = {self.eos_id, self.unk_id, self.mask_id}
        raw = [b"" if i in special else self._raw(i) for i in range(self.vocab_size)]
        # A part of a multi-byte character is treated as a letter, since most such characters are letters.
        begins = [text[:1].isalnum() or text[:1] >= b"\x80" for text in raw]
        ends = [text[-1:].isalnum() or text[-1:] >= b"\x80" for text in raw]
        return np.array(begins), np.array(ends)

    def _raw(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) or f"[{token_id}]"
        if self._byte_level and all(character in BYTE_OF for character in token):
            return bytes(BYTE_OF[character] for character in token)
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", token):  # of SentencePiece's byte fallback
            return bytes.fromhex(byte[1])
        return token.replace("▁", " ").encode()  # SentencePiece's mark for a space


def _known_eos(tokenizer: Tokenizer) -> str | None:
    return next((token for token in _KNOWN_EOS if tokenizer.token_to_id(token) is not None), None)


def _find_eos(tokenizer: Tokenizer, named: str | None) -> str:
    eos_token = named or _known_eos(tokenizer)
    if eos_token is None or tokenizer.token_to_id(eos_token) is None:
        reason = f"the vocabulary has no {named or ' or '.join(_KNOWN_EOS)}; name its token that separates documents"
        raise ArgumentError("eos_token", named, reason)
    return eos_token


def add_special(tokenizer: Tokenizer, names: Iterable[str]) -> None:
    """Make tokens special; a token that was added before keeps its flags."""
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_special_tokens([known.get(name, AddedToken(name, special=True)) for name in names])


def template(tokenizer: Tokenizer, before: Sequence[int], after: Sequence[int]) -> processors.TemplateProcessing:
    """A post-processor that puts tokens around a text, and around each text of a pair."""
    # Tokens are named by their ids, since ":" and "$" in a token's name would be syntax of the template.
    first, last = ([f"id-{i}" for i in side] for side in (before, after))
    special = [{"id": f"id-{i}", "ids": [i], "tokens": [tokenizer.id_to_token(i)]} for i in {*before, *after}]
    single, second = [*first, "$A", *last], [*first, "$B", *last]
    return processors.TemplateProcessing(single=single, pair=[*single, *second], special_tokens=special)


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that a post-processor adds before and after a text."""
    if tokenizer.post_processor is None:
        return [], []
    added = tokenizer.post_processor.process(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).encode("a"))
    place = added.special_tokens_mask.index(0)
    return added.ids[:place], added.ids[place + 1 :]


def _find_unknown(tokenizer: Tokenizer) -> int | None:
    if isinstance(tokenizer.model, models.Unigram):  # it stores the id, not the token
        return json.loads(tokenizer.model.__getstate__())["unk_id"]
    unknown = tokenizer.model.unk_token
    return tokenizer.token_to_id(unknown) if unknown else None


def _printable(raw: bytes) -> str:
    def escaped(character: str) -> str:
        return "".join(f"\\x{byte:02x}" for byte in character.encode(errors="surrogateescape"))

    text = raw.decode(errors="surrogateescape").replace("\n", "⏎").replace(" ", "·")
    return "".join(character if character.isprintable() else escaped(character) for character in text)
