"""GGUF files, as llama.cpp reads them: the config, the weights in fp32, and byte-level BPE tokenizers.

The metadata name the architecture and the tokenizer by llama.cpp's names, which have no version:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tinyformer.data import TextTokenizer
from tinyformer.data.tokenizer.tokenizer import template
from tinyformer.errors import ArgumentError
from tinyformer.interop.family import Fields, Weights

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

MODULES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"attn_{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
"""The names of modules in `transformers`, without those of layers, by their names in a GGUF file."""

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PRE_TOKENIZERS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "qwen2": [GPT4 % ""],
    "llama-bpe": [GPT4 % "{1,3}"],
}
"""The regular expressions that split a text one after the other, by the name of the pre-tokenizer."""

CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are found in a text before it is split: special ones, such as the end of a text, and others."""


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except ArgumentError:
        raise
    except Exception as error:  # a damaged file can raise anything
        reason = "cannot be read: the file is cut short, damaged, or not a GGUF file"
        raise ArgumentError("source", str(path), reason) from error


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file; an `ArgumentError` is raised if it cannot be read or its architecture is not supported."""

    path: Path

    @cached_property
    def _reader(self) -> Any:
        try:
            import gguf  # noqa: PLC0415
        except ImportError as error:
            reason = "needs the package gguf: pip install 'tinyformer[gguf]'"
            raise ArgumentError("source", str(self.path), reason) from error
        with _reading(self.path):
            return gguf.GGUFReader(self.path)

    def _value(self, key: str) -> Any:
        """The value of a key; None if the file lacks it."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    @cached_property
    def fields(self) -> Fields:
        """The metadata as the fields of a `config.json`."""
        reader = self._reader
        with _reading(self.path):
            tensors, kind = {tensor.name: tensor for tensor in reader.tensors}, self._value("general.architecture")
            if kind not in ARCHITECTURES:
                reason = f"its general.architecture is {str(kind)[:100]}; {', '.join(ARCHITECTURES)} are supported"
                raise ArgumentError("source", str(self.path), reason)
            fields = {theirs: self._value(f"{kind}.{key}") for key, theirs in FIELDS.items()}
            scaling, rotated = (self._value(f"{kind}.rope.{key}") for key in ("scaling.type", "dimension_count"))
            if scaling not in (None, "none", "linear"):
                reason = f"its {kind}.rope.scaling.type is {str(scaling)[:100]}; none and linear are supported"
                raise ArgumentError("source", str(self.path), reason)
            if scaling == "linear":
                fields["rope_scaling"] = {"rope_type": scaling, "factor": self._value(f"{kind}.rope.scaling.factor")}
            fields["head_dim"] = fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"]
            if rotated is not None:
                fields["partial_rotary_factor"] = rotated / fields["head_dim"]
            if kind != "qwen2":  # whose queries, keys and values always have biases
                fields["attention_bias"] = "blk.0.attn_q.bias" in tensors
            return {name: value for name, value in fields.items() if value is not None} | {
                "model_type": kind,
                "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
                "rope_theta": fields["rope_theta"] or 10_000.0,
                "num_key_value_heads": fields["num_key_value_heads"] or fields["num_attention_heads"],
                "tie_word_embeddings": "output.weight" not in tensors,
                "mlp_bias": "blk.0.ffn_up.bias" in tensors,
                "eos_token_id": self._value("tokenizer.ggml.eos_token_id"),
            }

    def read_tensors(self) -> Weights:
        """All tensors, dequantised to fp32, under their names in `transformers` without "model."."""
        import gguf  # noqa: PLC0415

        heads = {"q": self.fields["num_attention_heads"], "k": self.fields["num_key_value_heads"]}
        weights: Weights = {}
        for tensor in self._reader.tensors:
            parts, name = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", tensor.name), tensor.name
            if parts and parts[2] in MODULES:
                name = f"{f'layers.{parts[1]}.' if parts[1] else ''}{MODULES[parts[2]]}.{parts[3]}"
            with _reading(self.path):
                try:
                    weight = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).float()
                except NotImplementedError as error:
                    reason = f"{name} is of type {tensor.tensor_type.name}, which the package gguf cannot dequantise"
                    raise ArgumentError("source", str(self.path), reason) from error
                if self.fields["model_type"] == "llama" and parts and parts[2] in ("attn_q", "attn_k"):
                    # The two rows of a head that are rotated together are neighbours; in `transformers`, half a head
                    # is between them.
                    weight = weight.unflatten(0, (heads[parts[2][-1]], -1, 2)).transpose(1, 2).flatten(0, 2)
            weights[name] = weight
        return weights

    def read_tokenizer(self) -> TextTokenizer | None:
        """The tokenizer; None if it is not byte-level BPE, or if its pre-tokenizer is not in `PRE_TOKENIZERS`."""
        with _reading(self.path):
            kind, pre = self._value("tokenizer.ggml.model"), self._value("tokenizer.ggml.pre")
            if kind != "gpt2" or pre not in PRE_TOKENIZERS:
                return None
            tokens, types = self._value("tokenizer.ggml.tokens"), self._value("tokenizer.ggml.token_type")
            merges = [tuple(merge.split(" ", 1)) for merge in self._value("tokenizer.ggml.merges")]
            vocabulary = {token: i for i, token in enumerate(tokens)}
            is_llama = pre == "llama-bpe"  # in whose own files a word that is a token is not split
            tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=is_llama))
            tokenizer.normalizer = normalizers.NFC() if pre == "qwen2" else None
            splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
            to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.pre_tokenizer, tokenizer.decoder = (
                pre_tokenizers.Sequence([*splits, to_bytes]),
                decoders.ByteLevel(),
            )
            for token, kind in zip(tokens, types, strict=True):
                if kind in (CONTROL, USER_DEFINED):
                    tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
            begins, end = self._value("tokenizer.ggml.add_bos_token"), self.fields["eos_token_id"]
            if is_llama if begins is None else begins:
                tokenizer.post_processor = template(tokenizer, [self._value("tokenizer.ggml.bos_token_id")], [])
            return TextTokenizer(tokenizer, tokens[end], True, [end])
