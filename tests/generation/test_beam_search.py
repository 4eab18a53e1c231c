"""Beam search alone and in a batch, with and without a cache, and as greedy search; tests/interop compares others."""

import pytest
import torch
from nn.model_cases import make_encoder_decoder
from nn.test_networks import CROSS, LENGTHS, SOURCE
from nn.variants import factory
from torch import Tensor

from tinyformer.data import PairTokens
from tinyformer.errors import ArgumentError
from tinyformer.generation.beam_search import Beam, beam_search
from tinyformer.nn import EncoderDecoder

END = 7
TOKENS = PairTokens(END, END, (END,))


def greedy(network: EncoderDecoder, source: Tensor, num_tokens: int) -> list[int]:
    tokens = [END]
    while len(tokens) <= num_tokens:
        with torch.no_grad():
            token = int(network(source.unsqueeze(0), torch.tensor([tokens]))[0, -1].argmax())
        if token == END:
            break
        tokens.append(token)
    return tokens[1:]


@pytest.mark.parametrize("name", [name for name in CROSS if "+" not in name])
def test_rows_and_caches_do_not_change_a_target(name: str) -> None:
    network = make_encoder_decoder(cross=factory(name), std=0.4)
    both = beam_search(network, SOURCE, LENGTHS, TOKENS, Beam(3), max_tokens=8)
    assert both == beam_search(network, SOURCE, LENGTHS, TOKENS, Beam(3), max_tokens=8, use_cache=False)
    for row, length in enumerate(LENGTHS.tolist()):
        one, own = SOURCE[row : row + 1, :length], LENGTHS[row : row + 1]
        assert beam_search(network, one, own, TOKENS, Beam(3), max_tokens=8) == [both[row]]
        assert beam_search(network, one, own, TOKENS, Beam(1), max_tokens=8) == [greedy(network, one[0], 8)]


def test_the_length_penalty_is_a_power_or_that_of_gnmt() -> None:
    assert [Beam(length_penalty=2.0).norm(length) for length in (1, 3)] == [1.0, 9.0]
    gnmt = Beam(length_penalty=0.6, length_offset=5)  # Wu et al. 2016, equation 14
    assert [gnmt.norm(length) for length in (1, 10)] == pytest.approx([1.0, 15**0.6 / 6**0.6])


def test_values_out_of_range() -> None:
    for name, value in (("beams", -1), ("length_penalty", -1), ("length_offset", 101)):
        with pytest.raises(ArgumentError, match=f"^{name}={value}: must be"):
            Beam(**{name: value})
