"""Small models to analyse, whose heads matter though they were never trained."""

from contextlib import nullcontext

import torch
from nn.model_cases import make_transformer, token_ids

from tinyformer.analysis import Subject
from tinyformer.nn import IGNORED
from tinyformer.tasks import CausalLM

SHARINGS = {"mha": 4, "gqa": 2, "mqa": 1}
"""K/V heads of four query heads."""


def loud_transformer(num_layers=2, seed=0, **options):
    """Weights that are large enough for each head to move the loss."""
    torch.manual_seed(seed)
    network = make_transformer(num_layers=num_layers, **options)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim == 2 and "embedding" not in name:
                parameter.normal_(0, 0.4)
            elif parameter.ndim == 2:
                parameter.normal_(0, 1)
    return network.eval()


def make_subject(network, num_windows=6, batch_size=3, padded=False, untrained=None, save_pruned=None):
    """Random windows of 8 tokens; with `padded`, the last of them has 3 targets."""
    task, tokens = CausalLM(), token_ids(num_windows, 9)
    targets = tokens[:, 1:].clone()
    if padded:
        targets[-1, 3:] = IGNORED
    batches = [
        {"inputs": inputs, "targets": targets}
        for inputs, targets in zip(tokens[:, :-1].split(batch_size), targets.split(batch_size), strict=True)
    ]
    return Subject(
        network=network,
        batches=batches,
        mask=task.mask,
        nats=task.nats,
        encode=lambda text: [ord(character) % 50 for character in text],
        labels=lambda ids: [str(i) for i in ids],
        precision=nullcontext,
        untrained=untrained or make_transformer,
        save_pruned=save_pruned or (lambda network, path: None),
    )


def windows_of(subject):
    """Each window as a batch of its own."""
    return [
        {name: rows[index : index + 1] for name, rows in batch.items()}
        for batch in subject.batches
        for index in range(len(batch["inputs"]))
    ]


def columns_of(table):
    """A table's columns by their names."""
    columns, rows = table
    return dict(zip(columns, zip(*rows, strict=True), strict=True))
