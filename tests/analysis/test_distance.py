"""Accuracy by distance, by hand: a model that copies what followed the last occurrence, and one that never does."""

from dataclasses import replace

import pytest
import torch

from analysis.contexts import TOKENIZER, loud_transformer, make_context
from tinyformer.analysis import AccuracyByDistance, AnalysisContext
from tinyformer.data.batches.windows import IGNORED
from tinyformer.errors import ArgumentError
from tinyformer.tasks import CausalLM, MaskedLM

# Input 7 comes again after 2 and after 3 tokens, 9 after 4; a target that is not scored, and one without an occurrence.
INPUTS = torch.tensor([[7, 9, 7, 5, 9, 7, 9, 4]])
TARGETS = torch.tensor([[IGNORED, IGNORED, 9, 1, 7, 6, IGNORED, 3]])


class Says(CausalLM):
    """Predicts the given tokens."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = torch.tensor([tokens])

    def logits(self, network, batch):
        return torch.nn.functional.one_hot(self.tokens, 10).float()


def table(tokens, width=1):
    context = AnalysisContext(loud_transformer(), [{"inputs": INPUTS, "targets": TARGETS}], Says(tokens), TOKENIZER)
    findings = AccuracyByDistance(width=width)(context)
    return findings.tables["distance"][1], findings.lines["accuracy"]


def test_the_distance_is_that_to_the_last_occurrence():
    # Place 2: 9 has followed the 7 at 0; place 4: 7 the 9 at 1; place 5: 5, not 6, the 7 at 2.
    right = [0, 0, 9, 0, 7, 6, 0, 3]
    assert table(right)[0] == [[2, 2, 1, 1.0, 1.0], [3, 3, 2, 1.0, 0.5]]
    rows, line = table([0, 0, 9, 0, 0, 0, 0, 0], width=4)
    assert rows == [[1, 4, 3, 1 / 3, 2 / 3]]
    assert line.startswith("33.3% of 3 targets at 1 to 4 tokens")


def test_other_tasks_are_refused():
    context = replace(make_context(loud_transformer()), task=MaskedLM())
    with pytest.raises(ArgumentError, match="analysis='distance': analyses models that predict the next token"):
        AccuracyByDistance()(context)
