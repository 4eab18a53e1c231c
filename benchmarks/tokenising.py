"""Tokenising text: ours, into a memory map on disk, and the `tokenizers` library alone, which discards the ids.

`python benchmarks/run.py --bench tokenising` measures it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import alternate
from tokenizers import Tokenizer

from tinyformer.data.sources.pydoc import Pydoc
from tinyformer.data.stream import encode, write_split
from tinyformer.data.tokenizer.recipes import BPETokenizer

ALONE = "tokenizers alone"
VOCAB_SIZE = 8192


def tokenise_in_turn(folder: Path, repeats: int, rounds: int) -> tuple[int, dict[str, list[float]]]:
    """The number of characters, and the seconds that each side takes for them; our side is "ours".

    Args:
        folder: where the files are written.
        repeats: how often pydoc's documents, some 2 MB, are repeated.
        rounds: number of rounds.
    """
    own = list(Pydoc().load()["train"]["text"])
    tokenizer = BPETokenizer(VOCAB_SIZE).build(own)
    library, texts = Tokenizer.from_str(tokenizer.to_json()), repeats * own

    def ours() -> None:
        write_split(encode(texts, tokenizer), tokenizer, folder, "train")

    def alone() -> list[list[int]]:
        return [encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)]

    sides: dict[str, Callable[[], Any]] = {"ours": ours, ALONE: alone}
    return sum(map(len, texts)), alternate(sides, rounds)
