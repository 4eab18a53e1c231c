"""Prediction of a target sequence from a source sequence: translation and summarisation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.data import Pairs, PairSplit, SpecialTokens, TextTokenizer
from tinyformer.data.batches.loader import EvaluationBatches
from tinyformer.data.batches.windows import IGNORED, Batch
from tinyformer.errors import ArgumentError, require_at_least
from tinyformer.generation.generation import Beam, beam_search
from tinyformer.nn import AttentionMask, EncoderDecoder, Network
from tinyformer.tasks.task import Table, TokenTask, describe_accuracy, perplexity, require_smoothing
from tinyformer.tasks.text_metrics import text_metrics
from tinyformer.tasks.user_texts import SOME_TEXTS, TextReader, Texts, require_token_ids

Targets: TypeAlias = str | Sequence[str] | Sequence[Sequence[int]]
"""A target, a list of targets, or a list of their token ids without the tokens that begin and end a target."""

MAX_HYPOTHESES = 128
"""Maximum number of hypotheses that are decoded at a time, over all sources of a batch."""


@dataclass(frozen=True)
class Output:
    """A source, its reference (the whole target in the data, not truncated), and the target that a model decoded."""

    source: str
    reference: str
    output: str


class Seq2Seq(TokenTask):
    """The target is predicted from the source, token by token (Sutskever et al. 2014, arXiv 1409.3215).

    In training, the decoder's input is the reference, shifted by one token ("teacher forcing"). At the end of a run,
    the targets of the evaluated split are decoded by beam search and compared with the references.

    Args:
        label_smoothing: share of the target probability that is spread evenly over the vocabulary during training
            (Szegedy et al. 2015, arXiv 1512.00567).
        num_decoded: number of pairs, from the beginning of the split, that are decoded; None: all pairs.
        special_tokens: the tokens around texts; by default, the tokenizer's `eos`.
    """

    generates = True
    tests_best = True
    bleu_tokenize = "13a"  # BLEU's tokenizer, one of `bleu_tokenizers`
    network_class = EncoderDecoder

    def __init__(
        self, label_smoothing: float = 0.0, num_decoded: int | None = None, special_tokens: SpecialTokens | None = None
    ) -> None:
        require_smoothing(label_smoothing)
        require_at_least(0, num_decoded=num_decoded)
        self.label_smoothing, self.num_decoded = label_smoothing, num_decoded
        self.special_tokens, self.beam = special_tokens or SpecialTokens(), Beam()
        # The outputs of the split that `final_metrics` scored last: the test split, if a run has one.
        self.outputs: list[Output] = []

    def mask(self, batch: Batch) -> AttentionMask:
        """The attention mask of the source, which is bidirectional and hides padding. The target's mask is causal."""
        return AttentionMask(lengths=batch["source_lengths"])

    def loss(self, network: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        """Mean negative log-likelihood of the target tokens, in nats, with smoothed labels."""
        return self.forward(network, batch, targets=batch["targets"], label_smoothing=self.label_smoothing)

    def forward(self, network: nn.Module, batch: Batch, **options: Any) -> Tensor:
        return network(batch["source"], batch["inputs"], self.mask(batch), **options)

    def metrics(self, sums: Mapping[str, Tensor], split: Any) -> dict[str, float | None]:
        """The metrics of `TokenTask` on the tokens of the targets, and `perplexity`."""
        metrics = super().metrics(sums, split)
        return metrics | {"perplexity": perplexity(metrics["loss"])}

    def final_metrics(self, network: Network, split: PairSplit, tokenizer: TextTokenizer) -> dict[str, float | None]:
        """`text_metrics` of decoded targets, `num_decoded`, and `*_ceiling`: metrics of decode(encode(reference))."""
        self.outputs = self.decode_split(cast(EncoderDecoder, network), split)
        texts = [decoded.output for decoded in self.outputs]
        references = [decoded.reference for decoded in self.outputs]
        metrics = text_metrics(texts, references, self.bleu_tokenize) | {"num_decoded": len(texts)} if texts else {}
        if (given_back := [*map(tokenizer.decode, tokenizer.encode_batch(references))]) != references:
            ceiling = text_metrics(given_back, references, self.bleu_tokenize)
            metrics |= {f"{name}_ceiling": score for name, score in ceiling.items()}
        return metrics

    def decode_split(self, network: EncoderDecoder, split: PairSplit) -> list[Output]:
        """The outputs for the first `num_decoded` pairs of a split."""
        number = len(split.begins[: self.num_decoded])
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

    def predict(self, network: Network, batches: Any, split: PairSplit) -> Table:
        self.num_decoded = None
        return ["prediction"], [[pair.output] for pair in self.decode_split(cast(EncoderDecoder, network), split)]

    def prompts(self, reader: TextReader, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of sources, with the tokens that begin and end a source; long sources are truncated."""
        tokens = self.special_tokens.around(reader.tokenizer)
        return [tokens.source(ids, reader.network.max_seq_len) for ids in reader.tokenizer.read(texts, around=False)]

    def generate(
        self,
        reader: TextReader,
        prompts: Sequence[Sequence[int]],
        beams: int | None = None,
        length_penalty: float | None = None,
        length_offset: float | None = None,
        max_tokens: int | None = None,
    ) -> list[list[int]]:
        """The token ids of each source's decoded target, without the tokens that begin and end it; see `beam_search`.

        If `beams`, `length_penalty` or `length_offset` is None, the value in `self.beam` is used.
        """
        settings: dict[str, Any] = {"beams": beams, "length_penalty": length_penalty, "length_offset": length_offset}
        beam = replace(self.beam, **{name: value for name, value in settings.items() if value is not None})
        tokens, network = self.special_tokens.around(reader.own_tokenizer), cast(EncoderDecoder, reader.network)
        sources = [torch.tensor([ids], device=reader.device) for ids in prompts]
        lengths = [torch.tensor([len(ids)], device=reader.device) for ids in prompts]
        searches = zip(sources, lengths, strict=True)
        return [target for of in searches for target in beam_search(network, *of, tokens, beam, max_tokens)]

    def tokenize(self, reader: TextReader, texts: Texts) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, " batch"]]:
        """The token ids of sources, with the tokens that begin and end a source, see `Task.tokenize`."""
        tokens, rows = self.special_tokens.around(reader.own_tokenizer), reader.rows_of(texts, around=False)
        return reader.padded(rows if isinstance(texts, Tensor) else [tokens.wrapped(ids) for ids in rows], tokens.eos)

    def read(self, reader: TextReader, texts: Texts, targets: Targets | None = None) -> Batch:
        """A batch of sources and targets; if `targets` is None, the model decodes them, up to its context."""
        source, lengths = self.tokenize(reader, texts)
        tokens = self.special_tokens.around(reader.own_tokenizer)
        if targets is None:
            room = reader.network.max_seq_len - len(tokens.inputs([]))
            sources = [row[:length].tolist() for row, length in zip(source, lengths, strict=True)]
            outputs = [target[:room] for target in self.generate(reader, sources)]
        else:
            outputs = _target_ids(reader, targets, len(source))
        if len(outputs) != len(source):
            raise ArgumentError("targets", targets, f"must be {len(source)}, as many as `texts`")
        inputs, _ = reader.padded([tokens.inputs(ids) for ids in outputs], tokens.eos, "targets")
        predicted, _ = reader.padded([tokens.wrapped(ids) for ids in outputs], IGNORED, "targets")
        return {"source": source, "source_lengths": lengths, "inputs": inputs, "targets": predicted}

    def read_scored(self, reader: TextReader, texts: Texts, targets: Targets | None = None) -> Batch:
        """A batch of sources and targets, see `read`; targets are required."""
        return self.read(reader, texts, () if targets is None else targets)

    def places(self, batch: Batch, tokenizer: TextTokenizer) -> Int[Tensor, " batch"]:
        """The index of the last token of each target."""
        return (batch["targets"] != IGNORED).sum(dim=1) - 1

    def describe(self, metrics: Mapping[str, float | None], split: PairSplit) -> dict[str, str | None]:
        lines: dict[str, str | None] = {}
        if number := split.num_truncated_targets:
            parts = "the loss is over the beginning, the scores are over the whole target"
            lines["truncated targets"] = f"{number:,} of {split.num_documents:,}: {parts}"
        lines |= {"perplexity": f"{metrics['perplexity']:.2f}", "next token": describe_accuracy(metrics)}
        labels = {"bleu": f"BLEU ({self.bleu_tokenize})", "chrf": "chrF", "rouge1": "ROUGE-1", "rougeL": "ROUGE-L"}
        for heading, end in (("decoded", ""), ("tokenizer allows", "_ceiling")):
            if metrics.get(f"bleu{end}") is not None:
                scores = ", ".join(f"{label} {metrics[name + end]:.1f}" for name, label in labels.items())
                equal = f"{metrics['exact_match' + end]:.1%} equal their reference, of {metrics['num_decoded']:,} pairs"
                lines[heading] = f"{scores}, {equal}"
        unspaced = sum(len(one.reference.split()) < 2 for one in self.outputs) > len(self.outputs) / 2
        if unspaced and self.bleu_tokenize in ("13a", "intl"):
            lines["BLEU"] = "most references have no spaces and are scored as one word; bleu_tokenize=char works"
        return lines


def _target_ids(reader: TextReader, targets: Any, num_texts: int) -> list[list[int]]:
    """The token ids of targets, without the tokens that begin and end a target; given token ids are not changed."""
    rows: Any = [targets] if isinstance(targets, str) else targets
    if not isinstance(rows, Sequence) or not rows:
        reason = "must be a text, a list of texts, or token ids"
        raise ArgumentError("targets", targets, reason, {"targets": SOME_TEXTS[:1] * num_texts})
    if all(isinstance(text, str) for text in rows):
        return reader.tokenizer.read(rows, around=False)
    for ids in rows:
        require_token_ids("targets", torch.tensor([ids], dtype=torch.long), reader.network.vocab_size)
    return [list(ids) for ids in rows]
