"""Extractive question answering: the answer to a question is a span of its context."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tinyformer.data import Question, Questions, QuestionSplit, TextTokenizer, tokenise_questions
from tinyformer.data.batches.loader import EvaluationBatches
from tinyformer.data.batches.windows import Batch, tensors
from tinyformer.errors import ArgumentError, require_at_least
from tinyformer.tasks.task import Table, Task
from tinyformer.tasks.text_metrics import answer_scores, character_f1, scores_without_question
from tinyformer.tasks.user_texts import SOME_TEXTS, TextReader, Texts, texts_of

NUM_WINDOWS = 32
"""The number of windows in a batch of `SpanExtraction.answer`."""


@dataclass(frozen=True)
class Prediction:
    """The answer that a model predicts."""

    row: int  # the index of the question in its split
    text: str  # empty if the model predicts that the context has no answer
    score: float  # the sum of the scores of the first and the last token of the best span
    # The sum of both scores of the first token of the sequence, which means no answer; the smallest of all windows.
    null_score: float


class SpanExtraction(Task):
    """The first and the last token of the answer are predicted, each by a softmax over the tokens of the context.

    The input is `[eos, *question, eos, *context]`. The loss is the mean of the two cross-entropies (Devlin et al. 2019,
    arXiv 1810.04805). In windows without the answer, both targets are the first token of the sequence. The predicted
    answer is the span with the highest sum of start and end score, start ≤ end, over all windows of the context.

    Args:
        max_answer_length: maximum number of tokens of a predicted answer; a tokenizer of bytes or characters needs a
            larger value.
        no_answer_threshold: the model gives no answer if the score of the span of the sequence's first token exceeds
            that of the best span by more than this value, as in SQuAD 2.0; None: the model always answers.
    """

    monitor = "accuracy"
    higher_is_better = True
    tests_best = True
    unit = "window"

    def __init__(self, max_answer_length: int = 30, no_answer_threshold: float | int | None = None) -> None:
        require_at_least(1, {"max_answer_length": 30}, max_answer_length=max_answer_length)
        self.max_answer_length, self.no_answer_threshold = max_answer_length, no_answer_threshold
        # Settings for the windows of a user's question and context, see `tinyformer.data.QuestionTexts.cut`.
        self.max_question_length: int = 64
        self.stride: int | None = None
        # The predictions for the split that `final_metrics` scored last: the test split, if a run has one.
        self.predictions: list[Prediction] = []

    def require_answers(self, splits: Mapping[str, QuestionSplit]) -> None:
        """Refuse splits with unanswerable questions if the model always gives an answer."""
        for name, split in splits.items() if self.no_answer_threshold is None else ():
            if number := split.num_unanswerable:
                reason = f"{number:,} of {split.num_documents:,} questions of the {name} split have no answer"
                raise ArgumentError("no_answer_threshold", None, reason, {"no_answer_threshold": 0.0})

    def read(self, reader: TextReader, texts: Texts, contexts: str | Sequence[str] | None = None) -> Batch:
        """A batch of questions with their contexts (one for each, or one for all); each window of a context is a row.

        If `contexts` is None, `texts` may be any texts or token ids, see `Task.read`.
        """
        if contexts is None:
            return super().read(reader, texts)
        if isinstance(texts, Tensor):
            raise ArgumentError("contexts", contexts, "must be None if the texts are token ids")
        return _batch_of(self.ask(reader, texts, contexts), reader.device)

    def read_scored(
        self,
        reader: TextReader,
        texts: Texts,
        contexts: str | Sequence[str] | None = None,
        answers: str | Sequence[str] | None = None,
    ) -> Batch:
        """A batch of questions, contexts and answers, see `ask`; all three are required."""
        return _batch_of(self.ask(reader, texts, contexts, [] if answers is None else answers), reader.device)

    def nats_of_texts(self, reader: TextReader, batch: Batch) -> tuple[Float[Tensor, " texts"], Int[Tensor, " texts"]]:
        """The nats and the number of targets of each question, summed over the windows of its context."""
        nats, targets = self.nats(reader.network, batch)
        sums = nats.new_zeros(2, int(batch["rows"].max()) + 1)
        sums.index_add_(1, batch["rows"], torch.stack([nats, targets.to(nats.dtype)]))
        return sums[0], sums[1].to(targets.dtype)

    def ask(
        self,
        reader: TextReader,
        questions: Any,
        contexts: Any,
        answers: Any = None,
        stride: int | None = None,
        argument: str = "texts",
    ) -> QuestionSplit:
        """Tokenise questions with their contexts (one for each, or one for all), and divide contexts into windows.

        An answer's position is its first occurrence in the context; an empty answer means that the question has none.
        Answers are needed only for a loss. `argument` is the name of the questions' argument in errors.
        """
        room = reader.network.max_seq_len
        question_list, context_list = _texts(argument, questions), _texts("contexts", contexts)
        number = len(question_list)
        context_list = context_list * number if isinstance(contexts, str) else context_list
        if len(context_list) != number:
            raise ArgumentError("contexts", contexts, f"must be one text, or {number}, as many as `{argument}`")
        answer_list = [""] * number if answers is None else [answers] if isinstance(answers, str) else answers
        if len(answer_list) != number:
            raise ArgumentError("answers", answers, f"must be {number} texts, one for each question")
        stride = self.stride if stride is None else stride
        require_at_least(1, {"stride": room // 2}, stride=stride)
        rows, triples = [], zip(question_list, context_list, answer_list, strict=True)
        for index, (question, context, answer) in enumerate(triples):
            if answer not in context:
                raise ArgumentError(f"answers[{index}]", answer, "must be a part of its context")
            texts, starts = ([answer], [context.index(answer)]) if answer else ([], [])
            rows.append(Question(question, context, texts, starts))
        return tokenise_questions(rows, reader.tokenizer).cut(room, self.max_question_length, stride)

    def logits(self, network: nn.Module, batch: Batch) -> Float[Tensor, "batch 2 seq"]:
        """The scores of each token as the first and as the last token of the answer, in fp32 or fp64.

        Scores are -inf outside of the context, except at the first token of the sequence.
        """
        scores = self.forward(network, batch).mT
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        allowed = _in_context(batch)
        allowed[:, 0] = True
        return scores.masked_fill(~allowed.unsqueeze(1), -torch.inf)

    def loss(self, network: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        return _nats(self.logits(network, batch), batch).mean()

    def nats(self, network: nn.Module, batch: Batch) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"]]:
        """The negative log-likelihood of each answer, a mean over its first and last token; one target per window."""
        return _nats(self.logits(network, batch), batch), self.num_targets(batch)

    def score(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums over the windows of a batch: `nats`, and three numbers of windows.

        `windows` counts all windows, `judged` the windows that determine the accuracy (see `metrics`), and `correct`
        the judged windows whose most probable first and last token are both right.
        """
        logits, judged = self.logits(network, batch), batch["starts"] > 0
        if self.no_answer_threshold is not None:
            judged = judged | ~batch["answerable"]
        correct = judged & (logits.argmax(dim=2) == _targets(batch)).all(dim=1)
        sums = {"nats": _nats(logits, batch), "windows": self.num_targets(batch), "judged": judged, "correct": correct}
        return {name: values.sum().to(torch.float32) for name, values in sums.items()}

    def metrics(self, sums: Mapping[str, Tensor], split: Any) -> dict[str, float | None]:
        """`loss`, in nats per window; `accuracy`; and `num_judged`, the number of windows that determine the accuracy.

        Accuracy is the share of windows whose first and last token are both right (0 if there are none), among windows
        that contain the answer and, with a `no_answer_threshold`, windows of unanswerable questions. The other windows
        of long contexts are left out: with them, a model that never finds an answer could have the highest accuracy.
        """
        number = int(sums["judged"])
        accuracy = float(sums["correct"]) / max(number, 1)
        return {"loss": float(sums["nats"]) / float(sums["windows"]), "accuracy": accuracy, "num_judged": number}

    def final_metrics(
        self, network: nn.Module, split: QuestionSplit, tokenizer: TextTokenizer
    ) -> dict[str, float | None]:
        """`exact_match` and `f1` of the predicted answers, from 0 to 1, see `answer_scores`; and `num_answered`.

        - `f1_characters`: see `character_f1`.
        - `f1_without_question` and `exact_match_without_question`: upper bounds for a model that does not see the
          question, see `scores_without_question`; None if contexts have fewer than two questions on average.
        - `exact_match_ceiling`, `f1_ceiling`: scores of the true token spans, if their texts are not the answers.
        - `f1_answerable`, `f1_unanswerable`: the F1 of the questions with and without an answer, if a split has both.
        """
        self.predictions, answers = self.answer(network, split), split.answers()
        scores = [answer_scores(prediction.text, answers[prediction.row]) for prediction in self.predictions]
        exact, f1 = (sum(column) / len(scores) for column in zip(*scores, strict=True))
        blind_exact = blind_f1 = None
        contexts = split.table["pair"].to_pylist()
        if len(contexts) >= 2 * len(set(contexts)):  # a word has at least one token
            blind_exact, blind_f1 = scores_without_question(contexts, answers, self.max_answer_length)
        characters = sum(character_f1(one.text, answers[one.row]) for one in self.predictions) / len(scores)
        metrics = {"exact_match": exact, "f1": f1, "f1_characters": characters, "num_answered": len(scores)}
        metrics |= {"exact_match_without_question": blind_exact, "f1_without_question": blind_f1}
        given_back = split.texts_of([(first, last) if first >= 0 else (0, -1) for first, last in split.spans.tolist()])
        ideal = [answer_scores(*pair) for pair in zip(given_back, answers, strict=True)]
        best_exact, best_f1 = (sum(column) / len(ideal) for column in zip(*ideal, strict=True))
        metrics |= {"exact_match_ceiling": best_exact, "f1_ceiling": best_f1} if best_exact < 1 else {}
        parts: dict[str, list[float]] = {"f1_answerable": [], "f1_unanswerable": []}
        for (_, score), texts in zip(scores, answers, strict=True):
            parts["f1_answerable" if texts else "f1_unanswerable"].append(score)
        return metrics | ({name: sum(part) / len(part) for name, part in parts.items()} if all(parts.values()) else {})

    def predict(self, network: nn.Module, batches: Any, split: QuestionSplit) -> Table:
        return ["prediction"], [[answer.text] for answer in self.answer(network, split)]

    @torch.no_grad()
    def answer(self, network: nn.Module, split: QuestionSplit) -> list[Prediction]:
        device, was_training = next(network.parameters()).device, network.training
        network.eval()
        best = [(torch.inf, 0, -1)] * split.num_documents  # the negated score, the first and the last token
        null_scores = [torch.inf] * split.num_documents
        batches = EvaluationBatches(Questions(split), split.sizes, NUM_WINDOWS)
        for index in range(len(batches)):
            batch = batches[index]
            moved = cast(Batch, {name: tensor.to(device) for name, tensor in tensors(batch).items()})
            logits = self.logits(network, moved)
            spans = best_spans(logits, _in_context(moved), self.max_answer_length)
            columns = (batch["rows"], *spans, logits[:, :, 0].sum(dim=1), batch["contexts"])
            for window, score, first, last, null, context in zip(*(c.tolist() for c in columns), strict=True):
                row, shift = int(split.window_rows[window]), int(split.window_starts[window]) - context
                if score > -torch.inf:  # otherwise, the window has no token of the context
                    # Among equal scores the first and shortest span, as in `best_spans`, in any order of the windows.
                    best[row] = min(best[row], (-score, first + shift, last + shift))
                null_scores[row] = min(null_scores[row], null)
        network.train(was_training)
        threshold = torch.inf if self.no_answer_threshold is None else self.no_answer_threshold
        chosen = [
            (0, -1) if null + negated > threshold else (first, last)
            for (negated, first, last), null in zip(best, null_scores, strict=True)
        ]
        texts = zip(split.texts_of(chosen), best, null_scores, strict=True)
        return [Prediction(row, text, -negated, null) for row, (text, (negated, *_), null) in enumerate(texts)]

    def describe(self, metrics: Mapping[str, float | None], split: QuestionSplit) -> dict[str, str | None]:
        others = "" if self.no_answer_threshold is None else ", or whose question has no answer"
        judged = f"{metrics['num_judged']:,} windows that contain the answer{others}"
        lines: dict[str, str | None] = {"both ends": f"{metrics['accuracy']:.1%} correct, of {judged}"}
        for heading, end in (("answers", ""), ("tokenizer allows", "_ceiling")):
            if metrics.get(f"f1{end}") is not None:
                scores = f"F1 {metrics['f1' + end]:.1%}, exact match {metrics['exact_match' + end]:.1%}"
                lines[heading] = f"{scores}, of {metrics['num_answered']:,} questions"
        lines |= {"F1 of characters": f"{metrics['f1_characters']:.1%}"} if "f1_characters" in metrics else {}
        if metrics.get("exact_match_without_question") is not None:
            f1, exact_match = metrics["f1_without_question"], metrics["exact_match_without_question"]
            lines["without question"] = f"F1 {f1:.1%}, exact match {exact_match:.1%} at most"
        if metrics.get("f1_unanswerable") is not None:
            unanswerable = f"F1 {metrics['f1_unanswerable']:.1%} of questions without an answer"
            lines["no answer"] = f"{unanswerable}, {metrics['f1_answerable']:.1%} of the other questions"
        if lost := split.num_lost(self.max_answer_length):
            answers = f"{lost:,} of {split.num_documents - split.num_unanswerable:,} answers"
            longer = f"longer than max_answer_length={self.max_answer_length}"
            lines["out of reach"] = f"{answers}: {longer}, or not whole in any window"
        return lines


def _targets(batch: Batch) -> Int[Tensor, "batch 2"]:
    return torch.stack([batch["starts"], batch["ends"]], dim=1)


def _nats(logits: Float[Tensor, "batch 2 seq"], batch: Batch) -> Float[Tensor, " batch"]:
    return F.cross_entropy(logits.mT, _targets(batch), reduction="none").mean(dim=1)


def _in_context(batch: Batch) -> Bool[Tensor, "batch seq"]:
    position = torch.arange(batch["inputs"].shape[1], device=batch["inputs"].device)
    return (position >= batch["contexts"].unsqueeze(1)) & (position < batch["lengths"].unsqueeze(1))


def best_spans(
    logits: Float[Tensor, "batch 2 seq"], allowed: Bool[Tensor, "batch seq"], max_length: int
) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"], Int[Tensor, " batch"]]:
    """In each row, the span with the highest sum of the start score of its first and the end score of its last token.

    A span has at most `max_length` tokens, all allowed. Among equal sums, the first and shortest span is chosen; a row
    without allowed tokens has the score -inf. Returns the sums, the first tokens and the last tokens of the spans.
    """
    starts, ends = logits.masked_fill(~allowed.unsqueeze(1), -torch.inf).unbind(dim=1)
    max_length = min(max_length, starts.shape[1])
    # The sum for each first token and length; it is -inf for spans that reach beyond the last token.
    sums = starts.unsqueeze(2) + F.pad(ends, (0, max_length - 1), value=-torch.inf).unfold(1, max_length, 1)
    scores, index = sums.flatten(1).max(dim=1)
    first = index // max_length
    return scores, first, first + index % max_length


def _batch_of(split: QuestionSplit, device: torch.device) -> Batch:
    """All windows of a split as one batch; `rows` has the index of each window's question."""
    batch = Questions(split).__getitems__(list(range(split.num_windows)))
    batch["rows"] = torch.from_numpy(split.window_rows)
    return cast(Batch, {name: tensor.to(device) for name, tensor in tensors(batch).items()})


def require_one_window(batch: Batch) -> None:
    """Refuse a context that does not fit into one window of the model."""
    for row, number in enumerate(batch["rows"].bincount().tolist() if "contexts" in batch else ()):
        if number > 1:
            first = batch["rows"].tolist().index(row)
            room = int(batch["lengths"][first] - batch["contexts"][first])
            reason = f"must be 1: at most {room:,} tokens of a context fit into the model next to this question"
            raise ArgumentError(f"num_windows(contexts[{row}])", number, reason)


def _texts(argument: str, value: Any) -> list[str]:
    """One text or several, see `texts_of`, none of which is empty."""
    texts = texts_of(argument, value)
    if not texts or not all(map(str.strip, texts)):
        reason = "must be a text, or a list of texts, none of them empty"
        raise ArgumentError(argument, value, reason, {argument: SOME_TEXTS[0]})
    return texts
