"""From one sequence to another: translation and summarisation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.batch import Batch
from tinyformer.beam_search import Beam, beam_search
from tinyformer.data import Pairs, PairSplit, SpecialTokens, TextTokenizer
from tinyformer.data.similar_lengths import EvaluationBatches
from tinyformer.errors import ArgumentError, require_at_least
from tinyformer.nn import AttentionMask, EncoderDecoder, Network
from tinyformer.tasks.language import TokenTask, perplexity
from tinyformer.tasks.text_metrics import text_metrics

MAX_HYPOTHESES = 128
"""The most hypotheses, over all sources of a batch, that are decoded at a time."""


@dataclass(frozen=True)
class Output:
    """A source, its reference, and the target that a model decoded.

    Attributes:
        source: the text that the model read.
        reference: the whole target, as it stands in the data.
        output: the decoded target.
    """

    source: str
    reference: str
    output: str


class Seq2Seq(TokenTask):
    """The target is predicted from the source, token by token (Sutskever et al. 2014, arXiv 1409.3215).

    In training the decoder reads the reference, one token behind ("teacher forcing"); at the end of a run the targets
    of the evaluated split are decoded by beam search and compared with the references.

    Args:
        label_smoothing: share of the target probability that is spread evenly over the vocabulary during training
            (Szegedy et al. 2015, arXiv 1512.00567).
        num_decoded: number of pairs, from the beginning of the split, that are decoded; None for all.
        special_tokens: the tokens around texts; by default, the tokenizer's `eos`.

    Attributes:
        beam: the settings of the beam search.
        outputs: the outputs that `final_metrics` compared last: those of the test split, where a run has one.

    Raises:
        ArgumentError: a value is out of range.
    """

    generates = True
    tests_best = True
    network_class = EncoderDecoder

    def __init__(
        self,
        label_smoothing: float = 0.0,
        num_decoded: int | None = None,
        special_tokens: SpecialTokens | None = None,
    ) -> None:
        if not 0 <= label_smoothing < 1:
            reason = "must be at least 0 and below 1"
            raise ArgumentError("label_smoothing", label_smoothing, reason, {"label_smoothing": 0.1})
        require_at_least(0, num_decoded=num_decoded)
        self.label_smoothing, self.num_decoded = label_smoothing, num_decoded
        self.special_tokens = SpecialTokens.of(special_tokens)
        self.beam = Beam()
        self.outputs: list[Output] = []

    def mask(self, batch: Batch) -> AttentionMask:
        """The mask of the source: bidirectional, hiding padding. The target's is causal."""
        return AttentionMask(lengths=batch["source_lengths"])

    def loss(self, network: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        """Mean negative log-likelihood of the target tokens, in nats, with smoothed labels."""
        smoothing = self.label_smoothing
        return self.forward(network, batch, targets=batch["targets"], label_smoothing=smoothing)

    def forward(self, network: nn.Module, batch: Batch, **options: Any) -> Tensor:
        """The output of the network for the sources and the targets of a batch."""
        return network(batch["source"], batch["inputs"], self.mask(batch), **options)

    def metrics(self, sums: Mapping[str, Tensor], split: Any) -> dict[str, float | None]:
        """The metrics of `TokenTask` on the tokens of the targets, and `perplexity`."""
        metrics = super().metrics(sums, split)
        loss = metrics["loss"]
        assert loss is not None
        return metrics | {"perplexity": perplexity(loss)}

    def final_metrics(self, network: Network, split: PairSplit, tokenizer: TextTokenizer) -> dict[str, float | None]:
        """Similarity of decoded targets to their references, see `text_metrics`; and `num_decoded`, their number."""
        self.outputs = self.decode_split(cast(EncoderDecoder, network), split)
        outputs, references = [one.output for one in self.outputs], [one.reference for one in self.outputs]
        return text_metrics(outputs, references) | {"num_decoded": len(outputs)} if outputs else {}

    def decode_split(self, network: EncoderDecoder, split: PairSplit) -> list[Output]:
        """The outputs for the first `num_decoded` pairs of a split."""
        number = split.num_documents if self.num_decoded is None else min(self.num_decoded, split.num_documents)
        if not number:
            return []
        decoded: dict[int, list[int]] = {}
        batches = EvaluationBatches(Pairs(split), split.lengths[:number, 0], max(1, MAX_HYPOTHESES // self.beam.beams))
        device = next(network.parameters()).device
        for index in range(len(batches)):
            batch = batches[index]
            source, lengths = batch["source"].to(device), batch["source_lengths"].to(device)
            targets = beam_search(network, source, lengths, split.tokens, self.beam)
            decoded |= zip(batch["rows"].tolist(), targets, strict=True)
        decode = split.tokenizer.decode
        return [Output(split.source(row), split.target(row), decode(decoded[row])) for row in range(number)]

    def decode_texts(
        self, network: EncoderDecoder, texts: Sequence[str], tokenizer: TextTokenizer, beam: Beam | None = None
    ) -> list[str]:
        """The targets that a model decodes for some texts; a text that is too long is truncated.

        Args:
            network: the model.
            texts: the sources.
            tokenizer: the model's.
            beam: the settings of the beam search; by default `beam` of the task.
        """
        device, tokens = next(network.parameters()).device, self.special_tokens.around(tokenizer)
        outputs = []
        for ids in tokenizer.read(texts, around=False):
            source = torch.tensor([tokens.source(ids, network.max_seq_len)], device=device)
            lengths = torch.tensor([source.shape[1]], device=device)
            (target,) = beam_search(network, source, lengths, tokens, beam or self.beam)
            outputs.append(tokenizer.decode(target))
        return outputs

    def describe(self, metrics: Mapping[str, float | None], split: PairSplit) -> dict[str, str | None]:
        """Accuracy of the next token, and the similarity of decoded targets to their references, for the summary."""
        decoded = None
        if metrics.get("bleu") is not None:
            numbers = {name: metrics[name] for name in ("bleu", "chrf", "rouge1", "rougeL")}
            decoded = ", ".join(f"{LABELS[name]} {value:.1f}" for name, value in numbers.items())
            decoded += f", {metrics['exact_match']:.1%} equal their reference, of {metrics['num_decoded']:,} pairs"
        truncated = None
        if number := split.num_truncated_targets:
            truncated = f"{number:,} of {split.num_documents:,}: loss over their beginning, scores over the whole"
        return {
            "truncated targets": truncated,
            "perplexity": f"{metrics['perplexity']:.2f}",
            "next token": f"{metrics['accuracy']:.1%} correct, {metrics['accuracy_top5']:.1%} in the top five",
            "decoded": decoded,
        }


LABELS = {"bleu": "BLEU", "chrf": "chrF", "rouge1": "ROUGE-1", "rougeL": "ROUGE-L"}
"""How the summary writes the names of metrics."""
