"""Beam search: against every possible target, against transformers, and with and without a cache."""

from itertools import product

import pytest
import torch
import transformers
from nn.test_encoder_decoder import CROSS, LENGTHS, SOURCE, VOCAB, make
from nn.test_transformers_parity import PADDED as HIDING
from nn.test_transformers_parity import TRANSLATORS, real, tokens
from nn.variants import factory
from torch import Tensor

from tinyformer.beam_search import Beam, beam_search
from tinyformer.errors import ArgumentError
from tinyformer.nn import EncoderDecoder

END = 7


def score(network: EncoderDecoder, source: Tensor, target: list[int], beam: Beam) -> float:
    tokens = torch.tensor([[END, *target]])
    with torch.no_grad():
        log_p = network(source.unsqueeze(0), tokens[:, :-1]).log_softmax(dim=-1)
    offset, penalty = beam.length_offset, beam.length_penalty  # Wu et al. 2016, equation 14, has an offset of 5
    return float(log_p[0].gather(1, tokens[0, 1:, None]).sum()) / ((offset + len(target)) / (offset + 1)) ** penalty


@pytest.mark.parametrize("beam", [Beam(27, 0.0), Beam(27, 1.0), Beam(27, 4.0), Beam(27, 4.0, length_offset=5)])
def test_a_beam_of_all_targets_finds_the_best(beam: Beam) -> None:
    network = make(std=0.2)
    keep = torch.tensor([END, 3, 11])
    for token in set(range(VOCAB)) - set(keep.tolist()):  # all other tokens are impossible
        network.readout.proj.weight.data[token] = 0
    bias = torch.full((VOCAB,), -1e9)
    bias[keep] = 0
    network.readout.proj.bias = torch.nn.Parameter(bias)
    (found,) = beam_search(network, SOURCE[:1], LENGTHS[:1], END, beam, max_tokens=3)
    words = [3, 11]
    complete = [[*start, END] for n in range(3) for start in product(words, repeat=n)]
    cut = [list(tokens) for tokens in product(words, repeat=3)]
    best = max([*complete, *cut], key=lambda target: score(network, SOURCE[0], target, beam))
    assert found == [token for token in best if token != END]


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
    network = make(cross=factory(name), std=0.4)
    both = beam_search(network, SOURCE, LENGTHS, END, Beam(3), max_tokens=8)
    assert both == beam_search(network, SOURCE, LENGTHS, END, Beam(3), max_tokens=8, use_cache=False)
    for row, length in enumerate(LENGTHS.tolist()):
        one, own = SOURCE[row : row + 1, :length], LENGTHS[row : row + 1]
        assert beam_search(network, one, own, END, Beam(3), max_tokens=8) == [both[row]]
        assert beam_search(network, one, own, END, Beam(1), max_tokens=8) == [greedy(network, one[0], 8)]


@pytest.mark.parametrize(("beams", "penalty"), [(1, 1.0), *product((2, 5), (0.0, 0.7, 1.0))])
def test_targets_are_those_of_transformers(beams: int, penalty: float) -> None:
    twins = TRANSLATORS["marian"]()
    ours, theirs = twins.ours.eval(), transformers.MarianMTModel(twins.theirs.config)
    ours.load_state_dict(twins.weights)
    theirs.model = twins.theirs
    theirs.tie_weights()
    theirs.eval()
    lengths, is_real = real(HIDING).sum(dim=1), real(HIDING).long()
    with torch.no_grad():  # without the mean, the logits differ more between positions than between tokens
        bias = -ours(tokens(), tokens()).mean(dim=(0, 1))
    ours.readout.proj.bias = torch.nn.Parameter(bias)
    theirs.final_logits_bias = bias.unsqueeze(0)
    penalties = {} if beams == 1 else {"length_penalty": penalty, "early_stopping": False}
    num_tokens = set()
    for end in range(4, 20):
        found = beam_search(ours, tokens(), lengths, end, Beam(beams, penalty), max_tokens=10)
        ids = {"decoder_start_token_id": end, "eos_token_id": end, "pad_token_id": end}
        searched = {"num_beams": beams, "max_new_tokens": 10, "forced_eos_token_id": None, "bad_words_ids": None}
        expected = theirs.generate(tokens(), attention_mask=is_real, do_sample=False, **searched, **ids, **penalties)
        for one, other in zip(found, expected[:, 1:].tolist(), strict=True):
            assert one == (other[: other.index(end)] if end in other else other)
            num_tokens.add(len(one))
    assert len(num_tokens) > 1


def test_a_beam_needs_a_hypothesis() -> None:
    with pytest.raises(ArgumentError, match="beams"):
        Beam(0)
    with pytest.raises(ArgumentError, match="length_penalty"):
        Beam(length_penalty=-1)
    with pytest.raises(ArgumentError, match=r"^length_offset=101: must be at most 100; length_offset=5\.0 works"):
        Beam(length_offset=101)
