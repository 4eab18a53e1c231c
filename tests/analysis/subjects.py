"""Small untrained models to analyse, with weights large enough that every head changes the loss."""

import json
import re
from contextlib import nullcontext

import torch
from nn.model_cases import make_encoder, make_transformer, token_ids

from tinyformer.analysis import Subject
from tinyformer.batch import IGNORED
from tinyformer.data import CharTokenizer
from tinyformer.nn import AttentionMask, TokenReadout, Transformer
from tinyformer.tasks import CausalLM

CAUSAL = AttentionMask(causal=True)
SHARINGS = {"mha": 4, "gqa": 2, "mqa": 1}
"""Number of K/V heads for four query heads."""

TOKENIZER = CharTokenizer().build(["abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUV"])
"""48 letters after <unk> and <eos>: the 50 tokens of the small models."""


def loud_transformer(num_layers=2, seed=0, pruned_heads=(), **options):
    torch.manual_seed(seed)
    encoder = make_encoder(num_layers=num_layers, **options)
    return loud(Transformer(encoder, TokenReadout, pruned_heads=pruned_heads))


def loud(network):
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1 if "embedding" in name else 0.4)
    return network.eval()


def make_subject(network, num_windows=6, batch_size=3, padded=False, untrained=None, save_pruned=None):
    """Random windows of 8 tokens; with `padded`, the last window has 3."""
    tokens = token_ids(num_windows, 9)
    targets = tokens[:, 1:].clone()
    if padded:
        targets[-1, 3:] = IGNORED
    lengths = (targets != IGNORED).sum(dim=1)
    parts = zip(*(rows.split(batch_size) for rows in (tokens[:, :-1], targets, lengths)), strict=True)
    batches = [dict(zip(("inputs", "targets", "lengths"), part, strict=True)) for part in parts]
    untrained, save_pruned = untrained or make_transformer, save_pruned or (lambda network, path: None)
    return Subject(network, batches, CausalLM(), TOKENIZER, nullcontext, untrained, save_pruned)


def rows_of(batch):
    """Each row of a batch as a batch of its own, without padding."""
    for row in range(len(batch["inputs"])):
        length = int((batch["targets"][row] != IGNORED).sum() if "targets" in batch else batch["lengths"][row])
        ends = {"source": int(batch["source_lengths"][row])} if "source" in batch else {}
        yield {
            name: rows[row : row + 1] if rows.ndim == 1 else rows[row : row + 1, : ends.get(name, length)]
            for name, rows in batch.items()
        }


def all_rows(subject):
    return [row for batch in subject.batches for row in rows_of(batch)]


def columns_of(table):
    """The columns of a table by name."""
    columns, rows = table
    return dict(zip(columns, zip(*rows, strict=True), strict=True))


def stored(path):
    """The data in the file of an atlas."""
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="atlas-data">(.*?)</script>', text, re.DOTALL)[1])
