"""What a translator has to beat: copying the source, the most frequent target, and a word-by-word dictionary.

    python benchmarks/translation.py verses_es_en

`verses_es_en` is a folder with train.tsv, validation.tsv and test.tsv, whose columns are `source` and `target`. The
dictionary is IBM model 1 (Brown et al. 1993) as `nltk` trains it, in five rounds on the first 10,000 training pairs:
each word of the source becomes the word that is most probable given it. Prints the test BLEU and chrF of each, after a
minute.
"""

import re
import sys
from collections import Counter

from nltk.translate import AlignedSent, IBMModel1

from tinyformer.data import TextFiles
from tinyformer.tasks.text_metrics import text_metrics

NUM_PAIRS, NUM_ROUNDS = 10_000, 5


def words(text: str) -> list[str]:
    """The words and punctuation marks of a text."""
    return re.findall(r"\w+|[^\w\s]", text)


def main() -> None:
    """Print the scores."""
    splits = TextFiles(sys.argv[1]).load_pairs()
    train, test = splits["train"], splits["test"]
    pairs = zip(train["text"][:NUM_PAIRS], train["pair"][:NUM_PAIRS], strict=True)
    model = IBMModel1([AlignedSent(words(target), words(source)) for source, target in pairs], NUM_ROUNDS)
    table: dict[str, Counter[str]] = {}
    for target, of_sources in model.translation_table.items():
        for source, probability in of_sources.items():
            if source is not None:
                table.setdefault(source, Counter())[target] = probability
    best = {source: targets.most_common(1)[0][0] for source, targets in table.items()}
    outputs = {
        "copying the source": test["text"],
        "most frequent target": [Counter(train["pair"]).most_common(1)[0][0]] * len(test),
        "IBM model 1": [" ".join(best.get(word, word) for word in words(text)) for text in test["text"]],
    }
    for name, texts in outputs.items():
        metrics = text_metrics(texts, test["pair"])
        print(f"{name:<22} BLEU {metrics['bleu']:.1f}, chrF {metrics['chrf']:.1f}")


if __name__ == "__main__":
    main()
