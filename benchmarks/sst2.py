"""Film reviews, positive or negative: from scratch, after masked language modelling, and by a bag of words.

    pip install -c constraints.txt -e '.[bench]' && python benchmarks/sst2.py sst2

`sst2` is a folder with train.tsv, validation.tsv and test.tsv, on each line a sentence, a tab, and 0 or 1. Trains three
seeds of each recipe by `train.py`, writes `benchmarks/results/sst2.json`, and prints a table. The checkpoint, and how
much the bag of words is regularised, are chosen on the validation split alone. On one CPU core it takes 10 minutes.
"""

import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

ROOT = Path(__file__).parent.parent
SEEDS = (0, 1, 2)
RECIPE = "experiment=sst2_cpu"
MASKED = ["task=masked_lm", "task.masking.rate=0.3", "optimizer=muon", "optimizer.lr=0.005", "trainer.max_steps=1000"]
"""On the sentences of the training split, without their labels."""


def train(overrides: list[str], folder: Path, seed: int) -> dict[str, float]:
    """The results of a run with these overrides."""
    command = [sys.executable, "train.py", *overrides, f"seed={seed}", f"hydra.run.dir={folder}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "results.json").read_text())


def read_split(folder: Path, split: str) -> tuple[list[str], list[str]]:
    """Sentences and labels."""
    lines = (folder / f"{split}.tsv").read_text(encoding="utf-8").splitlines()
    sentences, labels = zip(*(line.rsplit("\t", 1) for line in lines), strict=True)
    return list(sentences), list(labels)


def bag_of_words(folder: Path) -> dict[str, float]:
    """Validation and test accuracy of logistic regression on which words and pairs of words a sentence has."""
    texts, labels = read_split(folder, "train")
    count = CountVectorizer(binary=True, ngram_range=(1, 2), token_pattern=r"\S+")
    features = count.fit_transform(texts)
    models = [LogisticRegression(C=c, max_iter=1000).fit(features, labels) for c in (0.03, 0.1, 0.3, 1.0, 3.0)]
    held_out = {split: read_split(folder, split) for split in ("validation", "test")}
    scored = {name: (count.transform(sentences), truth) for name, (sentences, truth) in held_out.items()}
    best = max(models, key=lambda model: model.score(*scored["validation"]))
    return {split: float(best.score(*data)) for split, data in scored.items()}


def main() -> None:
    """Measure, write and print."""
    data = Path(sys.argv[1]).resolve()
    common, rows = [RECIPE, f"data.files={data}"], {}
    with tempfile.TemporaryDirectory() as temporary:
        for seed in SEEDS:
            folder = Path(temporary)
            masked = train([*common, "tokenizer.vocab_size=16000", *MASKED], folder / f"masked-{seed}", seed)
            start = f"init_from={folder}/masked-{seed}/checkpoints/last.ckpt"
            for name, overrides in {"from scratch": [], "after masked LM": [start]}.items():
                found = train([*common, *overrides], folder / f"{name.replace(' ', '-')}-{seed}", seed)
                row = {key: found[key] for key in ("best/val/accuracy", "test/accuracy", "test/macro_f1", "seconds")}
                rows.setdefault(name, []).append({"seed": seed, **row})
            print(f"seed {seed}: masked LM {masked['val/accuracy']:.1%} of hidden tokens", flush=True)
    words = bag_of_words(data)
    results = {
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "bag_of_words": words,
        "rows": rows,
    }
    (ROOT / "benchmarks" / "results" / "sst2.json").write_text(json.dumps(results, indent=1) + "\n")
    for name, runs in rows.items():
        accuracies = [run["test/accuracy"] for run in runs]
        spread = f"{statistics.mean(accuracies):.4f} ± {statistics.stdev(accuracies):.4f}"
        print(f"| {name} | {', '.join(f'{accuracy:.4f}' for accuracy in accuracies)} | {spread} |")
    print(f"| bag of words, logistic regression | {words['test']:.4f} | |")


if __name__ == "__main__":
    main()
