"""T5, BART and Marian: the same states, logits, attention maps and decoded targets, or a refusal in a sentence."""

import copy
import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tinyformer
from interop.models import (
    SEQ,
    VOCAB,
    change_config,
    change_weights,
    checkpoint_of,
    exported,
    model_of,
    network_of,
    saved,
    tokens,
    transformers,
)
from tinyformer.measures import capture_attention
from tinyformer.model.model import Model
from tinyformer.nn import AttentionMask, EncoderDecoder
from tinyformer.programs.convert.conversion import export_model

slow = pytest.mark.slow

FAST = ("t5", "t5-v1.1", "bart", "marian")
SLOW = ("t5-of-other-activations", "t5-gated-by-silu", "bart-of-one-head")
LENGTHS = torch.tensor([SEQ, 11])
TARGET = tokens().flip(0)[:, :13]


def is_real() -> Tensor:
    return torch.arange(SEQ) < LENGTHS[:, None]


def error(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).detach().abs().max())


def require_the_same(model: Any, network: EncoderDecoder) -> None:
    """States of both stacks, logits, and maps of every head."""
    given = {"input_ids": tokens(), "attention_mask": is_real().long(), "decoder_input_ids": TARGET}
    expected = model(**given, output_attentions=True, output_hidden_states=True)
    context = network.encode(tokens(), AttentionMask(lengths=LENGTHS))
    with capture_attention(network) as maps:
        logits = network(tokens(), TARGET, AttentionMask(lengths=LENGTHS))
    states = network.decoder(TARGET, AttentionMask(causal=True), context=context)
    assert float(expected.logits.detach().std()) > 0.1
    assert error(logits, expected.logits) <= 1e-5
    assert error(states, expected.decoder_hidden_states[-1]) <= 1e-5
    assert error(context.vectors[is_real()], expected.encoder_last_hidden_state[is_real()]) <= 1e-5

    of_theirs = (*expected.encoder_attentions, *expected.decoder_attentions, *expected.cross_attentions)
    real = is_real()[:, None, :, None]  # queries: those of padding are not compared
    for name, ours, other in zip(network.layer_names(), maps, of_theirs, strict=True):
        difference = (ours - other).detach().abs()
        assert float((difference * real if name.startswith("encoder") else difference).max()) <= 1e-5


@pytest.mark.parametrize("variant", [*FAST, *(pytest.param(variant, marks=slow) for variant in SLOW)])
def test_states_logits_and_maps_are_the_same(variant: str, tmp_path: Path) -> None:
    """Also of the import that is exported again."""
    model = model_of(variant)
    require_the_same(model, network_of(checkpoint_of(saved(variant, tmp_path / "model"), tmp_path / "in.ckpt")))
    again = exported(tmp_path / "in.ckpt", tmp_path / "out")
    again.set_attn_implementation("eager")
    given = {"input_ids": tokens(), "decoder_input_ids": TARGET}
    with torch.no_grad():
        assert torch.equal(again(**given).logits, model(**given).logits)
    for name in ("eos_token_id", "decoder_start_token_id", "forced_bos_token_id"):
        assert getattr(again.generation_config, name) == getattr(model.generation_config, name)
    never = [[token] for token in again.generation_config.suppress_tokens or []]
    assert never == (model.generation_config.bad_words_ids or [])


@functools.cache
def decisive(variant: str) -> Any:
    """The model with other weights, so that the next token depends on the last, and not on the position alone."""
    model = copy.deepcopy(model_of(variant))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(3)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias -= model(input_ids=tokens(), decoder_input_ids=tokens()).logits.mean(dim=(0, 1))
            model.final_logits_bias[:, model.config.eos_token_id] -= 5
            for (token,) in model.generation_config.bad_words_ids or []:  # it would be found everywhere
                model.final_logits_bias[:, token] += 9
        else:
            model.shared.weight *= 4
            model.decoder.final_layer_norm.weight.normal_()
    return model


SEARCHES = [
    *(("t5", 3, 0.7), ("bart", 1, 1.0), ("marian", 2, 1.0)),
    *(("t5-v1.1", 1, 1.0), ("bart", 3, 0.7), ("marian", 5, 0.0)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "beams", "length_penalty"), SEARCHES)
def test_greedy_and_beam_search_find_the_same_targets(
    variant: str, beams: int, length_penalty: float, tmp_path: Path
) -> None:
    model, folder = decisive(variant), tmp_path / "model"
    model.save_pretrained(folder)
    checkpoint_of(folder, tmp_path / "in.ckpt")
    ours = tinyformer.load(tmp_path / "in.ckpt")
    assert isinstance(ours, Model)
    special, settings = ours.task.special_tokens, model.generation_config
    assert (special.eos, special.decoder_start) == (settings.eos_token_id, settings.decoder_start_token_id)
    penalty = {} if beams == 1 else {"length_penalty": length_penalty, "early_stopping": False}
    searched = {"num_beams": beams, "max_new_tokens": 9, "do_sample": False, "forced_eos_token_id": None} | penalty
    unended = ours.generate_ids(tokens(), LENGTHS, beams, length_penalty, max_tokens=9)
    found, words = list(unended), sorted({token for target in unended for token in target})
    for end in [*words[:3], *words[-1:]]:  # tokens that end some of the targets
        ours.task.special_tokens = replace(special, eos=end)
        own = ours.generate_ids(tokens(), LENGTHS, beams, length_penalty, max_tokens=9)
        expected = model.generate(tokens(), attention_mask=is_real().long(), eos_token_id=end, **searched)
        for target, theirs in zip(own, expected[:, 1:].tolist(), strict=True):
            cut = theirs[: theirs.index(end)] if end in theirs else theirs
            assert target == (cut[1:] if special.bos is not None and cut[:1] == [special.bos] else cut)
        found += own
    assert len(set(map(len, found))) > 1
    assert len(words) > 1


WORDS = ["the", "cat", "sees", "a", "bird", "and", "mouse", "translate", "to", "Spanish"]
PROMPTS = ["the cat sees a", "mouse to Spanish"]


def t5_tokenizer() -> Any:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0), *((f"▁{word}", -2.0) for word in WORDS)]
    pieces += [(chr(97 + i), -4.0) for i in range(26)]
    return transformers().T5Tokenizer(vocab=pieces, extra_ids=VOCAB - len(pieces))


def bart_tokenizer() -> Any:
    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "Ġ": 4, "<mask>": 5}
    vocab |= {chr(97 + i): 6 + i for i in range(26)} | {"S": 32, "Ġa": 33, "Ġt": 34}
    return transformers().BartTokenizer(vocab=vocab, merges=[("Ġ", "a"), ("Ġ", "t")])


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "tokenizer_of"), [("t5", t5_tokenizer), ("bart", bart_tokenizer)])
def test_a_text_is_answered_with_the_same_text(variant: str, tokenizer_of: Any, tmp_path: Path) -> None:
    model, tokenizer, folder = copy.deepcopy(decisive(variant)), tokenizer_of(), tmp_path / "model"
    if variant == "bart":  # which else finds ids that the tokenizer does not have
        model.final_logits_bias[:, len(tokenizer) :] -= 9
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    change_config(folder, **({"n_positions": 40} if variant == "t5" else {}))
    assert checkpoint_of(folder, tmp_path / "in.ckpt").tokenizer
    export_model(tmp_path / "in.ckpt", tmp_path / "out")
    ours, texts = tinyformer.load(tmp_path / "in.ckpt"), set()
    searched = {"num_beams": 2, "max_length": ours.network.max_seq_len + 1, "early_stopping": False}
    for where in (folder, tmp_path / "out"):
        again = transformers().AutoTokenizer.from_pretrained(where)
        loaded = transformers().AutoModelForSeq2SeqLM.from_pretrained(where)
        for prompt in PROMPTS:
            source = again(prompt, return_tensors="pt")["input_ids"]
            assert source.tolist() == tokenizer(prompt, return_tensors="pt")["input_ids"].tolist()
            target = loaded.generate(source, do_sample=False, forced_eos_token_id=None, **searched)[0]
            (text,) = ours.generate(prompt, beams=2)
            plain = re.sub("<.*?>", "", text)  # the library leaves out special tokens within a text, too
            assert plain == tokenizer.decode(target, skip_special_tokens=True)
            texts.add(plain)
            # Teacher forcing, too, as in fine-tuning.
            labels = again("the bird", return_tensors="pt")["input_ids"]
            inputs = ours.task.special_tokens.around(None).inputs(ours.tokenizer.encode("the bird"))
            loss = ours.network(source, torch.tensor([inputs]), targets=labels)
            torch.testing.assert_close(loss, loaded(input_ids=source, labels=labels).loss, atol=1e-5, rtol=1e-5)
    assert len("".join(texts)) > 9


def test_older_files_of_bart_have_no_output_layer(tmp_path: Path) -> None:
    """As facebook/bart-base: no prefix, no bias of the logits, and the embedding under three names."""
    model, folder = copy.deepcopy(model_of("bart")), tmp_path / "model"
    model.model.save_pretrained(folder)
    embedding = load_file(folder / "model.safetensors")["shared.weight"]
    own = {f"{stack}.embed_tokens.weight": embedding.clone() for stack in ("encoder", "decoder")}
    change_weights(folder, **own, **{"encoder.version": torch.tensor([2.0])})
    (folder / "generation_config.json").unlink(missing_ok=True)
    change_config(folder, architectures=["BartModel"], forced_bos_token_id=0)
    model.final_logits_bias.zero_()
    require_the_same(model, network_of(checkpoint_of(folder, tmp_path / "in.ckpt")))


@pytest.mark.parametrize("variant", ["t5", "t5-v1.1"])
def test_older_files_of_t5(variant: str, tmp_path: Path) -> None:
    """As google-t5/t5-small and google/t5-v1_1-small, which transformers 4 wrote."""
    folder = saved(variant, tmp_path / "model")
    embedding = load_file(folder / "model.safetensors")["shared.weight"]
    table = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    change_weights(folder, **{"decoder.embed_tokens.weight": embedding.clone(), table: torch.zeros(8, 3)})
    newer = ("scale_decoder_outputs", "is_gated_act", "dense_act_fn", "tie_word_embeddings", "is_decoder")
    change_config(folder, without=newer, **({"tie_word_embeddings": False} if variant == "t5-v1.1" else {}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    change_config(folder, pad_token_id=0, decoder_start_token_id=0, eos_token_id=[1])
    require_the_same(model_of(variant), network_of(checkpoint_of(folder, tmp_path / "in.ckpt")))
