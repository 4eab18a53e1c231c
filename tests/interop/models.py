"""Small random models, theirs and ours, on disk."""

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tinyformer.checkpoint.file import Checkpoint, load_checkpoint, load_weights, save_network
from tinyformer.config.admission import admit_config, describe_config
from tinyformer.config.launch import compose_sweep
from tinyformer.data import TextTokenizer
from tinyformer.nn import AttentionMask
from tinyformer.programs.convert.conversion import export_model
from tinyformer.run.importing import import_model

VOCAB, SEQ = 97, 19

GPT2: dict[str, Any] = {"n_embd": 42, "n_head": 7, "n_layer": 2, "n_inner": 50, "n_positions": SEQ + 2}
BERT: dict[str, Any] = {
    **{"hidden_size": 42, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 7},
    "max_position_embeddings": SEQ + 2,
}
ROTARY = {"rope_type": "default", "rope_theta": 700.0}
LLAMA: dict[str, Any] = BERT | {
    **{"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10},
    **{"rms_norm_eps": 1e-3, "rope_parameters": ROTARY},
}
NEOX: dict[str, Any] = BERT | {"rope_parameters": ROTARY | {"partial_rotary_factor": 2 / 3}}
WITHOUT_PARALLEL = {"rope_parameters": ROTARY | {"partial_rotary_factor": 1.0}, "use_parallel_residual": False}
PLAIN: dict[str, Any] = {**LLAMA, "hidden_size": 40, "num_attention_heads": 4, "num_hidden_layers": 4}
del PLAIN["head_dim"]
GEMMA: dict[str, Any] = PLAIN | {"head_dim": 14, "sliding_window": 5, "query_pre_attn_scalar": 7}
SHORT = {"original_max_position_embeddings": 8, "factor": 4.0}
LLAMA3 = ROTARY | SHORT | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN, LINEAR = ROTARY | SHORT | {"rope_type": "yarn"}, ROTARY | {"rope_type": "linear", "factor": 8.0}
LOCAL = {"rope_type": "default", "rope_theta": 90.0}
MODERNBERT: dict[str, Any] = BERT | {
    **{"num_attention_heads": 3, "num_hidden_layers": 5, "local_attention": 6},
    "rope_parameters": {"full_attention": ROTARY, "sliding_attention": LOCAL},
}
ALL_BIASES = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
T5: dict[str, Any] = {
    **{"d_model": 42, "d_kv": 10, "d_ff": 50, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 3},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 11, "layer_norm_epsilon": 1e-3},
    **{"n_positions": SEQ + 2, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
}
BART: dict[str, Any] = {
    "d_model": 42,
    "encoder_layers": 2,
    "decoder_layers": 3,
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 7),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 50),
    "max_position_embeddings": SEQ + 2,
    **{"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2},
    **{"decoder_start_token_id": 2, "forced_bos_token_id": 0},
}
MARIAN: dict[str, Any] = BART | {
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), VOCAB - 1),
    **{"scale_embedding": True, "bad_words_ids": [[VOCAB - 1]], "eos_token_id": 0},
    **dict.fromkeys(("bos_token_id", "forced_bos_token_id")),
}
CLASSES = {
    "GPT2": "GPT2LMHeadModel",
    "GPTNeoX": "GPTNeoXForCausalLM",
    "Llama": "LlamaForCausalLM",
    "Mistral": "MistralForCausalLM",
    **{
        name: f"{name}ForCausalLM" for name in ("GPTNeo", "GPTJ", "OPT", "Phi", "Qwen2", "Qwen3", "SmolLM3", "NanoChat")
    },
    **{name: f"{name}ForCausalLM" for name in ("Olmo2", "Olmo3", "Gemma2", "Phi3")},
    "Gemma3Text": "Gemma3ForCausalLM",
    **{name: f"{name}ForMaskedLM" for name in ("Bert", "Roberta", "XLMRoberta", "DistilBert", "ModernBert")},
    "T5": "T5ForConditionalGeneration",
    "Bart": "BartForConditionalGeneration",
    "Marian": "MarianMTModel",
}


def randomise(model: nn.Module) -> None:
    """Weights of which none is 0 or 1, where a mistake could hide."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.5 * torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) / math.sqrt(min(weight.shape[-2:])))


@functools.cache
def transformers() -> Any:
    """The library, which takes seconds to import, without its messages."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def theirs(family: str, architecture: str | None = None, **fields: Any) -> Any:
    library = transformers()
    special = dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"])
    decoding = {name: fields.pop(name) for name in ("forced_bos_token_id", "bad_words_ids") if name in fields}
    config = getattr(library, f"{family}Config")(**{"vocab_size": VOCAB, **special, **fields})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(library, architecture or CLASSES[family])(config)
        randomise(model)
        for name, bias in model.named_buffers():
            if name == "final_logits_bias":
                bias.normal_()
        if family == "T5":  # which scales no scores: its initial queries are as small as scaled scores need
            for name, weight in model.named_parameters():
                if name.endswith(".q.weight"):
                    weight.data /= math.sqrt(config.d_kv)
        if family == "T5" and fields.get("tie_word_embeddings") is False:
            # As in files of version 1.1, and unlike a model that the library makes of their config.
            model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight) / 6)
        for name, value in decoding.items():  # which newer versions keep apart
            setattr(model.generation_config, name, value)
        if family == "Marian":  # whose positions are not trained, and not saved
            with torch.no_grad():
                for stack in (model.model.encoder, model.model.decoder):
                    stack.embed_positions.weight.copy_(stack.embed_positions.create_weight())
    return model.eval()


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied": ("GPT2", GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": None}),
    "gpt2-eps-and-score": ("GPT2", GPT2 | {"layer_norm_epsilon": 0.1, "scale_attn_weights": False}),
    "gpt-neo": (
        "GPTNeo",
        {"hidden_size": 42, "num_heads": 7, "num_layers": 3, "intermediate_size": 50, "window_size": 5}
        | {"max_position_embeddings": SEQ + 2, "attention_types": [[["global", "local"], 1], [["local"], 1]]},
    ),
    "gpt-j": ("GPTJ", GPT2 | {"n_embd": 48, "n_head": 4, "rotary_dim": 8}),
    "neox": ("GPTNeoX", NEOX),
    "neox-tied": ("GPTNeoX", NEOX | {"tie_word_embeddings": True, "attention_bias": False, "hidden_act": "gelu_new"}),
    "neox-sequential": ("GPTNeoX", NEOX | WITHOUT_PARALLEL),
    "opt": (
        "OPT",
        {"hidden_size": 42, "ffn_dim": 50, "num_hidden_layers": 2, "num_attention_heads": 7}
        | {"max_position_embeddings": SEQ + 2, "pad_token_id": 1},
    ),
    "phi": ("Phi", PLAIN | {"rope_parameters": ROTARY | {"partial_rotary_factor": 0.4}, "layer_norm_eps": 0.1}),
    "llama": ("Llama", LLAMA),
    "llama-biases": ("Llama", LLAMA | {"attention_bias": True, "num_key_value_heads": 1, "mlp_bias": True}),
    "llama-3": ("Llama", LLAMA | {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", LLAMA | {"rope_parameters": YARN}),
    "llama-linear": ("Llama", LLAMA | {"rope_parameters": LINEAR}),
    "qwen-2": ("Qwen2", PLAIN | {"tie_word_embeddings": True}),
    "qwen-2-windows": ("Qwen2", PLAIN | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen-3": ("Qwen3", LLAMA | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "smollm3": ("SmolLM3", PLAIN),
    "smollm3-windows": (
        "SmolLM3",
        PLAIN | {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [1, 0, 0, 1]},
    ),
    "olmo-2": ("Olmo2", PLAIN),
    "olmo-3": (
        "Olmo3",
        PLAIN | {"sliding_window": 5, "rope_parameters": {"full_attention": YARN, "sliding_attention": ROTARY}},
    ),
    "gemma-2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma-3": (
        "Gemma3Text",
        GEMMA | {"num_hidden_layers": 7, "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}},
    ),
    "phi-3": (
        "Phi3",
        PLAIN | {"sliding_window": 5, "rope_parameters": ROTARY | {"partial_rotary_factor": 0.6}},
    ),
    "nanochat": ("NanoChat", PLAIN),
    "mistral": ("Mistral", LLAMA | {"sliding_window": 5}),
    "mistral-without-window": ("Mistral", LLAMA | {"sliding_window": None, "tie_word_embeddings": True}),
    "bert": ("Bert", BERT),
    "bert-untied": ("Bert", BERT | {"tie_word_embeddings": False, "hidden_act": "gelu_new", "layer_norm_eps": 0.1}),
    "roberta": ("Roberta", BERT | {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", BERT | {"pad_token_id": 1, "tie_word_embeddings": False}),
    "distilbert": (
        "DistilBert",
        {"dim": 42, "n_heads": 7, "n_layers": 2, "hidden_dim": 50, "max_position_embeddings": SEQ + 2},
    ),
    "modernbert": ("ModernBert", MODERNBERT),
    "modernbert-biases": ("ModernBert", MODERNBERT | ALL_BIASES | {"classifier_activation": "silu"}),
    "t5": ("T5", T5),
    "t5-v1.1": ("T5", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5-of-other-activations": ("T5", T5 | {"feed_forward_proj": "gelu_new", "num_decoder_layers": 3}),
    "t5-gated-by-silu": ("T5", T5 | {"feed_forward_proj": "gated-silu"}),
    "bart": ("Bart", BART),
    "bart-of-one-head": ("Bart", BART | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 1)),
    "marian": ("Marian", MARIAN | {"activation_function": "swish"}),
}


@functools.cache
def model_of(variant: str) -> Any:
    family, fields = VARIANTS[variant]
    return theirs(family, **fields, attn_implementation="eager")


def saved(variant: str, folder: Path) -> Path:
    model_of(variant).save_pretrained(folder)
    # The library forgets it, since nothing in T5 depends on it; the files of t5-small have it.
    change_config(folder, **({"n_positions": SEQ + 2} if VARIANTS[variant][0] == "T5" else {}))
    return folder


def change_config(folder: Path, without: Sequence[str] = (), **fields: Any) -> None:
    """Write other fields into a folder's config.json."""
    path = folder / "config.json"
    config = {name: value for name, value in json.loads(path.read_text()).items() if name not in without}
    path.write_text(json.dumps(config | fields))


def change_weights(folder: Path, **changed: Tensor | None) -> None:
    file = folder / "model.safetensors"
    weights = {name: weight for name, weight in (load_file(file) | changed).items() if weight is not None}
    save_file({name: weight.contiguous() for name, weight in weights.items()}, file, metadata={"format": "pt"})


def checkpoint_of(source: Path | str, path: Path) -> Checkpoint:
    """The checkpoint that a folder becomes."""
    import_model(str(source), path)
    return load_checkpoint(path)


def network_of(checkpoint: Checkpoint) -> Any:
    """The network of a checkpoint, its vocabulary as large as its embedding."""
    config = OmegaConf.create(admit_config(checkpoint))
    config.model.vocab_size = len(checkpoint.weights["encoder.token_embedding.weight"])
    network = instantiate(config.network, _convert_="all")
    load_weights(network, checkpoint)
    return network.eval()


def tokens(vocab_size: int = VOCAB) -> Tensor:
    # 1 is the padding of RoBERTa, from which it counts positions.
    return torch.randint(2, vocab_size, (2, SEQ), generator=torch.Generator().manual_seed(1))


def our_logits(checkpoint: Checkpoint, ids: Tensor) -> Tensor:
    """Of the network, under the mask of its task."""
    task = instantiate(OmegaConf.create(admit_config(checkpoint)["task"]["objective"]))
    mask: AttentionMask = task.mask({"inputs": ids})
    with torch.no_grad():
        return network_of(checkpoint)(ids, mask)


def their_logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


@functools.cache
def choose(*choices: str) -> DictConfig:
    """The config of a small network with some choices of groups."""
    small = ["model.num_layers=2", "model.num_heads=6", "model.d_model=48", f"model.max_seq_len={SEQ + 2}"]
    (_, config), *_ = compose_sweep("train", [*small, *choices])
    return config


def our_checkpoint(path: Path, *overrides: str, tokenizer: TextTokenizer | None = None) -> Checkpoint:
    """A checkpoint of a random network, with a config as `train.py` composes it."""
    # Composing takes time, changing keys does not.
    keys = [override for override in overrides if "." in override.partition("=")[0]]
    choices = [override for override in overrides if override not in keys]
    merged = OmegaConf.merge(choose(*choices), OmegaConf.from_dotlist(keys))
    config: Any = OmegaConf.to_container(merged, resolve=False)
    config.pop("hydra", None)
    sized = OmegaConf.create(config)
    sized.model.vocab_size = tokenizer.vocab_size if tokenizer else VOCAB
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = instantiate(sized.network, _convert_="all")
        randomise(network)
    text = tokenizer.to_json() if tokenizer else None
    stored = describe_config(config, dict(word.split("=", 1) for word in overrides))
    save_network(path, network, Checkpoint(path, {}, stored, text, {"precision": "32-true"}, 0), stored)
    return load_checkpoint(path)


def exported(path: Path, folder: Path) -> Any:
    """The model that `transformers` loads from a checkpoint's export."""
    export_model(path, folder)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, report = getattr(transformers(), architecture).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()
