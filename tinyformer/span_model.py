"""A trained model for extractive question answering in Python: its answers are spans of contexts."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, overload

import torch
from jaxtyping import Float
from torch import Tensor

from tinyformer import inspection
from tinyformer.batch import Batch, tensors
from tinyformer.data import Question, Questions, QuestionSplit, TextTokenizer, tokenise_questions
from tinyformer.data.files import SURROGATE
from tinyformer.data.questions import EXTRA_TOKENS
from tinyformer.errors import ArgumentError
from tinyformer.inspection.forward import ForwardPass, Replacement
from tinyformer.inspection.inspected import Head
from tinyformer.model import SOME_TEXTS, Model, Texts
from tinyformer.nn import Transformer
from tinyformer.tasks import Prediction, SpanExtraction


class SpanModel(Model):
    """A trained model that answers questions with spans of their contexts; made by `load`.

    Args:
        network: the model.
        tokenizer: its tokenizer.
        task: the task that it was trained for.
        max_question_length: maximum number of tokens of a question; longer ones are truncated.
        stride: see `tinyformer.data.QuestionTexts.cut`.
        origin: the checkpoint of its weights.
    """

    task: SpanExtraction

    def __init__(
        self,
        network: Transformer,
        tokenizer: TextTokenizer | None,
        task: SpanExtraction,
        max_question_length: int = 64,
        stride: int | None = None,
        origin: "inspection.Origin | None" = None,
    ) -> None:
        super().__init__(network, tokenizer, task, origin)
        self.max_question_length, self.stride = max_question_length, stride

    def answer(
        self, questions: str | Sequence[str], contexts: str | Sequence[str], stride: int | None = None
    ) -> list[Prediction]:
        """The answer to each question; its text is empty where the model predicts that the context has none.

        Args:
            questions: the questions; long ones are truncated, as in the model's run.
            contexts: the context of each question, of any length, or one context for all questions.
            stride: see `tinyformer.data.QuestionTexts.cut`; None for that of the model's run.

        Raises:
            ArgumentError: a text is empty or no text, there are not as many contexts as questions, or the stride is no
                positive integer.
        """
        stride = self.stride if stride is None else stride
        if stride is not None and not is_positive(stride):
            raise ArgumentError("stride", stride, "must be a positive integer", {"stride": self.max_seq_len // 2})
        return self.task.answer(self.network, self._windows("questions", questions, contexts, stride))

    @overload
    def attention(self, texts: str, contexts: str | None = None) -> "inspection.TextMaps": ...

    @overload
    def attention(
        self, texts: Sequence[str | tuple[str, str]] | Tensor, contexts: str | Sequence[str] | None = None
    ) -> "list[inspection.TextMaps]": ...

    def attention(
        self, texts: Texts, contexts: str | Sequence[str] | None = None
    ) -> "inspection.TextMaps | list[inspection.TextMaps]":
        """The exact attention maps of a question and its context, as the model reads them; see `TextMaps`.

        Args:
            texts: a question; for several, the result is a list with the maps of each. Without contexts, texts or token
                ids as in `Model.attention`.
            contexts: the context of each question, or one for all.

        Raises:
            ArgumentError: see `answer` and `Model.attention`; or a context does not fit into one window.
        """
        if contexts is None:
            return super().attention(texts)
        if isinstance(texts, Tensor):
            raise ArgumentError("contexts", contexts, "must be None for token ids, which are used as they are")
        split = self._windows("texts", texts, contexts, self.stride)
        for row, length in enumerate(split.lengths[:, 1].tolist()):
            room = self.max_seq_len - EXTRA_TOKENS - int(split.lengths[row, 0])
            if length > room:
                reason = f"must be at most {room:,} tokens, those that the model reads beside the question"
                raise ArgumentError(f"len(contexts[{row}])", length, reason)
        windows = Questions(split)
        device = self.network.encoder.token_embedding.weight.device
        batches = (windows[row] for row in range(len(windows)))
        maps = [self._maps(batch["inputs"][0].to(device)) for batch in batches]
        return maps[0] if isinstance(texts, str) else maps

    def run(  # type: ignore[override]
        self,
        texts: Texts,
        contexts: str | Sequence[str] | None = None,
        capture: str | Sequence[str] = (),
        replace: Mapping[str, Replacement] | None = None,
    ) -> ForwardPass:
        """A forward pass that returns activations, or replaces them, see `Model.run`.

        Each window of a context is a row, in order; a context that fits into one is one row.

        Args:
            texts: the questions; without contexts, texts or token ids as in `Model.run`.
            contexts: the context of each question, or one for all.
            capture: names of `points`.
            replace: for points, the replacement.

        Raises:
            ArgumentError: see `Model.run` and `answer`.
        """
        self._require_no_point("contexts", contexts, capture)
        return self._run(self._batch(texts, contexts), capture, replace)

    def ablated(
        self,
        heads: Sequence[Head],
        mode: str = "zero",
        texts: Texts | None = None,
        contexts: str | Sequence[str] | None = None,
    ) -> AbstractContextManager[None]:
        """Ablate heads in all that the model computes inside the block, see `Model.ablated`.

        Args:
            heads: (layer, head) pairs.
            mode: `zero`, `mean` or `resample`.
            texts: those that the replacement is taken from, see `run`; not needed for `zero`.
            contexts: see `run`.

        Raises:
            ArgumentError: see `Model.ablated` and `answer`.
        """
        return self._ablated(heads, mode, None if texts is None else self._batch(texts, contexts))

    @torch.no_grad()
    def loss(  # type: ignore[override]
        self, texts: str | Sequence[str], contexts: str | Sequence[str], answers: str | Sequence[str]
    ) -> Float[Tensor, " questions"]:
        """The loss of each answer in nats: the mean over its first and last token, and over the windows of its context.

        Args:
            texts: the questions.
            contexts: see `run`.
            answers: the answer to each question, whose first occurrence in the context counts; empty if there is none.

        Raises:
            ArgumentError: see `answer`; there are not as many answers as questions, or a context does not hold its
                answer.
        """
        split = self._windows("texts", texts, contexts, self.stride, answers)
        nats, targets = self.task.nats(self.network, self._batch_of(split))
        rows = torch.from_numpy(split.window_rows).to(nats.device)
        sums = nats.new_zeros(2, split.num_documents).index_add(1, rows, torch.stack([nats, targets.to(nats.dtype)]))
        return sums[0] / sums[1]

    def _windows(
        self,
        argument: str,
        questions: Texts,
        contexts: str | Sequence[str],
        stride: int | None,
        answers: str | Sequence[str] | None = None,
    ) -> QuestionSplit:
        """Questions and their contexts, as the model reads them.

        Args:
            argument: the name of the argument that holds the questions.
            questions: see `answer`.
            contexts: see `answer`.
            stride: see `tinyformer.data.QuestionTexts.cut`.
            answers: see `loss`; None where they are not needed.
        """
        asked, told = _texts(argument, questions), _texts("contexts", contexts)
        told = told * len(asked) if isinstance(contexts, str) else told
        if len(told) != len(asked):
            raise ArgumentError("contexts", contexts, f"must be one text, or {len(asked)}, as many as `{argument}`")
        given = [""] * len(asked) if answers is None else [answers] if isinstance(answers, str) else answers
        is_list = isinstance(given, Sequence) and all(isinstance(answer, str) for answer in given)
        if not is_list or len(given) != len(asked):
            number = "a text" if len(asked) == 1 else f"{len(asked)} texts, one for each question"
            raise ArgumentError("answers", answers, f"must be {number}; empty where the context has none")
        rows = []
        for index, (question, context, answer) in enumerate(zip(asked, told, given, strict=True)):
            if answer not in context:
                raise ArgumentError(f"answers[{index}]", answer, "must be a part of its context")
            texts, starts = ([answer], [context.index(answer)]) if answer else ([], [])
            rows.append(Question(question, context, texts, starts))
        return tokenise_questions(rows, self.tokenizer).cut(self.max_seq_len, self.max_question_length, stride)

    def _batch(self, texts: Texts, contexts: str | Sequence[str] | None = None) -> Batch:
        """Texts, or the windows of questions and contexts, as a batch."""
        if contexts is None:
            return super()._batch(texts)
        if isinstance(texts, Tensor):
            raise ArgumentError("contexts", contexts, "must be None for token ids, which are used as they are")
        return self._batch_of(self._windows("texts", texts, contexts, self.stride))

    def _batch_of(self, split: QuestionSplit) -> Batch:
        """All windows of a split as one batch, on the network's device."""
        device = self.network.encoder.token_embedding.weight.device
        batch = Questions(split).__getitems__(list(range(split.num_windows)))
        moved: Any = {name: tensor.to(device) for name, tensor in tensors(batch).items()}
        return moved


def _texts(argument: str, value: Any) -> list[str]:
    """One text or several.

    Raises:
        ArgumentError: it is something else, or one of them is empty or cannot be encoded.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(one, str) and one.strip() for one in texts):
        raise ArgumentError(
            argument, value, "must be a text, or a list of texts, none of them empty", {argument: SOME_TEXTS}
        )
    if any(map(SURROGATE.search, texts)):
        raise ArgumentError(argument, value, "holds half of a surrogate pair, which is no text")
    return list(texts)


def is_positive(value: Any) -> bool:
    """Whether a value is a positive integer that fits into 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63
