"""Text from a model, one token at a time."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.nn import AttentionMask, Transformer


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the model's scores.

    Args:
        temperature: the scores are divided by it; 0 takes the likeliest token.
        top_k: draw among the k likeliest tokens only (Fan et al. 2018, arXiv 1805.04833).
        top_p: draw among the fewest tokens that together have this probability (Holtzman et al. 2019, arXiv
            1904.09751).

    Raises:
        ValueError: a value is out of its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"generate.temperature={self.temperature} is negative; 0 takes the likeliest token.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"generate.top_k={self.top_k}: at least one token is left to draw, generate.top_k=1.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"generate.top_p={self.top_p} is no share above 0 and up to 1; generate.top_p=0.9 is.")

    def draw(
        self, logits: Float[Tensor, "batch vocab_size"], generator: torch.Generator | None = None
    ) -> Int[Tensor, " batch"]:
        """One token for each row."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        probabilities = logits.softmax(dim=-1)
        if self.top_p is not None:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            # A token stays while those before it have not yet reached top_p, so the likeliest always does.
            beyond = ordered.cumsum(dim=-1) - ordered >= self.top_p
            probabilities = probabilities.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


@torch.no_grad()
def generate(
    network: Transformer,
    prompt: Int[Tensor, "batch prompt_seq"],
    num_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> Int[Tensor, "batch new_seq"]:
    """Go on from a prompt; the model sees the last `max_seq_len` tokens.

    Args:
        network: the model.
        prompt: at least one token.
        num_tokens: how many are drawn.
        sampling: how they are drawn.
        seed: the same seed draws the same tokens.

    Returns:
        The new tokens, without the prompt.
    """
    sampling = sampling or Sampling()
    was_training = network.training
    network.eval()
    device = next(network.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = prompt.to(device)
    for _ in range(num_tokens):
        logits = network(tokens[:, -network.encoder.max_seq_len :], AttentionMask(causal=True))
        tokens = torch.cat([tokens, sampling.draw(logits[:, -1], generator).unsqueeze(-1)], dim=1)
    network.train(was_training)
    return tokens[:, prompt.shape[1] :]
