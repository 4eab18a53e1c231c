"""The attention maps of two models side by side, and their difference."""

from functools import cached_property

from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from tinyformer.errors import ArgumentError
from tinyformer.model.drawing import Panel, chart_of_maps
from tinyformer.model.table import Table
from tinyformer.model.text_maps import HeadAddress, TextMaps, require_parts


class MapsDifference:
    """The attention maps of one model minus those of another, for the same tokens; made by `maps - other`.

        difference = after.attention(text) - before.attention(text)
        difference[1, 3]  # queries × keys, of layer 1, head 3
        difference.plot(1, 3)  # both maps, and the difference

    It has the heads that both models have. In a notebook it shows the table of `distances`.

    Args:
        first: the maps of one model.
        second: the maps of the other.

    Raises:
        ArgumentError: the tokens differ, or no head is in both models.
    """

    def __init__(self, first: TextMaps, second: TextMaps) -> None:
        if first.tokens != second.tokens:
            reason = "must be the tokens of the maps from which these are subtracted"
            raise ArgumentError("maps.tokens", second.tokens, reason)
        self.first, self.second = first, second
        if not self.heads:
            raise ArgumentError("maps.heads", second.heads, "must have a head that the other model has, too")

    @cached_property
    def heads(self) -> list[HeadAddress]:
        """The address of each head that both models have."""
        known = set(self.second.heads)
        return [address for address in self.first.heads if address in known]

    def __getitem__(self, address: HeadAddress) -> Float[Tensor, "queries keys"]:
        """The map of a head in the first model minus that in the second.

        Raises:
            ArgumentError: one of the models has no such head.
        """
        return self.first[address] - self.second[address]

    def distances(self) -> Table:
        """How far the two maps of each head are apart: half the sum of |difference| over keys, averaged over queries.

        This is the total variation distance: 0 for equal maps, 1 for maps that have no key in common.
        """
        rows = []
        for address in self.heads:
            *layer, head = address
            names = {"layer": layer[-1]} if len(layer) == 1 else {"kind": layer[0], "layer": layer[-1]}
            rows.append({**names, "head": head, "distance": float(self[address].abs().sum(dim=-1).mean() / 2)})
        return Table(rows, {"distance": "total variation distance, mean over queries"})

    def plot(self, *address: int | str) -> Figure:
        """The maps of a head in both models, and their difference in colours around 0.

        Args:
            address: the address of the head, as in `plot(1, 3)` or `plot("cross", 1, 3)`.

        Raises:
            ArgumentError: one of the models has no such head.
        """
        require_parts("head", "plot", address)
        panels = [maps.panel_of(address) for maps in (self.first, self.second)]
        queries, keys = self.first.axes[self.first.layer_of(address).kind]
        panels.append(Panel(self[address], "first minus second", signed=True, label="Difference of attention weights"))
        return chart_of_maps(panels, queries.tokens, keys.tokens)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.first!r}, {self.second!r})"

    def _repr_html_(self) -> str:
        return self.distances()._repr_html_()
