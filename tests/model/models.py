"""Small untrained models in Python, with weights large enough to tell heads apart."""

from functools import partial

from analysis.pair_subjects import loud_encoder_decoder
from analysis.subjects import TOKENIZER
from nn.variants import D_MODEL, factory, prepared

from tinyformer.data import ByteTokenizer, TextTokenizer
from tinyformer.model.model import Model
from tinyformer.nn import Encoder, FeedForward, LayerNorm, PreNormBlock, SpanReadout, TokenReadout, Transformer
from tinyformer.tasks import CausalLM, Seq2Seq, SpanExtraction, Task

BYTES = ByteTokenizer().build([])


UNTIED = partial(TokenReadout, tied=False)


def transformer(name: str = "gqa", readout=UNTIED, num_layers: int = 2, **options):
    """A network with a variant of attention, for sequences of up to 32 bytes."""

    def make() -> Transformer:
        attention = partial(factory(name), **options)
        block = partial(PreNormBlock, D_MODEL, attention, partial(FeedForward, D_MODEL), LayerNorm)
        encoder = Encoder(257, num_layers, D_MODEL, 32, block, LayerNorm, None)
        return Transformer(encoder, readout, init_std=0.3)

    return prepared(make).eval()


def model(name: str = "gqa", task: Task | None = None, tokenizer: TextTokenizer | None = BYTES, **options) -> Model:
    """A model of one text."""
    return Model(transformer(name, **options), tokenizer, task or CausalLM())


def translator(tokenizer: TextTokenizer | None = TOKENIZER, task: Seq2Seq | None = None, **options) -> Model:
    """An encoder–decoder of two layers and one, for sequences of up to 16 tokens."""
    return Model(loud_encoder_decoder(**options), tokenizer, task or Seq2Seq())


def answerer() -> Model:
    """A model that answers questions."""
    task = SpanExtraction()
    task.max_question_length = 8
    return Model(transformer(readout=SpanReadout), BYTES, task)
