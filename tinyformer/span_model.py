"""A trained model in Python that answers questions with spans of their contexts."""

from collections.abc import Sequence
from typing import Any

from tinyformer.data import Question, TextTokenizer, tokenise_questions
from tinyformer.data.files import SURROGATE
from tinyformer.errors import ArgumentError
from tinyformer.model import Model
from tinyformer.nn import Transformer
from tinyformer.tasks import Prediction, SpanExtraction


class SpanModel(Model):
    """A trained model that answers questions with spans of their contexts; made by `load`.

    Args:
        network: the model.
        tokenizer: its tokenizer.
        task: the task that it was trained for.
        max_question_length: maximum number of tokens of a question, of which the beginning is read.
        stride: see `tinyformer.data.QuestionTexts.cut`.
    """

    task: SpanExtraction

    def __init__(
        self,
        network: Transformer,
        tokenizer: TextTokenizer | None,
        task: SpanExtraction,
        max_question_length: int = 64,
        stride: int | None = None,
    ) -> None:
        super().__init__(network, tokenizer, task)
        self.max_question_length, self.stride = max_question_length, stride

    def answer(
        self, questions: str | Sequence[str], contexts: str | Sequence[str], stride: int | None = None
    ) -> list[Prediction]:
        """The answer to each question; its text is empty where the model holds that the context has none.

        Args:
            questions: the questions; of long ones the beginning is read, as in the model's run.
            contexts: the context of each question, of any length; a single one is that of all.
            stride: see `tinyformer.data.QuestionTexts.cut`; None: that of the model's run.

        Raises:
            ArgumentError: a text is empty or no text, there are not as many contexts as questions, or the stride is no
                positive integer.
        """
        asked, told = _texts("questions", questions), _texts("contexts", contexts)
        told = told * len(asked) if isinstance(contexts, str) else told
        if len(told) != len(asked):
            raise ArgumentError("contexts", contexts, f"must be one text, or {len(asked)}, as many as `questions`")
        stride = self.stride if stride is None else stride
        if stride is not None and not is_positive(stride):
            raise ArgumentError("stride", stride, "must be a positive integer", {"stride": self.max_seq_len // 2})
        rows = [Question(question, context, [], []) for question, context in zip(asked, told, strict=True)]
        split = tokenise_questions(rows, self.tokenizer).cut(self.max_seq_len, self.max_question_length, stride)
        return self.task.answer(self.network, split)


def _texts(argument: str, value: Any) -> list[str]:
    """One text or several.

    Raises:
        ArgumentError: it is something else, or one of them is empty or cannot be encoded.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(one, str) and one.strip() for one in texts):
        raise ArgumentError(argument, value, "must be a text, or a list of texts, none of them empty")
    if any(map(SURROGATE.search, texts)):
        raise ArgumentError(argument, value, "holds half of a surrogate pair, which is no text")
    return list(texts)


def is_positive(value: Any) -> bool:
    """Whether a value is a positive integer that fits into 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63
