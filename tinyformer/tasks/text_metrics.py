"""Agreement of texts with references: BLEU, chrF and ROUGE of texts, exact match and F1 of answers as in SQuAD."""

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from tinyformer.data.sources.squad import answer_words

BLOCK = 256
"""The number of start words whose spans are scored at a time, which bounds the memory."""


def bleu_tokenizers() -> list[str]:
    """The tokenizers of `sacrebleu` that BLEU can use without an installation or a download, by name."""
    from sacrebleu.utils import SACREBLEU_DIR  # noqa: PLC0415

    has_model = Path(SACREBLEU_DIR, "models", "flores200sacrebleuspm").exists()
    usable = {"ja-mecab": find_spec("ipadic"), "flores200": has_model and find_spec("sentencepiece")}
    return ["13a", "intl", "zh", "char", *(name for name, found in usable.items() if found)]


def text_metrics(outputs: Sequence[str], references: Sequence[str], tokenize: str = "13a") -> dict[str, float | None]:
    """BLEU, chrF, ROUGE and exact match of at least one text and as many references.

    - `bleu` and `chrf`: of the corpus, from 0 to 100, by `sacrebleu` with its defaults (Papineni et al. 2002; Popović
      2015; Post 2018, arXiv 1804.08771), apart from the tokenizer of BLEU, see `bleu_tokenizers`. BLEU is smoothed if
      no n-gram of some length agrees; it is 0 if no token agrees, or if no output has four tokens.
    - `rouge1`, `rougeL`: mean F1 of single words and of the longest common subsequence, from 0 to 100, by `rouge-score`
      with stems (Lin 2004). Only the letters a to z and digits are compared, so that ROUGE is 0 in other scripts.
    - `exact_match`: share of outputs that equal their reference.
    """
    from absl import logging  # noqa: PLC0415 -- a second, with nltk for the stems, that most runs do not need
    from rouge_score.rouge_scorer import RougeScorer  # noqa: PLC0415
    from sacrebleu import corpus_bleu, corpus_chrf  # noqa: PLC0415

    # Otherwise, the next configuration of Python's logging closes the stream that was standard error at absl's import.
    logging.get_absl_handler().python_handler.setStream(sys.__stderr__)
    scorer = RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
    rouge = [scorer.score(reference, output) for output, reference in zip(outputs, references, strict=True)]
    return {
        "bleu": corpus_bleu(list(outputs), [list(references)], tokenize=tokenize).score,
        "chrf": corpus_chrf(list(outputs), [list(references)]).score,
        **{kind: 100 * math.fsum(scores[kind].fmeasure for scores in rouge) / len(rouge) for kind in rouge[0]},
        "exact_match": sum(map(str.__eq__, outputs, references)) / len(outputs),
    }


def text_similarity(output: str, reference: str) -> float:
    """The chrF of one text, from 0 to 100 (Popović 2015)."""
    from sacrebleu import sentence_chrf  # noqa: PLC0415

    return sentence_chrf(output, [reference]).score


def answer_scores(prediction: str, answers: Sequence[str]) -> tuple[float, float]:
    """Exact match and F1 of a prediction, each with the answer that agrees best; from 0 to 1, by `torchmetrics`.

    As in SQuAD 2.0 (Rajpurkar et al. 2018, arXiv 1806.03822), an unanswerable question has the empty answer. Answers
    without words (see `answer_words`) are left out if another answer has words. If prediction or answer has no words,
    F1 is 1 if neither has words, and 0 otherwise. A prediction is empty if the model gives no answer.
    """
    from torchmetrics.functional.text import squad  # noqa: PLC0415 -- half a second that most runs do not need

    texts = [answer for answer in answers if answer_words(answer)] or [""]
    target: dict[str, Any] = {"id": "", "answers": {"text": texts, "answer_start": [0] * len(texts)}}
    scores = squad([{"id": "", "prediction_text": prediction}], [target])
    return float(scores["exact_match"]) / 100, float(scores["f1"]) / 100


def character_f1(prediction: str, answers: Sequence[str]) -> float:
    """The F1 of the letters and digits of a prediction with the answer that agrees best, in any script; from 0 to 1."""
    predicted, *others = [[c for c in text.lower() if c.isalnum()] for text in (prediction, *(answers or [""]))]
    return max(_f1(predicted, other) for other in others)


def scores_without_question(
    contexts: Sequence[str], answers: Sequence[Sequence[str]], max_words: int
) -> tuple[float, float]:
    """The highest exact match and F1 of answers that depend on the context alone, from 0 to 1.

    For each context, the answer that scores best over all its questions is chosen: for exact match, from the answers to
    these questions; for F1, from these answers and all spans of words of the context. Either may be empty. The
    scores are upper bounds for a model that does not see the question; for F1, only if the model answers in whole words
    (parts of words seldom score better). To reach the bounds, a model would have to know the answers. If each context
    has a single question, the bounds are 1.

    `answers` has an empty list for an unanswerable question; spans have at most `max_words` words.
    """
    by_context: dict[str, list[Sequence[str]]] = defaultdict(list)
    for context, texts in zip(contexts, answers, strict=True):
        by_context[context].append(texts)
    exact, f1 = [], []
    for context, questions in by_context.items():
        references = [{tuple(answer_words(text)) for text in texts} - {()} or {()} for texts in questions]
        frequencies = Counter(answer for words in references for answer in words)
        exact.append(max(frequencies.values()))
        words = answer_words(context)
        # A longer span has a lower F1 than the best of the answers themselves.
        longest = min(len(words), max_words, 2 * sum(max(map(len, texts)) for texts in references))
        scores = [sum(max(_f1(answer, other) for other in texts) for texts in references) for answer in frequencies]
        for begin in range(0, len(words), BLOCK):
            begins = range(begin, min(begin + BLOCK, len(words)))
            scores.append(float(_span_f1(words, references, begins, longest).max(initial=0.0)))
        f1.append(max(scores))
    return sum(exact) / len(answers), math.fsum(f1) / len(answers)


def _f1(answer: Sequence[str], other: Sequence[str]) -> float:
    """The F1 of two answers, given as words; 1 if neither has words."""
    if not answer or not other:
        return float(answer == other)
    return 2 * (Counter(answer) & Counter(other)).total() / (len(answer) + len(other))


def _span_f1(
    context: Sequence[str], references: Sequence[set[tuple[str, ...]]], begins: range, longest: int
) -> Float[np.ndarray, "begins lengths"]:
    """The F1 of each span of words of a context, by its first word and its length, summed over several questions.

    `references` has the answers to each question; the context and the answers are sequences of words.
    """
    total = np.zeros((len(begins), longest))
    first, length = np.asarray(begins)[:, None], 1 + np.arange(longest)
    end = np.minimum(first + length, len(context))
    for answers in references:
        best = np.zeros_like(total)
        for answer in filter(None, answers):
            shared = np.zeros_like(total)
            for word, number in Counter(answer).items():
                count_before = np.cumsum([0, *(word == other for other in context)])
                shared += np.minimum(count_before[end] - count_before[first], number)
            best = np.maximum(best, 2 * shared / (length + len(answer)))
        total += np.where(first + length <= len(context), best, 0)
    return total
