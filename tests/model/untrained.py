"""Small untrained models in Python, of each task, whose weights are large enough that every head counts."""

from functools import partial
from typing import Any

from analysis.pair_subjects import loud_encoder_decoder
from analysis.subjects import TOKENIZER, loud_transformer
from nn.model_cases import make_encoder
from nn.variants import factory, network
from torch import nn

from tinyformer.data import ByteTokenizer
from tinyformer.model.model import Model
from tinyformer.nn import ClassReadout, SpanReadout, Transformer
from tinyformer.tasks import CausalLM, Classification, MaskedLM, Seq2Seq, SpanExtraction

LABELS = ["no", "yes", "maybe"]
TEXTS = ["the cat", "a", "bird sang"]


def randomised(model: nn.Module) -> Any:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def causal(**options: Any) -> Model:
    return Model(loud_transformer(**options), TOKENIZER, CausalLM())


def of_variant(name: str, **options: Any) -> Model:
    """A language model with an attention of `nn.variants`."""
    return Model(network(partial(factory(name), **options)), TOKENIZER, CausalLM())


def masked() -> Model:
    tokenizer = ByteTokenizer().build([]).with_mask()
    return Model(loud_transformer(vocab_size=tokenizer.vocab_size), tokenizer, MaskedLM())


def classifier() -> Model:
    model = Transformer(make_encoder(), partial(ClassReadout, labels=LABELS))
    return Model(randomised(model), TOKENIZER, Classification(LABELS))


def translator(**options: Any) -> Model:
    return Model(loud_encoder_decoder(**options), TOKENIZER, Seq2Seq())


def reader() -> Model:
    model = Transformer(make_encoder(vocab_size=257, max_seq_len=24), SpanReadout)
    return Model(randomised(model), ByteTokenizer().build([]), SpanExtraction(no_answer_threshold=0.0))
