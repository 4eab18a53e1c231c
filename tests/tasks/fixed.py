"""A network whose answers are known."""

import torch

from tinyformer.nn import vocabulary_cross_entropy


class Fixed(torch.nn.Module):
    """Gives the same logits for every batch, and remembers its last inputs."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, tokens, mask, targets=None):
        self.asked = tokens, mask
        if targets is None:
            return self.logits
        return vocabulary_cross_entropy(self.logits, torch.eye(self.logits.shape[-1]), targets)
