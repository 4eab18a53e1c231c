"""Small untrained models in Python, of each task, whose weights are large enough that every head counts."""

from functools import partial
from typing import Any

from analysis.contexts import TOKENIZER, loud_encoder_decoder, loud_transformer
from nn.model_cases import make_encoder
from nn.variants import D_MODEL, factory, prepared
from torch import nn

from tinyformer.data import ByteTokenizer, TextTokenizer
from tinyformer.model.model import Model
from tinyformer.nn import (
    ClassReadout,
    Encoder,
    FeedForward,
    LayerNorm,
    PreNormBlock,
    SpanReadout,
    TokenReadout,
    Transformer,
)
from tinyformer.tasks import CausalLM, Classification, MaskedLM, Seq2Seq, SpanExtraction, Task

BYTES = ByteTokenizer().build([])
UNTIED = partial(TokenReadout, tied=False)
LABELS = ["no", "yes", "maybe"]
TEXTS = ["the cat", "a", "bird sang"]


def transformer(name: str = "gqa", kind: type[nn.Module] = PreNormBlock, **options: Any) -> Transformer:
    """A network of two layers with a variant of attention of `nn.variants`, for sequences of up to 32 bytes."""
    block = partial(kind, D_MODEL, partial(factory(name), **options), partial(FeedForward, D_MODEL), LayerNorm)

    def make() -> Transformer:
        return Transformer(Encoder(257, 2, D_MODEL, 32, block, LayerNorm, None), UNTIED, init_std=0.3)

    return prepared(make).eval()


def model(
    name: str = "gqa", task: Task | None = None, tokenizer: TextTokenizer | None = BYTES, **options: Any
) -> Model:
    """A language model with a variant of attention."""
    return Model(transformer(name, **options), tokenizer, task or CausalLM())


def causal(**options: Any) -> Model:
    """A language model of letters, with learned positions, for sequences of up to 16 tokens."""
    return Model(loud_transformer(**options), TOKENIZER, CausalLM())


def masked() -> Model:
    tokenizer = ByteTokenizer().build([]).with_mask()
    return Model(loud_transformer(vocab_size=tokenizer.vocab_size), tokenizer, MaskedLM())


def randomised(network: nn.Module) -> Any:
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    return network.eval()


def classifier(labels: list[str] = LABELS) -> Model:
    network = Transformer(make_encoder(max_seq_len=24), partial(ClassReadout, labels=labels))
    return Model(randomised(network), TOKENIZER, Classification(labels))


def translator(tokenizer: TextTokenizer | None = TOKENIZER, task: Seq2Seq | None = None, **options: Any) -> Model:
    """An encoder–decoder of two layers and one, for sequences of up to 16 tokens."""
    return Model(loud_encoder_decoder(**options), tokenizer, task or Seq2Seq())


def answerer(tokenizer: TextTokenizer = BYTES) -> Model:
    """A model for questions, of which it reads 8 bytes, in windows of up to 24 bytes."""
    task = SpanExtraction(no_answer_threshold=0.0)
    task.max_question_length = 8
    return Model(randomised(Transformer(make_encoder(vocab_size=257, max_seq_len=24), SpanReadout)), tokenizer, task)
