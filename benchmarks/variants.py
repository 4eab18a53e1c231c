"""Every attention variant at equal steps and equal parameters, with five seeds.

    python benchmarks/variants.py data.files=shakespeare.txt

Trains each variant by `train.py` on the same text, two at a time, writes `benchmarks/results/variants.json`, and prints
the table of docs/pages/results.md. Parameters that a variant has in addition to those of multi-head attention, or
lacks, are taken from or given to the feed-forward network. Arguments are overrides for all variants, after those of
`EQUAL`. The same command continues where it was stopped: the runs are in `outputs/variants`. On 2 CPU cores it takes
about an hour.
"""

import json
import math
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tinyformer.measures.intervals import student_interval
from tinyformer.programs.doctor import variants
from tinyformer.programs.findings.records import ENDED, PlannedRun, digest_of
from tinyformer.programs.findings.running import run_all

ROOT = Path(__file__).parent.parent

EQUAL = [
    "model=nano",
    "model.max_seq_len=128",
    "data=text",
    "data.batch_size=16",
    "tokenizer=char",
    "trainer.max_steps=200",
    "generate.num_tokens=1",
    "match=parameters",
]
"""The overrides of all variants, which the command line may change: 200 steps of 16 x 128 characters."""

TITLES = {
    "multi-head": "mha",
    "grouped-query": "gqa",
    "multi-query": "mqa",
    "latent": "mla",
    "differential": "differential",
    "score dot": "dot",
    "score general": "general",
    "ALiBi": "alibi",
    "relative (Shaw)": "relative",
    "relative, keys only": "relative_keys",
    "T5 bias": "t5",
    "window 16": "window",
    "window 16, local-p": "local_gaussian",
    "QK-norm": "qk_norm",
    "softcap 5": "softcap",
    "sinks": "sink",
    "output gate": "gate",
    "output gate, elementwise": "elementwise",
    "softmax1": "softmax1",
    "SSMax": "ssmax",
    "forgetting": "forget",
    "QK-norm over the projection": "projection_norm",
    "dropout 0.1": "dropout",
}
"""The variants that are trained, by their titles in the documentation's table."""

VARIANTS = {
    title: [override for part in name.split("+") for override in variants.VARIANTS[part].overrides]
    for title, name in TITLES.items()
} | {
    "no positions": ["position=none"],
    "learned": ["position=learned"],
    "sinusoidal": ["position=sinusoidal"],
    "windows 16, 16, 16, all": ["attention.window=[16,16,16,null]"],
    "rotary half": ["position.relative.fraction=0.5"],
    "p-RoPE 0.75": ["position.relative.p=0.75"],
    "rotary in three of four layers": ["position=[rotary,rotary,rotary,none]"],
    "forgetting, no positions": ["attention.forget=true", "position=none"],
    "exclusive": ["attention.exclusive=true"],
    "value residual": ["attention.value_residual=0.5"],
    "value embeddings": ["attention.value_embedding=[true,false]"],
    "learned residual and x0": ["block.attention_residual.learned=true", "block.attention_residual.embedding=true"],
    "shifted keys": ["attention.shifted_keys=true"],
    "convolution of q, k, v": ["attention.convolution=true"],
    "convolutions in all places": [
        "attention.convolution=true",
        "block.attention_convolution=true",
        "block.feed_forward_convolution=true",
        "feed_forward.convolution=true",
    ],
    "parallel": ["block=parallel"],
    "sandwich": ["block=sandwich"],
    "reordered": ["block=reordered"],
}
"""The overrides of each; the defaults are multi-head attention, scaled dot products and rotary positions."""


SEEDS = [0, 1, 2, 3, 4]


def planned_runs(given: list[str]) -> list[PlannedRun]:
    """The runs of all variants, seed by seed."""
    planned = []
    for seed in SEEDS:
        for name, overrides in VARIANTS.items():
            words = [*EQUAL, *overrides, *given, f"seed={seed}"]
            folder = ROOT / "outputs" / "variants" / digest_of(words)
            planned.append(PlannedRun("variants", name, seed, "train", words, folder, []))
    return planned


def read(run: PlannedRun, name: str) -> dict[str, Any]:
    """A JSON file of a run."""
    return dict(json.loads((run.folder / name).read_text(encoding="utf-8")))


def row_of(runs: list[PlannedRun]) -> dict[str, Any]:
    """The record of a variant: its losses by seed, and what all of its runs share."""
    results = [read(run, "results.json") for run in runs]
    kept = ("num_parameters", "attention_kernel", "steps", "device", "precision")
    return {
        "overrides": VARIANTS[runs[0].name],
        "d_ff": results[0]["matched"]["size"],
        **{key: results[0][key] for key in kept},
        "seconds": statistics.median(result["seconds"] for result in results),
        "val/loss": [result["val/loss"] for result in results],
    }


def unigram_entropy(text: str) -> float:
    """The loss in nats per character of a model that knows only the frequency of each character."""
    counts = Counter(text)
    return -sum(count / len(text) * math.log(count / len(text)) for count in counts.values())


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The rows in Markdown, the best first; a difference is one of the mean over seeds, with its 95 % interval."""
    lines = [
        "| variant | overrides | `d_ff` | parameters | val loss | minus multi-head |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in sorted(rows.items(), key=lambda item: statistics.fmean(item[1]["val/loss"])):
        overrides = " ".join(f"`{override}`" for override in row["overrides"])
        mean = statistics.fmean(row["val/loss"])
        pairs = zip(row["val/loss"], rows["multi-head"]["val/loss"], strict=True)
        differences = [loss - plain for loss, plain in pairs]
        low, high = student_interval(differences)
        effect = f"{statistics.fmean(differences):+.3f} [{low:+.3f}, {high:+.3f}]" if row["overrides"] else ""
        cells = (name, overrides, row["d_ff"], f"{row['num_parameters']:,}", f"{mean:.3f}", effect)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Make the runs that are missing, write the figures, and print the table."""
    given = sys.argv[1:]
    files = [Path(word.partition("=")[2]) for word in given if word.startswith("data.files=")]
    if len(files) != 1 or not files[0].is_file():
        sys.exit("One text is needed: python benchmarks/variants.py data.files=shakespeare.txt")
    given = [word if not word.startswith("data.files=") else f"data.files={files[0].resolve()}" for word in given]
    planned = planned_runs(given)
    if run_all(planned, num_jobs=2):
        sys.exit("Some runs failed.")
    record = {
        "command": ["python", *sys.argv],
        **{key: read(planned[0], ENDED)[key] for key in ("machine", "versions")},
        "commits": sorted({read(run, ENDED)["commit"] for run in planned}),
        "equal": EQUAL,
        "seeds": SEEDS,
        "unigram_entropy": unigram_entropy(files[0].read_text(encoding="utf-8")),
        "variants": {name: row_of([run for run in planned if run.name == name]) for name in VARIANTS},
    }
    target = ROOT / "benchmarks" / "results" / "variants.json"
    target.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(table(record["variants"]))


if __name__ == "__main__":
    main()
