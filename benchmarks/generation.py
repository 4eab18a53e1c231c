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

from tinyformer.generation.generation import Sampling, generate

PROMPT_TOKENS, VOCAB_SIZE = 16, 65
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The dtype of all weights, by its name in the table."""


def sides(
    peer: Peer, shape: Shape, num_prompts: int, new_tokens: int, dtype: torch.dtype, device: str
) -> dict[str, Callable[[], list[list[int]]]]:
    """Our and the peer's functions that continue prompts; both have the same weights, and return all new tokens.

    Args:
        peer: the peer to compare with.
        shape: the shape of the models; their context is as long as the text.
        num_prompts: number of prompts, which are continued together.
        new_tokens: number of tokens to generate.
        dtype: the dtype of the weights.
        device: the device type.
    """
    shape = replace(shape, seq_len=PROMPT_TOKENS + new_tokens)
    network = our_network([*peer.like, *shape.overrides], VOCAB_SIZE)
    model = peer.build(shape, network).to(device, dtype).eval()
    network.to(device, dtype)
    prompts = torch.arange(PROMPT_TOKENS, device=device) + torch.arange(num_prompts, device=device).unsqueeze(1)

    def ours() -> list[list[int]]:
        return generate(network, prompts, new_tokens, Sampling(temperature=0))

    def theirs() -> list[list[int]]:
        options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0, "use_cache": True}
        everything = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
        return everything[:, PROMPT_TOKENS:].tolist()

    return {"ours": ours, "theirs": theirs}


def generate_in_turn(peers: Sequence[Peer], rounds: int, *workload: Any) -> dict[str, dict[str, list[float]]]:
    """The seconds that each side takes, by peer; see `sides`, whose further arguments `workload` are."""
    return {peer.name: alternate(sides(peer, *workload), rounds) for peer in peers if peer.generates}
