"""Models of Hugging Face's `transformers`, in and out, without `transformers`.

Each family is described once, for both directions: the fields of its `config.json` beside the keys of ours, the names
of its weights beside ours (`family`). A `folder` holds its files, `vocabulary` reads and writes the tokenizer's, and
`difference` finds what of one of our configs a family lacks.
"""

from tinyformer.interop.bert import BERT
from tinyformer.interop.difference import Difference, find_differences
from tinyformer.interop.family import Family
from tinyformer.interop.folder import find_folder, read_config, read_tensors, write_folder
from tinyformer.interop.gpt2 import GPT2
from tinyformer.interop.llama import LLAMA, MISTRAL
from tinyformer.interop.vocabulary import read_tokenizer, tokenizer_files

FAMILIES: tuple[Family, ...] = (GPT2, LLAMA, MISTRAL, BERT)
"""In the order in which an export tries them: Mistral is Llama with a window."""

__all__ = [
    "FAMILIES",
    "Difference",
    "Family",
    "find_differences",
    "find_folder",
    "read_config",
    "read_tensors",
    "read_tokenizer",
    "tokenizer_files",
    "write_folder",
]
