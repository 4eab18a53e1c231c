"""How similar generated texts are to references, as the reference implementations measure it."""

import math
import sys
from collections.abc import Sequence
from typing import Any


def text_metrics(outputs: Sequence[str], references: Sequence[str]) -> dict[str, float | None]:
    """BLEU, chrF, ROUGE and exact match of texts.

    - `bleu` and `chrf`: of the corpus, from 0 to 100, by `sacrebleu` with its defaults (Papineni et al. 2002; Popović
      2015; Post 2018, arXiv 1804.08771). BLEU is smoothed where no n-gram of a length agrees, and 0 if no token does or
      no output has four tokens.
    - `rouge1`, `rougeL`: mean F1 of single words and of the longest common subsequence, from 0 to 100, by `rouge-score`
      with stems (Lin 2004). It reads the letters a to z and digits only, so that it is 0 in other scripts.
    - `exact_match`: share of outputs that equal their reference.

    Args:
        outputs: the generated texts, at least one.
        references: as many texts.
    """
    from sacrebleu import corpus_bleu, corpus_chrf  # noqa: PLC0415 -- half a second that most runs do not need

    scorer = _rouge_scorer()
    rouge = [scorer.score(reference, output) for output, reference in zip(outputs, references, strict=True)]
    return {
        "bleu": corpus_bleu(list(outputs), [list(references)]).score,
        "chrf": corpus_chrf(list(outputs), [list(references)]).score,
        **{kind: 100 * math.fsum(scores[kind].fmeasure for scores in rouge) / len(rouge) for kind in rouge[0]},
        "exact_match": sum(map(str.__eq__, outputs, references)) / len(outputs),
    }


def text_similarity(output: str, reference: str) -> float:
    """The chrF of one text, from 0 to 100 (Popović 2015)."""
    from sacrebleu import sentence_chrf  # noqa: PLC0415

    return sentence_chrf(output, [reference]).score


def _rouge_scorer() -> Any:
    from absl import logging  # noqa: PLC0415
    from rouge_score.rouge_scorer import RougeScorer  # noqa: PLC0415 -- nltk, for its stems, takes a second

    # Else the next configuration of Python's logging closes the stream that was standard error at absl's import.
    logging.get_absl_handler().python_handler.setStream(sys.__stderr__)
    return RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
