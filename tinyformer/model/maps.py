"""The attention maps of the texts of a batch, from a model's forward pass."""

from collections.abc import Iterable
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor

from tinyformer.analysis import CapturedMaps, capture_pair, capture_weights, pairs_of
from tinyformer.batch import Batch
from tinyformer.data import TextTokenizer
from tinyformer.model.layer_maps import LayerMaps
from tinyformer.model.text_maps import TextMaps, TokenAxis
from tinyformer.nn import EncoderDecoder, Network, Transformer
from tinyformer.nn.network import attentions_in
from tinyformer.tasks import Task


@torch.no_grad()
def maps_of_batch(
    network: Network, task: Task, tokenizer: TextTokenizer | None, batch: Batch, model: str = ""
) -> list[TextMaps]:
    """The attention maps of each row of a batch, in evaluation mode; without a tokenizer, a token is shown by its id.

    Those of a source and its target are of each kind of attention. `model` is what the model is called in titles.
    """

    def axis(ids: Int[Tensor, "1 seq"]) -> TokenAxis:
        return TokenAxis.of(ids[0].tolist(), tokenizer)

    found = []
    if isinstance(network, EncoderDecoder):
        for pair in pairs_of(batch):
            source, target, predicted = map(axis, pair)
            axes = {"encoder": (source, source), "decoder": (target, target), "cross": (predicted, source)}
            found.append(TextMaps(_layers(network, capture_pair(network, pair).values()), axes, tokenizer, model))
        return found
    for row, length in zip(batch["inputs"].split(1), batch["lengths"].tolist(), strict=True):
        inputs = row[:, :length]
        captured = capture_weights(cast(Transformer, network), inputs, task.mask({"inputs": inputs}))
        found.append(TextMaps(_layers(network, [captured]), {"": (axis(inputs),) * 2}, tokenizer, model))
    return found


def _layers(network: Network, captured: Iterable[CapturedMaps]) -> list[LayerMaps]:
    """The maps of each of a network's `attentions`."""
    maps = [layer for of_kind in captured for layer in of_kind.layers]
    places = zip(network.attentions(), network.layer_addresses(), maps, strict=True)
    residuals = {part: residual for module, residual in network.attention_sublayers() for part in attentions_in(module)}
    return [LayerMaps.of(layer, address, found, residuals[layer]) for layer, address, found in places]
