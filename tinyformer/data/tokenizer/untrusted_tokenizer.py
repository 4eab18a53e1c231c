"""Tokenizers from untrusted files, which may be slow, large or wrong, and run no code."""

from tinyformer.data.tokenizer.tokenizer import TextTokenizer
from tinyformer.errors import ArgumentError

SAMPLE = "The cat, 1 day: naïve 猫.\n"
"""A text that a tokenizer has to encode and decode before it is used."""


def untrusted_tokenizer(text: str) -> TextTokenizer:
    """The tokenizer of an untrusted `tokenizer.json`; one that the library cannot read or apply is refused."""
    try:
        tokenizer = TextTokenizer.from_json(text)
        tokenizer.decode(tokenizer.encode(SAMPLE))
    except ArgumentError:
        raise
    except BaseException as error:  # the library raises bare exceptions, and panics are no `Exception`
        if not is_complaint(error):
            raise
        raise ArgumentError("tokenizer", "tokenizer.json", f"cannot be read: {str(error)[:200]}") from error
    return tokenizer


def is_complaint(error: BaseException) -> bool:
    """Whether an error says that the tokenizers library cannot read a file: an exception, or a panic of the library."""
    is_panic = type(error).__name__ == "PanicException"  # a class that cannot be imported
    return is_panic or (isinstance(error, Exception) and not isinstance(error, MemoryError))
