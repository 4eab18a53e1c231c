"""What a run takes over from the checkpoint that it begins with."""

from pathlib import Path

import pytest
import torch

from tinyformer.checkpoint.file import EMBEDDING, Checkpoint
from tinyformer.data import ByteTokenizer
from tinyformer.run.starting_checkpoint import InitialCheckpoint

BYTES = ByteTokenizer().build([])


@pytest.mark.parametrize(
    ("weights", "larger"),
    [
        ({EMBEDDING: torch.zeros(260, 2)}, 260),
        ({EMBEDDING: torch.zeros(BYTES.vocab_size, 2)}, None),
        ({EMBEDDING: torch.tensor(300.0)}, None),
        ({}, None),
    ],
)
def test_an_embedding_of_more_rows_than_tokens_is_kept(weights, larger):
    checkpoint = Checkpoint(Path("last.ckpt"), weights, {}, BYTES.to_json(), {}, 0)
    assert InitialCheckpoint(checkpoint, "resume").larger_vocabulary == larger
