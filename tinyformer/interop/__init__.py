"""Import and export of Hugging Face `transformers` models, without `transformers`.

`family` describes a model family once for both directions: keys of our config for the fields of the family's
`config.json`, and our names for its weights. `folder` loads and writes the files of a model, and compares two configs;
`vocabulary` loads and writes the files of the tokenizer.
"""

from tinyformer.interop import bert, encoder_decoders, gpt, llama

FAMILIES = gpt.FAMILIES + llama.FAMILIES + bert.FAMILIES + encoder_decoders.FAMILIES
"""All families.

The first that covers a `config.json` imports it. Of several that could export a model, that of its import does, or else
the first: Llama before Mistral, which is Llama with a sliding window.
"""
