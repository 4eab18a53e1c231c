"""GGUF files, as llama.cpp reads them: the config, the weights in fp32, and byte-level BPE tokenizers.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tinyformer.data import TextTokenizer
from tinyformer.data.tokenizer.tokenizer import template
from tinyformer.errors import ArgumentError
from tinyformer.interop.family import Fields, Weights
from tinyformer.interop.folder import reading
from tinyformer.interop.vocabulary import QWEN_SPLIT

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""The supported architectures, which are also a `model_type` of `transformers`; Mistral's files say llama."""

FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""Fields of `config.json` by their keys in a GGUF file, which follow the name of the architecture."""

MODULES = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head", "attn_norm": "input_layernorm"}
MODULES |= {"ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
MODULES |= {f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"}
MODULES |= {f"attn_{name}_norm": f"self_attn.{name}_norm" for name in "qk"}
MODULES |= {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
"""The names of modules in `transformers`, without those of layers, by their names in a GGUF file."""

GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

PRE_TOKENIZERS = {
    "gpt-2": [GPT2_SPLIT],
    "smollm": [r"\p{N}", GPT2_SPLIT],
    "qwen2": [QWEN_SPLIT],
    "llama-bpe": [QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")],
}
"""The regular expressions that split a text one after the other, by the name of the pre-tokenizer."""

CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are found in a text before it is split: special ones, such as the end of a text, and others."""


class GGUFFile:
    """A GGUF file; an `ArgumentError` is raised if it is damaged, or its architecture is not supported."""

    fields: Fields  # the metadata as the fields of a `config.json`

    def __init__(self, path: Path) -> None:
        try:
            import gguf  # noqa: PLC0415
        except ImportError as error:
            reason = "needs the package gguf: pip install 'tinyformer[gguf]'"
            raise ArgumentError("source", str(path), reason) from error
        self.path, self._dequantize = path, gguf.quants.dequantize
        with reading(self.path):
            self._reader = gguf.GGUFReader(path)
            self.fields = self._read_fields()

    def _value(self, key: str) -> Any:
        """The value of a key; None if the file lacks it."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def _require(self, key: str, *known: Any) -> Any:
        if (value := self._value(key)) not in known:
            reason = f"its {key} is {str(value)[:100]}; {', '.join(map(str, filter(None, known)))} are supported"
            raise ArgumentError("source", str(self.path), reason)
        return value

    def _read_fields(self) -> Fields:
        tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        kind = self._require("general.architecture", *ARCHITECTURES)
        fields = {theirs: self._value(f"{kind}.{key}") for key, theirs in FIELDS.items()}
        fields["head_dim"] = fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"]
        if (rotated := self._value(f"{kind}.rope.dimension_count")) is not None:
            fields["partial_rotary_factor"] = rotated / fields["head_dim"]
        if self._require(f"{kind}.rope.scaling.type", None, "none", "linear") == "linear":
            factor = self._value(f"{kind}.rope.scaling.factor")
            fields["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        if kind != "qwen2":  # whose queries, keys and values always have biases
            fields["attention_bias"] = "blk.0.attn_q.bias" in tensors
        return {name: value for name, value in fields.items() if value is not None} | {
            "model_type": kind,
            "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
            "num_key_value_heads": fields["num_key_value_heads"] or fields["num_attention_heads"],
            "tie_word_embeddings": "output.weight" not in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "eos_token_id": self._value("tokenizer.ggml.eos_token_id"),
        }

    def read_tensors(self) -> Weights:
        """All tensors, dequantised to fp32, under their names in `transformers` without "model."."""
        weights: Weights = {}
        heads = {"attn_q": self.fields["num_attention_heads"], "attn_k": self.fields["num_key_value_heads"]}
        with reading(self.path):
            for tensor in self._reader.tensors:
                name, weight = tensor.name, torch.tensor(self._dequantize(tensor.data, tensor.tensor_type)).float()
                *layer, module, part = name.removeprefix("blk.").split(".")
                if self.fields["model_type"] == "llama" and module in heads:
                    # Two rows that are rotated together are neighbours; in `transformers`, they are half a head apart.
                    weight = weight.unflatten(0, (heads[module], -1, 2)).transpose(1, 2).flatten(0, 2)
                if module in MODULES:
                    name = ".".join([*["layers"][: len(layer)], *layer, MODULES[module], part])
                weights[name] = weight
        return weights

    def read_tokenizer(self) -> TextTokenizer | None:
        """The tokenizer; None if it is not byte-level BPE, or if its pre-tokenizer is not in `PRE_TOKENIZERS`."""
        names = ("model", "pre", "tokens", "token_type", "merges", "add_bos_token", "bos_token_id")
        with reading(self.path):
            model, pre, tokens, types, merges, begins, first = (self._value(f"tokenizer.ggml.{name}") for name in names)
            if model != "gpt2" or pre not in PRE_TOKENIZERS:
                return None
            is_llama = pre == "llama-bpe"  # in whose own files a word that is a token is not split
            pairs = [tuple(merge.split(" ", 1)) for merge in merges]
            tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, pairs, ignore_merges=is_llama))
            tokenizer.normalizer = normalizers.NFC() if pre == "qwen2" else None
            splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
            to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
            tokenizer.decoder = decoders.ByteLevel()
            for token, kind in zip(tokens, types, strict=True):
                if kind in (CONTROL, USER_DEFINED):
                    tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
            if is_llama if begins is None else begins:
                tokenizer.post_processor = template(tokenizer, [first], [])
            end = self.fields["eos_token_id"]
            return TextTokenizer(tokenizer, tokens[end], True, [end])
