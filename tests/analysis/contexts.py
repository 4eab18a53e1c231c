"""Small untrained models of texts and of padded pairs, with weights large enough that every head changes the loss."""

import json
import re
from contextlib import nullcontext
from functools import partial

import torch
from nn.model_cases import block_factory, make_encoder, make_transformer, token_ids
from torch.nn.utils.rnn import pad_sequence

from tinyformer.analysis import AnalysisContext
from tinyformer.data import CharTokenizer, PairTokens
from tinyformer.data.batches.windows import IGNORED
from tinyformer.measures import TokenPair
from tinyformer.nn import (
    Attention,
    AttentionMask,
    Decoder,
    Encoder,
    EncoderDecoder,
    LayerNorm,
    LearnedPosition,
    TokenReadout,
    Transformer,
)
from tinyformer.tasks import CausalLM, Seq2Seq

CAUSAL = AttentionMask(causal=True)
SHARINGS = {"mha": 4, "gqa": 2, "mqa": 1}
"""Number of K/V heads for four query heads."""

TOKENIZER = CharTokenizer().build(["abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUV"])
"""48 letters after <unk> and <eos>: the 50 tokens of the small models."""


CAPPED = partial(TokenReadout, softcap=3.0)


def loud_transformer(num_layers=2, seed=0, pruned_heads=(), readout=TokenReadout, **options):
    torch.manual_seed(seed)
    encoder = make_encoder(num_layers=num_layers, **options)
    return loud(Transformer(encoder, readout, pruned_heads=pruned_heads))


def loud(network):
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1 if "embedding" in name else 0.4)
    return network.eval()


def make_context(network, num_windows=6, batch_size=3, padded=False, untrained=None, save_pruned=None):
    """Random windows of 8 tokens; with `padded`, the last window has 3."""
    tokens = token_ids(num_windows, 9)
    targets = tokens[:, 1:].clone()
    if padded:
        targets[-1, 3:] = IGNORED
    lengths = (targets != IGNORED).sum(dim=1)
    parts = zip(*(rows.split(batch_size) for rows in (tokens[:, :-1], targets, lengths)), strict=True)
    batches = [dict(zip(("inputs", "targets", "lengths"), part, strict=True)) for part in parts]
    untrained = untrained or (lambda further=0: make_transformer())
    save_pruned = save_pruned or (lambda network, path: None)
    return AnalysisContext(network, batches, CausalLM(), TOKENIZER, nullcontext, untrained, save_pruned)


def rows_of(batch):
    """Each row of a batch as a batch of its own, without padding."""
    for row in range(len(batch["inputs"])):
        length = int((batch["targets"][row] != IGNORED).sum() if "targets" in batch else batch["lengths"][row])
        ends = {"source": int(batch["source_lengths"][row])} if "source" in batch else {}
        yield {
            name: rows[row : row + 1] if rows.ndim == 1 else rows[row : row + 1, : ends.get(name, length)]
            for name, rows in batch.items()
        }


def all_rows(context):
    return [row for batch in context.batches for row in rows_of(batch)]


def columns_of(table):
    """The columns of a table by name."""
    columns, rows = table
    return dict(zip(columns, zip(*rows, strict=True), strict=True))


def stored(path):
    """The data in the file of an atlas."""
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="atlas-data">(.*?)</script>', text, re.DOTALL)[1])


# A source and its target.

ADDRESSES = [("encoder", 0), ("encoder", 1), ("decoder", 0), ("cross", 0)]
"""Two layers of the encoder, one of the decoder; each has four heads of 8 dimensions."""

LENGTHS = [(9, 7), (5, 3), (6, 6), (4, 8), (7, 2)]
"""Tokens of source and target of each pair, with the `eos`."""

EOS = TOKENIZER.eos_id
SPECIAL = PairTokens(EOS, EOS, (EOS,))


def loud_encoder_decoder(seed=0, pruned_heads=(), residuals=None, attention_position=None, vocab_size=50, **attention):
    torch.manual_seed(seed)
    sizes = {"vocab_size": vocab_size, "d_model": 32, "max_seq_len": 16}
    parts = {"norm": partial(LayerNorm, bias=False), "position": partial(LearnedPosition, 16, 32)}
    block = partial(block_factory(attention_position=attention_position, **attention), **residuals or {})
    encoder = Encoder(num_layers=2, block=block, kind="encoder", **sizes, **parts)
    cross = partial(Attention, 32, 4, **attention)
    decoder = Decoder(num_layers=1, block=block, cross_attention=cross, **sizes, **parts)
    return loud(EncoderDecoder(encoder, decoder, TokenReadout, pruned_heads=pruned_heads))


def batch_of(pairs):
    """A batch of pairs of tokens, padded as `Pairs` does."""
    lengths = torch.tensor([pair.source.shape[1] for pair in pairs])
    batch = {"source_lengths": lengths, "rows": torch.arange(len(pairs))}
    for index, (name, padding) in enumerate({"source": EOS, "inputs": EOS, "targets": IGNORED}.items()):
        batch[name] = pad_sequence([pair[index][0] for pair in pairs], batch_first=True, padding_value=padding)
    return batch


def pair_batch(lengths, seed):
    """A batch of random pairs."""
    ids = [token_ids(1, size, seed=seed + index)[0, :-1] for index, pair in enumerate(lengths) for size in pair]
    texts = [tokens.clamp(min=2).tolist() for tokens in ids]
    return batch_of([TokenPair.of(*texts[at : at + 2], SPECIAL, 16) for at in range(0, len(texts), 2)])


def pair_context(network, batch_size=3, untrained=None, save_pruned=None):
    parts = [LENGTHS[first : first + batch_size] for first in range(0, len(LENGTHS), batch_size)]
    batches = [pair_batch(lengths, seed=10 * number) for number, lengths in enumerate(parts)]
    untrained, save_pruned = untrained or loud_encoder_decoder, save_pruned or (lambda network, path: None)
    return AnalysisContext(network, batches, Seq2Seq(), TOKENIZER, nullcontext, untrained, save_pruned, row="pair")
