"""A network whose answers are known."""

import torch

from tinyformer.nn import vocabulary_cross_entropy


class Fixed(torch.nn.Module):
    """Gives the same logits for every batch, and remembers what it was last asked."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, *asked, targets=None, label_smoothing=0.0):
        self.asked = asked
        if targets is None:
            return self.logits
        identity = torch.eye(self.logits.shape[-1])
        return vocabulary_cross_entropy(self.logits, identity, targets, label_smoothing=label_smoothing)
