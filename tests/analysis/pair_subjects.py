"""A small untrained encoder–decoder to analyse on padded pairs, with weights large enough that every head counts."""

from contextlib import nullcontext
from functools import partial

import torch
from nn.model_cases import block_factory, token_ids
from torch.nn.utils.rnn import pad_sequence

from analysis.subjects import TOKENIZER, loud
from tinyformer.analysis import Subject, TokenPair
from tinyformer.batch import IGNORED
from tinyformer.data import PairTokens
from tinyformer.nn import Attention, Decoder, Encoder, EncoderDecoder, LayerNorm, LearnedPosition, TokenReadout
from tinyformer.tasks import Seq2Seq

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


def pair_subject(network, batch_size=3, untrained=None, save_pruned=None):
    parts = [LENGTHS[first : first + batch_size] for first in range(0, len(LENGTHS), batch_size)]
    batches = [pair_batch(lengths, seed=10 * number) for number, lengths in enumerate(parts)]
    untrained, save_pruned = untrained or loud_encoder_decoder, save_pruned or (lambda network, path: None)
    return Subject(network, batches, Seq2Seq(), TOKENIZER, nullcontext, untrained, save_pruned, row="pair")
