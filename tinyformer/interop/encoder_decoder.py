"""What T5, BART and Marian have in common: special tokens, and one embedding for both stacks."""

from collections.abc import Mapping
from typing import Any

import torch

from tinyformer.errors import ArgumentError
from tinyformer.interop.family import Field, Fields, Weights

GROUPS = {"network": "encoder_decoder", "attention": "mha", "cross_attention": "mha", "task": "seq2seq"}

SHARED, OUTPUT = "shared.weight", "lm_head.weight"
OF_STACKS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""Names of the embedding: shared by both stacks, in the output layer, and in each stack."""

SUPPRESSED = "suppress_tokens"


def token_fields(**defaults: Any) -> tuple[Field, ...]:
    """The fields of special tokens, with their defaults in `transformers`."""
    names = {"eos_token_id": "eos", "decoder_start_token_id": "decoder_start", "forced_bos_token_id": "forced_bos"}
    ids = (
        Field(theirs, f"model.special_tokens.{ours}", int, defaults.get(theirs), nullable=True)
        for theirs, ours in names.items()
    )
    return (*ids, Field(SUPPRESSED, "model.special_tokens.suppressed", list, None, nullable=True))


def read_tokens(fields: Fields) -> Fields:
    """Add the tokens of `bad_words_ids` to the other field of tokens that are never generated, `suppress_tokens`.

    Raises:
        ArgumentError: a field is malformed, or `bad_words_ids` has a sequence of several tokens.
    """
    words, others = fields.get("bad_words_ids") or [], fields.get(SUPPRESSED) or []
    if not isinstance(words, list) or not all(isinstance(word, list) and len(word) == 1 for word in words):
        reason = "is supported for words of one token only, such as [[0],[5]]"
        raise ArgumentError("fields.bad_words_ids", words, reason)
    if not words or not isinstance(others, list):  # a malformed field is refused where it is read
        return fields
    return fields | {SUPPRESSED: others + [word[0] for word in words if word[0] not in others]}


def special_ids(tokens: Mapping[str, Any], eos: int | None) -> tuple[Fields, Fields]:
    """The fields of special tokens for `config.json`, and those for `generation_config.json`.

    Args:
        tokens: the arguments of `SpecialTokens`.
        eos: the end-of-text id of the tokenizer, if there is one.
    """
    eos = eos if tokens["eos"] is None else tokens["eos"]
    start = eos if tokens["decoder_start"] is None else tokens["decoder_start"]
    ids = {"bos_token_id": tokens["bos"], "eos_token_id": eos, "pad_token_id": start, "decoder_start_token_id": start}
    decoding = {"forced_bos_token_id": tokens["forced_bos"], SUPPRESSED: tokens["suppressed"] or None}
    # BART's default is 2; null stands for none, as in our models.
    unforced = {"forced_eos_token_id": None}
    return unforced | ids, {name: value for name, value in (ids | decoding).items() if value is not None}


def spread_embedding(weights: Weights) -> Weights:
    """Give each stack the embedding that both share, whichever of its names it was saved under."""
    known = next((weights[name] for name in (SHARED, *OF_STACKS, OUTPUT) if name in weights), None)
    if known is None:
        return weights
    spread = dict.fromkeys(OF_STACKS, known) | weights
    if all(spread[name].shape == known.shape and torch.equal(spread[name], known) for name in OF_STACKS):
        spread.pop(SHARED, None)
    return spread


def join_embedding(weights: Weights) -> Weights:
    """Store the embedding of both stacks once, as `SHARED`."""
    others = {name: tensor for name, tensor in weights.items() if name not in OF_STACKS}
    return others | {SHARED: weights[OF_STACKS[0]]}
