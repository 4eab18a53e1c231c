"""Import and export of Hugging Face `transformers` models, without `transformers`.

`family` describes a model family once for both directions: keys of our config for the fields of the family's
`config.json`, and our names for its weights. `folder` loads and writes the files of a model, and compares two configs;
`vocabulary` loads and writes the files of the tokenizer.
"""

from tinyformer.interop.bert import BERT, BERT_ENCODER
from tinyformer.interop.decoders import GPT2, GPT_NEOX, LLAMA, MISTRAL
from tinyformer.interop.encoder_decoders import BART, MARIAN, T5, T5_GATED
from tinyformer.interop.family import Family

FAMILIES: tuple[Family, ...] = (GPT2, GPT_NEOX, LLAMA, MISTRAL, BERT, BERT_ENCODER, T5, T5_GATED, BART, MARIAN)
"""All families, in the order in which an export tries them: Mistral is Llama with a sliding window."""
