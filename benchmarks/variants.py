"""Every attention variant at equal steps and equal parameters.

    python benchmarks/variants.py data.files=shakespeare.txt

Trains each variant by `train.py` on the same text, writes `benchmarks/results/variants.json`, and prints the table of
docs/pages/variants.md. Parameters that a variant has in addition to those of multi-head attention, or lacks, are taken
from or given to the feed-forward network. Arguments are overrides for all variants, after those of `EQUAL`. On 2 CPU
cores it takes about 15 minutes.
"""

import json
import math
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tinyformer.programs.doctor import variants

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
    "score additive, ALiBi": "additive+alibi",
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
    "sandwich": ["block=sandwich"],
    "reordered": ["block=reordered"],
}
"""The overrides of each; the defaults are multi-head attention, scaled dot products and rotary positions."""


def train(overrides: list[str], folder: Path) -> dict[str, Any]:
    """The results of a run with these overrides."""
    command = [sys.executable, "train.py", *EQUAL, *overrides, f"hydra.run.dir={folder}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def unigram_entropy(text: str) -> float:
    """The loss in nats per character of a model that knows only the frequency of each character."""
    counts = Counter(text)
    return -sum(count / len(text) * math.log(count / len(text)) for count in counts.values())


def table(rows: dict[str, dict[str, object]]) -> str:
    """The rows in Markdown, the best first."""
    lines = ["| variant | overrides | `d_ff` | parameters | val loss |", "|---|---|---|---|---|"]
    for name, row in sorted(rows.items(), key=lambda item: item[1]["val/loss"]):
        overrides = " ".join(f"`{override}`" for override in row["overrides"])
        lines.append(f"| {name} | {overrides} | {row['d_ff']} | {row['num_parameters']:,} | {row['val/loss']:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Train all, print the table, and write the figures."""
    given = sys.argv[1:]
    files = [Path(word.partition("=")[2]) for word in given if word.startswith("data.files=")]
    if len(files) != 1 or not files[0].is_file():
        sys.exit("One text is needed: python benchmarks/variants.py data.files=shakespeare.txt")
    given = [word if not word.startswith("data.files=") else f"data.files={files[0].resolve()}" for word in given]
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, overrides) in enumerate(VARIANTS.items()):
            results = train([*overrides, *given], Path(folder) / f"run-{number}")
            d_ff = results["matched"]["size"]
            kept = ("val/loss", "num_parameters", "attention_kernel", "seconds", "steps", "device", "precision")
            rows[name] = {"overrides": overrides, "d_ff": d_ff, **{key: results[key] for key in kept}}
            print(f"{name:<24} {results['val/loss']:.4f}  {results['num_parameters']:,}  d_ff {d_ff}", flush=True)
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True)
    record = {
        "command": [
            "python",
            "benchmarks/variants.py",
            *(word.replace(f"{files[0].resolve().parent}/", "") for word in given),
        ],
        "machine": platform.machine(),
        "python": platform.python_version(),
        "commit": commit.strip(),
        "equal": EQUAL,
        "unigram_entropy": unigram_entropy(files[0].read_text(encoding="utf-8")),
        "variants": rows,
    }
    target = ROOT / "benchmarks" / "results" / "variants.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
