"""Attention maps of a text, or of a pair of texts: an interactive page, a picture and a table of measures."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor

from tinyformer.analysis.context import AnalysisContext, Trained
from tinyformer.analysis.removal.ablation import head_importance
from tinyformer.files import finite
from tinyformer.measures.batches import TokenPair, pairs_of, queries_by_kind, without_padding
from tinyformer.measures.capture import Axes, CapturedMaps, axes_of, capture_pair, capture_weights, head_label
from tinyformer.measures.events import TRAITS, Trait, control_of, head_labels
from tinyformer.measures.probe import HeadMeasures, Probe, make_probes, measure_heads, measure_pairs
from tinyformer.measures.table import MEASURES, PATTERNS
from tinyformer.nn import EncoderDecoder
from tinyformer.nn.maps import NoMapsError
from tinyformer.report.page import write_atlas
from tinyformer.report.plots import maps_by_kind
from tinyformer.report.result import AnalysisResult, Table
from tinyformer.tasks import Seq2Seq

NUM_TOKENS = 48  # default number of tokens; fewer if the context is shorter
PICTURE_TOKENS = 24  # number of tokens in the picture, few enough for legible labels in maps of all heads
NUM_SEQUENCES, PERIOD = 8, 32  # number of sequences of repeated random tokens, and number of random tokens in each


Maps: TypeAlias = Mapping[str, CapturedMaps]  # the maps of a network's layers, by the kind of attention
Measure: TypeAlias = Callable[[Any, int | None], HeadMeasures]
"""A function that measures the heads of a network or, given a seed, `random_maps` in place of their maps."""


class Shown(NamedTuple):
    """The text or pair whose maps are shown, and the functions that compute its maps and measures."""

    capture: Callable[[Any], Maps]  # computes the maps of a network
    ids: Mapping[str, tuple[list[int], list[int]]]  # token ids of queries and keys by kind; "" if only one
    axes: Mapping[str, Axes]  # the same tokens as strings
    measure: Measure
    extent: str  # the number of tokens that are shown, in words

    def maps(self, context: AnalysisContext) -> Maps:
        """The maps of the context's network."""
        with context.precision():
            return self.capture(context.network)

    def write(
        self, path: Path, maps: Maps, measures: HeadMeasures, traits: Mapping[str, Trait], **options: Any
    ) -> Path:
        """Write the atlas of some maps with their measures and labels; `options` are arguments of `atlas_html`."""
        names = [list(map(head_label, layer)) for layer in measures.names]
        options |= {"labels": head_labels(measures.values, traits), "ablated": measures.ablated}
        parts = path, layers_of(maps), self.axes, measures.values, names
        return write_atlas(*parts, addresses=measures.addresses, **options)


@dataclass(eq=False)
class HeadMaps:
    """The exact attention maps of a text (`atlas.html`, `maps.png`), and measures and importance of heads (`maps.csv`).

    For an encoder–decoder, the maps are those of a source and its target (`atlas.html`, `cross_maps.png` and so on).

    Args:
        text: the text, tokenized as in `TextTokenizer.read`; two texts for a classifier of pairs; or the source. By
            default, the first window of the sample, or its first pair with at most `num_tokens` tokens on each side.
        num_tokens: number of tokens shown, for a pair on each side; by default 48, and at most the context length.
        importance: if True and `text` is None, importance is computed, which needs a loss and gradients.
    """

    text: str | Sequence[str] | None = None
    target: str | None = None  # the target of the source; by default what the model decodes
    num_tokens: int | None = None
    num_windows: int = 16  # windows for importance, and for measures unless a text is given
    importance: bool = True
    rows: int = 256  # queries of each window that are measured, see `capture_attention`; in a pair, all are
    needs_loss = False

    def __post_init__(self) -> None:
        self.needs_gradient = self.importance and self.text is None

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        return self.written(context, folder, self.shown(context))

    def written(self, context: AnalysisContext, folder: Path, shown: Shown, **page: Any) -> AnalysisResult:
        """Write the page and return the result; `page` are further arguments of `atlas_html`."""
        captured = shown.maps(context)
        measures, traits, labels = with_controls(context, shown.measure)
        measures = with_importance(context, measures) if self.needs_gradient else measures
        if self.text:
            facts = shown_facts = context.facts_of_text(self.text)
        else:
            facts, shown_facts = None, dict(context.facts)
            if context.task.has_loss:
                loss = f"{context.losses().mean:.4f} nats per {context.task.unit}"
                shown_facts["loss"] = f"{loss}, over {context.num_windows} {context.row}s"
        atlas = shown.write(folder / "atlas.html", captured, measures, traits, facts=shown_facts, **page)
        plural = "s" * (shown.extent != "1")
        table, (_, rows) = measures.table(traits), labels
        given = Counter(part for row in table[1] for part in str(row[-1]).split(" + ") if part not in ("", "ablated"))
        named = ", ".join(f"{number} {label}" for label, number in given.items()) or "none"
        withheld = ", ".join(row[0] for row in rows if row[0].replace(" ", "_") not in traits)
        pictures = maps_by_kind(captured, shown.axes, "attention maps", PICTURE_TOKENS)
        return AnalysisResult(
            lines={
                "atlas": f"{len(table[1])} maps of {shown.extent} token{plural}; open {atlas.name} in a browser",
                "labels": f"{named}, of {len(table[1])} heads; withheld, since random maps or untrained heads have it: "
                + (withheld or "none"),
            },
            tables={"maps": table, "labels": labels},
            figures={f"{kind}_maps".removeprefix("_"): picture for kind, picture in pictures.items()},
            files=[atlas],
            facts=facts,
        )

    def shown(self, context: AnalysisContext) -> Shown:
        """The text or pair to show, which is given by the arguments or taken from the context's sample."""
        return (self._pair if isinstance(context.network, EncoderDecoder) else self._one_text)(context)

    def _one_text(self, context: AnalysisContext) -> Shown:
        num_tokens, text = self._length(context), None if self.text is None else context.tokens_of(self.text)
        first, is_token = context.batches[0]["inputs"][0], queries_by_kind(context.batches[0])[""][0]
        tokens = (first[is_token].tolist() if text is None else text)[:num_tokens]
        shown = torch.tensor([tokens], device=first.device)
        mask = context.task.mask({"inputs": shown})
        measure = of_sample(context, self.rows)
        if text is not None:
            measure = _of_probes(context, [Probe(shown, mask, MEASURES | PATTERNS)], len(tokens))
        ids = {"": (tokens, tokens)}
        axes, extent = axes_of(ids, context.tokenizer), _extent(tokens, text)
        return Shown(lambda network: {"": capture_weights(network, shown, mask)}, ids, axes, measure, extent)

    def _pair(self, context: AnalysisContext) -> Shown:
        pairs = [pair for batch in context.batches for pair in pairs_of(batch)]
        num_tokens, tokens = self._length(context), cast(Seq2Seq, context.task).special_tokens.around(context.tokenizer)
        text = None if self.text is None else context.tokens_of(self.text, around=False)
        target = None if self.target is None else context.tokens_of(self.target, around=False, argument="target")
        if text is not None:
            pair = context.pair_of(text, target, num_tokens)
        else:
            fitting = [pair for pair in pairs if max(pair.source.shape[1], pair.target.shape[1]) <= num_tokens]
            sides = (of[0, :-1].tolist() for of in (pairs[0].source, pairs[0].predicted))
            source, predicted = map(tokens.without_bos, sides)
            pair = fitting[0] if fitting else context.pair_of(source, predicted, num_tokens)
        measure = of_sample(context) if text is None else _of_pairs(context, [pair])
        of_source, of_target = (
            _extent(ids[0].tolist(), None if given is None else tokens.wrapped(given))
            for ids, given in ((pair.source, text), (pair.target, target))
        )
        ids, extent = pair.ids_by_kind(), f"{of_source} source and {of_target} target"
        return Shown(partial(capture_pair, pair=pair), ids, axes_of(ids, context.tokenizer), measure, extent)

    def _length(self, context: AnalysisContext) -> int:
        """The largest number of tokens to show."""
        return min(self.num_tokens or NUM_TOKENS, context.network.max_seq_len)


def layers_of(maps: Maps) -> list[Float[Tensor, "_maps _queries _keys"]]:
    """The maps of the first input, for the layers of all kinds of attention."""
    return [layer[0] for of_kind in maps.values() for layer in of_kind]


def of_sample(context: AnalysisContext, rows: int = 256) -> Measure:
    """The function that measures every head on the context's sample: `rows` queries of each window, or whole pairs."""
    network = context.network
    if isinstance(network, EncoderDecoder):
        return _of_pairs(context, [pair for batch in context.batches for pair in pairs_of(batch)])
    windows, sizes = without_padding(context.batches), (context.tokenizer, network.vocab_size, network.max_seq_len)
    return _of_probes(context, make_probes(context.task, windows, *sizes, NUM_SEQUENCES, PERIOD), rows)


def _of_probes(context: AnalysisContext, probes: Sequence[Probe], rows: int) -> Measure:
    return lambda network, random: measure_heads(network, probes, rows, context.precision(), random=random)


def _of_pairs(context: AnalysisContext, pairs: Sequence[TokenPair]) -> Measure:
    return lambda network, random: measure_pairs(network, pairs, context.precision(), random)


def with_controls(context: AnalysisContext, measure: Measure) -> tuple[HeadMeasures, dict[str, Trait], Table]:
    """The measures of the heads, the traits that no control has, and a table of all traits; see `_supported`."""
    measures, controls = measure(context.network, None), {"random": measure(context.network, 0)}
    if context.untrained:
        controls["untrained"] = measure(context.untrained(), None)
    return measures, *_supported(measures, controls)


def with_importance(context: AnalysisContext, measures: HeadMeasures) -> HeadMeasures:
    """Add `importance` to measures, see `head_importance`; both maps of a differential head get the head's value.

    Without a loss, there is no importance.
    """
    if not context.task.has_loss:
        return measures
    try:
        importance = head_importance(context)
    except NoMapsError:  # for a user-defined attention, whose heads can only be shown
        return measures
    of_maps = [
        [
            math.nan if is_ablated else importance[index, number // layer.num_softmaxes]
            for number, is_ablated in enumerate(layer.ablated_maps())
        ]
        for index, layer in enumerate(context.layers)
    ]
    return replace(measures, values={**measures.values, "importance": of_maps})


def _supported(measures: HeadMeasures, controls: Mapping[str, HeadMeasures]) -> tuple[dict[str, Trait], Table]:
    """Traits that no control has, and a table of all traits; untrained heads are a control if a trait has `ends`."""
    supported, rows = dict[str, Trait](), list[list[Any]]()
    for name, trait in TRAITS.items():
        reached = {control: control_of(trait, found.values) for control, found in controls.items()}
        if all(not trait.is_met(value) for control, value in reached.items() if trait.ends or control == "random"):
            supported[name] = trait
        if trait.measure in measures.values:
            met = [trait.is_met(value) for layer in measures.values[trait.measure] for value in layer]
            values = map(finite, reached.values())
            threshold = trait.measure, trait.threshold
            rows.append([name.replace("_", " "), *threshold, *values, sum(met) * (name in supported)])
    return supported, (["label", "measure", "threshold", *controls, "heads"], rows)


def _extent(tokens: Sequence[int], text: Sequence[int] | None) -> str:
    """The number of tokens that are shown, and the number of tokens of the whole text if it is cut."""
    return f"{len(tokens)} of the text's {len(text):,}" if text and len(text) > len(tokens) else str(len(tokens))
