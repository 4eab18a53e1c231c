"""The attention maps of token sequences, from a model's forward pass."""

from collections.abc import Iterable

import torch
from jaxtyping import Int
from torch import Tensor

from tinyformer.analysis import CapturedMaps, TokenPair, capture_pair, capture_weights
from tinyformer.data import TextTokenizer
from tinyformer.inspection.layer_maps import LayerMaps
from tinyformer.inspection.text_maps import TextMaps, TokenAxis
from tinyformer.nn import EncoderDecoder, Network, Transformer
from tinyformer.nn.network import attentions_in
from tinyformer.tasks import Task


@torch.no_grad()
def maps_of_tokens(
    network: Transformer, task: Task, tokenizer: TextTokenizer | None, tokens: Int[Tensor, " seq"], model: str = ""
) -> TextMaps:
    """The attention maps of a token sequence, in evaluation mode; without a tokenizer, a token is shown by its id."""
    inputs = tokens.unsqueeze(0)
    captured = capture_weights(network, inputs, task.mask({"inputs": inputs}))
    axis = TokenAxis.of(tokens.tolist(), tokenizer)
    return TextMaps(_layers(network, [captured]), {"": (axis, axis)}, tokenizer, model)


@torch.no_grad()
def maps_of_pair(
    network: EncoderDecoder, tokenizer: TextTokenizer | None, pair: TokenPair, model: str = ""
) -> TextMaps:
    """The attention maps of a source and its target, of each kind of attention; see `maps_of_tokens`."""
    source, target, predicted = (TokenAxis.of(ids[0].tolist(), tokenizer) for ids in pair)
    axes = {"encoder": (source, source), "decoder": (target, target), "cross": (predicted, source)}
    return TextMaps(_layers(network, capture_pair(network, pair).values()), axes, tokenizer, model)


def _layers(network: Network, captured: Iterable[CapturedMaps]) -> list[LayerMaps]:
    """The maps of each of a network's `attentions`."""
    maps = [layer for of_kind in captured for layer in of_kind.layers]
    places = zip(network.attentions(), network.layer_addresses(), maps, strict=True)
    residuals = {part: residual for module, residual in network.attention_sublayers() for part in attentions_in(module)}
    return [LayerMaps.of(layer, address, found, residuals[layer]) for layer, address, found in places]
