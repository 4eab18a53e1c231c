"""Tokenizers from untrusted files, which may be slow, large or wrong, and run no code."""

from tinyformer.data.tokenizer.tokenizer import TextTokenizer, telling

SAMPLE = "The cat, 1 day: naïve 猫.\n"
"""A text that a tokenizer has to encode and decode before it is used."""


def untrusted_tokenizer(text: str) -> TextTokenizer:
    """The tokenizer of an untrusted `tokenizer.json`; one that the library cannot read or apply is refused."""
    with telling("be read"):
        tokenizer = TextTokenizer.from_json(text)
        tokenizer.decode(tokenizer.encode(SAMPLE))
    return tokenizer
