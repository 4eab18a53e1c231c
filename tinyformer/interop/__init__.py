"""Import and export of Hugging Face `transformers` models, without `transformers`.

`family` describes a model family once for both directions: keys of our config for the fields of the family's
`config.json`, and our names for its weights. `folder` loads and writes the files of a model, and compares two configs;
`vocabulary` loads and writes the files of the tokenizer.
"""

from tinyformer.interop.bert import BERT, DISTILBERT, ENCODERS, MODERNBERT, ROBERTA, XLM_ROBERTA
from tinyformer.interop.encoder_decoders import BART, MARIAN, T5, T5_GATED
from tinyformer.interop.family import Family
from tinyformer.interop.gpt import GPT2, GPT_J, GPT_NEO, GPT_NEOX, GPT_NEOX_SEQUENTIAL, OPT
from tinyformer.interop.llama import (
    GEMMA2,
    GEMMA3,
    LLAMA,
    MISTRAL,
    NANOCHAT,
    OLMO2,
    OLMO3,
    PHI,
    PHI3,
    QWEN2,
    QWEN3,
    SMOLLM3,
)

FAMILIES: tuple[Family, ...] = (
    *(GPT2, GPT_NEO, GPT_J, GPT_NEOX, GPT_NEOX_SEQUENTIAL, OPT, PHI),
    *(LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, OLMO2, OLMO3, GEMMA2, GEMMA3, PHI3, NANOCHAT),
    *(*ENCODERS, BERT, ROBERTA, XLM_ROBERTA, DISTILBERT, MODERNBERT, T5, T5_GATED, BART, MARIAN),
)
"""All families.

The first that covers a `config.json` imports it. Of several that could export a model, the first does: Mistral is Llama
with a sliding window.
"""
