"""The analysis that makes the atlas of heads: a page and tables."""

from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from tinyformer.analysis.atlas.events import NUM_OF_DECILE, NUM_STRONGEST, SplitEvents
from tinyformer.analysis.atlas.snippets import COLUMNS, Snippets
from tinyformer.analysis.atlas.tally import CLASSES
from tinyformer.analysis.context import Trained
from tinyformer.analysis.texts.maps import HeadMaps, of_sample
from tinyformer.measures.capture import head_label
from tinyformer.measures.probe import HeadMeasures
from tinyformer.measures.table import EXPLANATIONS
from tinyformer.nn import Network
from tinyformer.report.charts import scatter
from tinyformer.report.result import AnalysisResult, Table

DESCRIPTIONS = {
    "strength": "Mean over queries of the strongest key's weight times the norm of its value after W_O.",
    **{f"strength_{percent}": f"The strength below which {percent} % of the queries lie." for percent in (10, 50, 90)},
    **{f"share_{name}": f"Share of attention on keys of the class {name}." for name in CLASSES},
    **{f"expected_{name}": f"Share on the class {name} if attention depended on offsets alone." for name in CLASSES},
}


@dataclass(eq=False)
class HeadAtlas(HeadMaps):
    """An atlas of every head over all the data: the tokens that it connects most strongly, its measures and vectors.

    Each query of the evaluated split, with its strongest key, is an event of a head, see `LayerEvents`. For each head,
    the page (`atlas.html`) shows its strongest events, and random events from each decile of strengths; the
    distribution of measures over all queries; the attention to classes of tokens, and the expected attention of a head
    that attends by offset alone, see `Tally`; the tokens that its output promotes; and its vectors on a sample of
    queries, projected to a plane. The page also shows the maps of `HeadMaps`, whose arguments this class has, too.

    Args:
        seed: the seed of the samples.
    """

    seed: int = 0

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        split = SplitEvents(context, self.seed)
        snippets, of_layers = Snippets(context, split), [of.measures() for of in split.layers]
        values = {name: [of[name] for of in of_layers] for name in of_layers[0]}
        numbers = " and ".join(f"{of:,}" for of in dict.fromkeys(of.tally.num_queries for of in split.layers))
        read = f"{numbers} queries of {split.num_rows:,} {context.row}s"
        sampled = f"{read}; of each head, the {NUM_STRONGEST} strongest events of all, and "
        sampled += f"{NUM_OF_DECILE} of each decile of strengths, drawn with seed {self.seed}"
        further = {
            "points": snippets.points,
            "tokens": snippets.tokens,
            "sampled": sampled,
            "rows": context.row,
            "measures": [{"name": name, "low": low, "high": high} for name, (low, high) in split.limits.items()],
            "classes": CLASSES,
        }
        measure = of_sample(context, self.rows)

        def with_values(network: Network, random: int | None) -> HeadMeasures:
            found, is_control = measure(network, random), network is not context.network or random is not None
            return found if is_control else replace(found, values={**found.values, **values})

        page = {"of_heads": snippets.of_heads, "descriptions": EXPLANATIONS | DESCRIPTIONS}
        shown = self.shown(context)._replace(measure=with_values)
        found = self.written(context, folder, shown, further={"events": further}, **page)
        table = found.tables["atlas"] = found.tables.pop("maps")
        place = [*context.address_columns, "head"]
        found.tables["events"] = [*place, *COLUMNS], snippets.events
        found.tables["classes"] = [*place, "class", "share", "expected"], snippets.classes
        found.figures["atlas"] = _scatter(table, len(place), f"Heads over {read}")
        found.lines = {"events": sampled, **found.lines}
        return found


def _scatter(table: Table, first: int, title: str) -> Figure:
    """A chart of a table's heads: entropy (x), strength (y). A head's address is in the first `first` columns."""
    names, rows = table
    x, y, drawn = names.index("entropy_share"), names.index("strength"), {}
    for row in rows:
        *of_kind, layer, name = row[:first]
        if None not in (row[x], row[y]):
            drawn[" ".join([*of_kind, f"{layer}.{head_label(name)}"])] = row[x], row[y]
    return scatter(drawn, title, names[x], names[y])
