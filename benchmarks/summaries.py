"""Baselines for summaries of docstrings: the body's first sentence, a constant, and the function's name in words.

    python benchmarks/summaries.py [data.split_seed=1]

On the test pairs of `experiment=summarise_cpu`, which overrides change, with the texts as its model reads them. The
constant is the training summary that is most similar to others. The name is that of the function, class or module whose
docstring it is, which the model does not see: `get_content_type` becomes "get content type". Prints ROUGE-1 and ROUGE-L
of each, after half a minute.
"""

import re
import sys
from collections.abc import Sequence

from hydra.utils import instantiate

from tinyformer.config.launch import compose_run
from tinyformer.data import DataModule, PairSplit
from tinyformer.data.sources.pydoc import Library
from tinyformer.tasks.text_metrics import text_metrics

NUM_CONSTANTS, NUM_COMPARED = 40, 100


def words_of(name: str) -> str:
    """The words of a name in snake_case or CamelCase."""
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)).lower()


def names_by_pair() -> dict[tuple[str, str], str]:
    """The names of functions, classes and modules, by the body and the summary of their docstrings."""
    names: dict[tuple[str, str], str] = {}
    for docstring in Library().docstrings():
        summary, _, body = docstring.text.partition("\n")
        names.setdefault((body.strip(), summary.strip()), docstring.name)
    return names


def first_sentence(text: str) -> str:
    """The text up to the first full stop that a space follows, or to the first empty line."""
    return re.split(r"(?<=\.)\s|\n\s*\n", text, maxsplit=1)[0]


def best_constant(split: PairSplit) -> str:
    """Of `NUM_CONSTANTS` summaries, the one with the largest mean ROUGE-L to `NUM_COMPARED` others."""
    summaries = [split.target(row) for row in range(NUM_COMPARED)]
    return max(summaries[:NUM_CONSTANTS], key=lambda one: rouge([one] * NUM_COMPARED, summaries)["rougeL"])


def rouge(outputs: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """ROUGE-1 and ROUGE-L."""
    metrics = text_metrics(outputs, references)
    return {name: float(metrics[name] or 0.0) for name in ("rouge1", "rougeL")}


def main() -> None:
    """Print the scores."""
    config, _ = compose_run("train", ["experiment=summarise_cpu", *sys.argv[1:]])
    data: DataModule = instantiate(config.datamodule, _convert_="all")
    data.prepare()
    test, names = data.splits["test"], names_by_pair()
    rows = range(test.num_documents)
    sources, references = [test.source(row) for row in rows], [test.target(row) for row in rows]
    # What the model reads of a long text is its beginning.
    of_row = [
        next(name for (body, whole), name in names.items() if body.startswith(source) and whole.startswith(summary))
        for source, summary in zip(sources, references, strict=True)
    ]
    outputs = {
        "first sentence of the body": list(map(first_sentence, sources)),
        "best constant": [best_constant(data.splits["train"])] * len(rows),
        "name in words": list(map(words_of, of_row)),
    }
    for name, texts in outputs.items():
        scores = rouge(texts, references)
        print(f"{name:<27} ROUGE-1 {scores['rouge1']:.1f}, ROUGE-L {scores['rougeL']:.1f}, such as {texts[0]!r}")


if __name__ == "__main__":
    main()
