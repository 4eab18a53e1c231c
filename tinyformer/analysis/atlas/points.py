"""A uniform sample of queries, whose vectors in every head of a kind of attention are projected to a plane."""

import base64

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tinyformer.analysis.atlas.places import STRETCH, Places
from tinyformer.analysis.atlas.reservoirs import Entries, Smallest, priorities

NUM_POINTS = 200  # queries of a kind of attention
VECTORS = ("queries", "keys", "outputs")


class Points:
    """The sample: the same queries for all heads, with the vectors of the query, of its key and of its output.

    The key is that of the query's own token; in cross-attention, the strongest key, see `LayerEvents`.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self._kept = seed, Smallest(1, NUM_POINTS, device)

    def candidates(self, places: Places) -> tuple[Entries, tuple[Tensor, Tensor]]:
        """The queries of a batch that may be kept, and their rows in the batch and positions."""
        positions = torch.arange(places.is_query.shape[1], device=places.is_query.device)
        scores = priorities(self.seed, places.rows.unsqueeze(1), positions).double()
        scores = scores.masked_fill(~places.is_query, torch.inf)
        lowest = scores.flatten().topk(min(NUM_POINTS, scores.numel()), largest=False).values[-1]
        of, position = ((scores <= lowest) & (scores < self._kept.limits)).nonzero(as_tuple=True)
        stretch, _ = places.stretches(of, position, position)
        shown = (stretch[:, :1] + torch.arange(STRETCH, device=of.device)).clamp(max=scores.shape[1] - 1)
        tokens = places.queries.tokens[of.unsqueeze(1), shown]
        entries = {"group": torch.zeros_like(of), "score": scores[of, position], "row": places.rows[of], "at": position}
        entries["document"] = torch.full_like(of, -1) if places.documents is None else places.documents[of, position]
        return entries | {"of_queries": stretch, "query_tokens": tokens}, (of, position)

    def offer(self, entries: Entries) -> None:
        self._kept.offer(entries)

    def entries(self) -> Entries:
        return self._kept.merge()


def projected(vectors: Float[Tensor, "points dims"]) -> tuple[str, list[float]]:
    """The first two principal components of some vectors, and the share of the variance that each explains.

    The coordinates x, y, x, y, … are whole numbers of 16 bits in base64, of which the largest is 32767.
    """
    centred = (vectors - vectors.mean(dim=0)).double()
    left, sizes, _ = torch.linalg.svd(centred, full_matrices=False)
    coordinates = F.pad(left * sizes, (0, 2))[:, :2]
    signs = coordinates.gather(0, coordinates.abs().argmax(dim=0, keepdim=True)).sign()  # the same on any machine
    coordinates = coordinates * signs / coordinates.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    shares = F.pad(sizes.square(), (0, 2))[:2] / sizes.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    return base64.b64encode((coordinates * 32767).round().cpu().numpy().astype("<i2").tobytes()).decode(), shares.tolist()
