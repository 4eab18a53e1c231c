"""Greedy generation with a KV cache, by tinyformer and by `transformers`, in turn.

`python benchmarks/run.py --bench generation` measures it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from here import our_network
from measure import alternate
from peers import Peer, Shape

from tinyformer.generation.sampling import Sampling, generate

PROMPT_TOKENS, VOCAB_SIZE = 16, 65
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The dtype of all weights, by its name in the table."""


def sides(peer: Peer, shape: Shape, new_tokens: int, dtype: torch.dtype, device: str) -> dict[str, Callable[[], Any]]:
    """Our and the peer's functions that continue one prompt; both have the same weights, and return all new tokens.

    Args:
        peer: the peer to compare with.
        shape: the shape of the models; their context is as long as the text.
        new_tokens: number of tokens to generate.
        dtype: the dtype of the weights.
        device: the device type.
    """
    shape = replace(shape, seq_len=PROMPT_TOKENS + new_tokens)
    network = our_network([*peer.like, *shape.overrides], VOCAB_SIZE)
    model = peer.build(shape, network).to(device, dtype).eval()
    network.to(device, dtype)
    prompt = torch.arange(PROMPT_TOKENS, device=device).unsqueeze(0)

    def ours() -> list[int]:
        return generate(network, prompt, new_tokens, Sampling(temperature=0))[0]

    def theirs() -> list[int]:
        options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0, "use_cache": True}
        everything = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        return everything[0, PROMPT_TOKENS:].tolist()

    return {"ours": ours, "theirs": theirs}


def generate_in_turn(
    peers: Sequence[Peer], shape: Shape, new_tokens: int, rounds: int, dtype: torch.dtype, device: str
) -> dict[str, dict[str, list[float]]]:
    """The seconds that each side takes for `new_tokens` tokens, by peer; see `sides`."""
    return {
        peer.name: alternate(sides(peer, shape, new_tokens, dtype, device), rounds) for peer in peers if peer.generates
    }
