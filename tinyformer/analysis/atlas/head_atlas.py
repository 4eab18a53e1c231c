"""Every head over all the data: the analysis with its tables and its page."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from matplotlib.figure import Figure

from tinyformer.analysis.atlas.events import NUM_OF_DECILE, NUM_STRONGEST, SplitEvents
from tinyformer.analysis.atlas.snippets import COLUMNS, Snippets
from tinyformer.analysis.atlas.tally import CLASSES
from tinyformer.analysis.context import AnalysisContext, Trained
from tinyformer.analysis.texts.maps import HeadMaps, of_sample
from tinyformer.analysis.texts.relation_lines import read_columns
from tinyformer.errors import ArgumentError, argument_path, require_choice
from tinyformer.measures.capture import head_label, map_names
from tinyformer.measures.probe import HeadMeasures
from tinyformer.measures.table import EXPLANATIONS
from tinyformer.nn import Network
from tinyformer.report.charts import scatter
from tinyformer.report.result import AnalysisResult, Table

DESCRIPTIONS = {
    "strength": "Mean over the queries of the strongest key's weight times the norm of what its value writes.",
    **{f"strength_{percent}": f"The strength that {percent} % of the queries stay below." for percent in (10, 50, 90)},
    **{f"share_{name}": f"Share of attention on keys of the class {name}." for name in CLASSES},
    **{f"expected_{name}": f"The share of the class {name} that fixed offsets would give." for name in CLASSES},
}


@dataclass(eq=False)
class HeadAtlas(HeadMaps):
    """Every head over all the data: which tokens it connects most strongly, and what else it does.

    In one pass over the evaluated split, each query with its strongest key is an event, see `LayerEvents`. For each
    head, the page (`atlas.html`) shows its strongest events, and some of each decile of strengths, drawn at random; the
    distribution of measures over all queries; attention by class of token next to that of fixed offsets, see `Tally`;
    which tokens its output promotes; and its vectors on a sample of queries, projected to a plane. It also holds what
    `HeadMaps` shows, whose arguments it takes.

    Args:
        columns: further measures of heads: the name of the column that has them in a .csv file, such as "change" in the
            `ablation.csv` of `HeadAblation`, and its path.
        seed: of the samples.
        max_heads: the most heads that a page is written for.
        x: the measure on the horizontal axis of the picture.
        y: the measure on the vertical axis.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    max_heads: int = 256
    x: str = "entropy_share"
    y: str = "strength"

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        if (number := len(context.heads)) > self.max_heads:
            reason = f"the model has {number:,} heads, of which a page would have about {number // 10:,} MB"
            raise ArgumentError("max_heads", self.max_heads, reason, {"max_heads": number})
        further_measures, split = self._read_columns(context), SplitEvents(context, self.seed)
        snippets, of_layers = Snippets(context, split), [of.measures() for of in split.layers]
        values = {name: [of[name] for of in of_layers] for name in of_layers[0]} | further_measures
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
        found.figures["atlas"] = self._scatter(table, len(place), f"Heads over {read}")
        found.lines = {"events": sampled, **found.lines}
        return found

    def _scatter(self, table: Table, first: int, title: str) -> Figure:
        """The heads of a table by two of its measures, the first of which is in the column `first`."""
        names, rows = table
        for axis in ("x", "y"):
            require_choice(axis, getattr(self, axis), names[first:-1])
        x, y, drawn = names.index(self.x), names.index(self.y), {}
        for row in rows:
            *of_kind, layer, name = row[:first]
            if None not in (row[x], row[y]):
                drawn[" ".join([*of_kind, f"{layer}.{head_label(name)}"])] = row[x], row[y]
        return scatter(drawn, title, self.x, self.y)

    def _read_columns(self, context: AnalysisContext) -> dict[str, list[list[float]]]:
        """The values of `columns` for each map of each layer; nan for heads that a file does not have."""
        values = dict[str, list[list[float]]]()
        for name, file in self.columns.items():
            with argument_path(passed={"file": f"columns.{name}"}):
                rows = read_columns(file, [*context.address_columns, "head", name])
            of_head = {(*map(str, layer), _padded(str(head))): value for *layer, head, value in rows}
            values[name] = [
                [float(of_head.get((*map(str, address), head), "") or "nan") for head in map_names(layer)]
                for address, layer in zip(context.addresses, context.layers, strict=True)
            ]
        return values


def _padded(head: str) -> str:
    """The name of a head in a table as `map_names` has it: "03" for "3", "03a" for "3a"."""
    return head.zfill(2 + head[-1:].isalpha())
