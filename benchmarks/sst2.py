"""Film reviews, positive or negative: with and without averaged weights, after masked LM, and by a bag of words.

    pip install -c constraints.txt -e '.[bench]' && python benchmarks/sst2.py sst2

`sst2` is a folder with train.tsv, validation.tsv and test.tsv, on each line a sentence, a tab, and 0 or 1. Trains three
seeds of each recipe by `train.py`, writes `benchmarks/results/sst2.json`, and prints a table. The checkpoint, and the
regularisation of the bag of words, are chosen on the validation split alone. Masked LM is trained once for each text,
on the sentences of the training split without their labels or on Python's documentation; three seeds start from it.
Half an hour on 2 CPU cores.
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
KEYS = ("best/val/accuracy", "test/accuracy", "test/macro_f1", "seconds")
PLAIN = "callbacks.averaged=null"
MASKED = [
    PLAIN,
    "task=masked_lm",
    "task.masking.rate=0.3",
    "optimizer=muon",
    "optimizer.lr=0.005",
    "optimizer.adamw_lr=0.003",
]
MASKED += ["trainer.max_steps=1500"]


def train(overrides: list[str], folder: Path, seed: int) -> dict[str, float]:
    """The results of a run with these overrides."""
    command = [sys.executable, "train.py", *overrides, f"seed={seed}", f"hydra.run.dir={folder}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def read_split(folder: Path, split: str) -> tuple[list[str], list[str]]:
    """Sentences and labels."""
    lines = (folder / f"{split}.tsv").read_text(encoding="utf-8").splitlines()
    sentences, labels = zip(*(line.rsplit("\t", 1) for line in lines), strict=True)
    return list(sentences), list(labels)


def bag_of_words(folder: Path) -> dict[str, float]:
    """Validation and test accuracy of logistic regression on the presence of words and word pairs in a sentence."""
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
    sentences = f"data.files={data}"
    recipes = {"the recipe": [], "without averaging": [PLAIN]}
    rows = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, text in {"the sentences": sentences, "pydoc": "data=pydoc"}.items():
            folder = Path(temporary) / f"masked-{name.replace(' ', '-')}"
            masked = train([RECIPE, text, *MASKED], folder, seed=0)
            recipes[f"after masked LM on {name}"] = [PLAIN, f"init_from={folder}/checkpoints/last.ckpt"]
            print(f"masked LM on {name}: {masked['val/accuracy']:.1%} of hidden tokens", flush=True)
        for name, overrides in recipes.items():
            rows[name] = []
            for seed in SEEDS:
                folder = Path(temporary) / f"{name.replace(' ', '-')}-{seed}"
                found = train([RECIPE, sentences, *overrides], folder, seed)
                rows[name].append({"seed": seed} | {key: found[key] for key in KEYS})
                print(f"{name}, seed {seed}: {found['test/accuracy']:.4f}", flush=True)
    words = bag_of_words(data)
    results = {
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "bag_of_words": words,
        "rows": rows,
    }
    (ROOT / "benchmarks" / "results" / "sst2.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for name, runs in rows.items():
        accuracies = [run["test/accuracy"] for run in runs]
        spread = f"{statistics.mean(accuracies):.4f} ± {statistics.stdev(accuracies):.4f}"
        print(f"| {name} | {', '.join(f'{accuracy:.4f}' for accuracy in accuracies)} | {spread} |")
    print(f"| bag of words, logistic regression | {words['test']:.4f} | |")


if __name__ == "__main__":
    main()
