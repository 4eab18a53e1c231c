"""Extractive question answering: loss, spans, no answer, exact match and F1 by hand."""

import itertools
import math
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from tasks.fixed import Fixed
from tinyformer.data import ByteTokenizer, Question, Questions, TextTokenizer, tokenise_questions
from tinyformer.tasks import SpanExtraction, text_metrics
from tinyformer.tasks.span import NUM_WINDOWS, best_spans
from tinyformer.tasks.text_metrics import answer_scores, character_f1, scores_without_question

# Two windows of [eos, question, eos, context, ...]; the second is shorter, and does not hold its answer.
SCORES = torch.tensor(
    [[[0.0, 0.5], [9, 9], [9, 9], [1, 0], [2, -1], [0, 3]], [[1.0, 0.5], [9, 9], [9, 9], [1, 2], [0.5, 0], [9, 9]]]
)
BATCH = {
    "inputs": torch.zeros(2, 6, dtype=torch.long),
    "lengths": torch.tensor([6, 5]),
    "contexts": torch.tensor([3, 3]),
    "starts": torch.tensor([4, 0]),
    "ends": torch.tensor([5, 0]),
    "rows": torch.tensor([0, 1]),
}


def nats(scores, target):
    return math.log(math.fsum(math.exp(score) for score in scores)) - target


def test_loss_and_accuracy_by_hand():
    expected = [
        (nats([0, 1, 2, 0], 2) + nats([0.5, 0, -1, 3], 3)) / 2,
        (nats([1, 1, 0.5], 1) + nats([0.5, 2, 0], 0.5)) / 2,
    ]
    task, network = SpanExtraction(), Fixed(SCORES)
    assert task.loss(network, BATCH).item() == pytest.approx(sum(expected) / 2)
    found, targets = task.nats(network, BATCH)
    assert found.tolist() == pytest.approx(expected)
    assert targets.tolist() == [1, 1]
    metrics = task.metrics(task.score(network, BATCH), None)
    assert metrics == {"loss": pytest.approx(sum(expected) / 2), "accuracy": 1.0, "num_judged": 1}


BYTES = ByteTokenizer().build([])


def cut(questions, max_length):
    return tokenise_questions(questions, BYTES).cut(max_length)


def every_window(split):
    return Questions(split).__getitems__(list(range(split.num_windows)))


@torch.no_grad()
@pytest.mark.parametrize(("threshold", "silent", "number"), [(None, 0, 2), (0.0, 2, 4)])
def test_windows_of_a_context_that_lack_its_answer_do_not_count(threshold, silent, number):
    """Of the windows that count, a silent model answers those without an answer only, where it may be silent."""
    questions = [
        Question("q", "." * 40 + "x", ["x"], [40]),  # in the last of its windows
        Question("q", "x" + "." * 40, ["x"], [0]),
        Question("q", "." * 10, [], []),  # two windows
    ]
    split = cut(questions, 11)
    task, batch = SpanExtraction(no_answer_threshold=threshold), every_window(split)
    assert split.num_windows > 15
    for null, scores, right in (
        (20.0, (5.0, 5.0), silent),
        (-1.0, (5.0, 5.0), 2),
        (-1.0, (5.0, -5.0), 0),  # the first token is right, the last one is not
    ):
        metrics = task.metrics(task.score(Spelled(null=null, x=scores).eval(), batch), split)
        assert (metrics["accuracy"], metrics["num_judged"]) == (right / number, number)
    split = cut([Question("q", "." * 40 + "long", ["." * 30], [0])], 11)  # an answer that is in no window
    metrics = SpanExtraction().metrics(SpanExtraction().score(Spelled(), every_window(split)), split)
    assert (metrics["accuracy"], metrics["num_judged"]) == (0.0, 0)


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 3), seq=st.integers(1, 9), longest=st.integers(1, 12))
def test_the_best_span_is_that_of_all_spans(seed, rows, seq, longest):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 4, (rows, 2, seq), generator=generator).float()  # with many ties
    allowed = torch.rand(rows, seq, generator=generator) < 0.7
    for row, found in enumerate(zip(*(part.tolist() for part in best_spans(logits, allowed, longest)), strict=True)):
        spans = [
            (float(logits[row, 0, i] + logits[row, 1, j]), -i, -j)
            for i in range(seq)
            for j in range(i, min(seq, i + longest))
            if allowed[row, i] and allowed[row, j]
        ]
        score, first, last = max(spans, default=(-math.inf, 0, 0))
        assert found == (score, -first, -last)


# Answers over the windows of a context.


class Spelled(nn.Module):
    """Scores each byte by a table: as the first and as the last of an answer; other bytes, and training, have 0."""

    def __init__(self, null=0.0, **scores):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(300, 2))
        with torch.no_grad():
            self.table[BYTES.eos_id] = null / 2
            for letter, score in scores.items():
                self.table[ord(letter)] = torch.tensor(score)

    def forward(self, tokens, mask):
        return self.table[tokens] * (not self.training)


def answers(network, *contexts, max_length=200, **options):
    split = cut([Question("abc", context, [], []) for context in contexts], max_length)
    predictions = SpanExtraction(**options).answer(network, split)
    assert network.training  # as before, but answers are those of evaluation mode
    return predictions, split


@pytest.mark.parametrize("max_length", [200, 20, 16])
def test_the_best_span_over_all_windows_is_the_answer(max_length):
    network = Spelled(x=(5.0, 0), y=(0, 5.0), a=(99.0, 99))  # the question's letters are not in a context
    long = "." * 30 + "x--y" + "." * 25 + "y" + "." * 20
    (one, other, none), split = answers(network, long, "yx", "...", max_length=max_length)
    assert (one.text, one.score, one.row) == ("x--y", 10.0, 0)
    assert (other.text, other.score) == ("y", 5.0)  # an answer does not end before it begins; the first of two
    assert (none.text, none.score) == (".", 0.0)
    assert split.num_windows == 3 if max_length == 200 else split.num_windows > 8
    assert answers(network, long, max_answer_length=3)[0][0].score == 5.0
    ((empty,), _) = answers(network, "")
    assert (empty.text, empty.score) == ("", -math.inf)


def test_of_equal_scores_the_first_span_is_taken_whatever_the_order_of_windows():
    contexts = ["." * begin + "x" + "." * (60 - begin) + "z" for begin in range(0, 50, 5)]
    found, split = answers(Spelled(x=(5.0, 5.0), z=(5.0, 5.0)), *contexts, max_length=9)
    assert split.num_windows > 8 * NUM_WINDOWS
    assert [one.text for one in found] == ["x"] * len(contexts)


def test_no_answer_by_hand():
    network = Spelled(null=7.0, x=(5.0, 0), y=(0, 5.0))
    for threshold, expected in [
        (None, ["xy", "x", "."]),  # scores 10, 5 and 0
        (0.0, ["xy", "", ""]),
        (2.0, ["xy", "x", ""]),  # 7 - 5 is not more than 2
        (-3.01, ["", "", ""]),
    ]:
        found, _ = answers(network, "..xy", ".x.", "..", no_answer_threshold=threshold)
        assert [one.text for one in found] == expected, threshold
        assert [one.null_score for one in found] == [7.0] * 3


def test_final_metrics_and_what_the_question_adds():
    questions = [
        Question("a", "the x. y", ["x."], [4]),
        Question("b", "the x. y", ["y"], [7]),
        Question("c", "x, y!", [], []),
        Question("d", "x, y!", ["y!", "x"], [3, 0]),
    ]
    split, task = cut(questions, 32), SpanExtraction(no_answer_threshold=50)
    metrics = task.final_metrics(Spelled(x=(5.0, 5.0)), split, split.tokenizer)
    assert [one.text for one in task.predictions] == ["x"] * 4
    assert metrics == {
        "exact_match": 0.5,  # of the first and the last
        "f1": 0.5,
        "f1_characters": 0.5,
        "num_answered": 4,
        "f1_answerable": pytest.approx(2 / 3),
        "f1_unanswerable": 0.0,
        "exact_match_without_question": 0.5,  # one of two questions about each context
        "f1_without_question": pytest.approx((2 * 2 / 3 + 1) / 4),  # "x. y" for the first context
    }
    first = split.first(2)
    assert task.final_metrics(Spelled(x=(5.0, 5.0)), first, split.tokenizer)["num_answered"] == 2
    assert (first.num_windows, first.answers(), len(task.predictions)) == (2, [["x."], ["y"]], 2)
    assert task.final_metrics(Spelled(), cut(questions[:1], 32), split.tokenizer)["f1_without_question"] is None
    # Answers that are not whole tokens have a ceiling.
    words = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    questions = [Question("a", "in xy now", *answer) for answer in ((["y now"], [4]), (["now"], [6]), ([], []))]
    split = tokenise_questions(questions, TextTokenizer(words)).cut(32)
    lines = task.describe({"accuracy": 0, "num_judged": 3} | task.final_metrics(Spelled(), split, BYTES), split)
    assert lines["tokenizer allows"] == "F1 83.3%, exact match 66.7%, of 3 questions"


# Exact match and F1.


@pytest.mark.parametrize(
    ("prediction", "texts", "expected"),
    [
        ("a cat and the dog", ["cat dog", "bird"], (0, 4 / 5, 2 * 6 / (13 + 6))),  # two of three words, two of two
        ("", [], (1, 1, 1)),  # no answer, and none given
        ("the", [], (1, 1, 0)),  # which has no words that count
        ("cat", [], (0, 0, 0)),
        ("", ["the", "cat"], (0, 0, 0)),  # an answer without words does not make the question unanswerable
        ("《山川》，日月。", ["山川日木", "x"], (0, 0, 3 / 4)),
    ],
)
def test_scores_by_hand(prediction, texts, expected):
    assert (*answer_scores(prediction, texts), character_f1(prediction, texts)) == pytest.approx(expected)


SHORT = st.lists(st.sampled_from(["x", "y", "z"]), min_size=1, max_size=4)


@given(
    st.lists(st.sampled_from(["x", "y", "z", "w"]), min_size=1, max_size=7),
    st.lists(st.lists(SHORT, max_size=2), min_size=1, max_size=3),
)
@example(["w", "w", "x", "y"], [[["x"]], [["y"]]])  # the best span, "x y", begins the second block, and is no answer
def test_no_answer_of_the_context_alone_scores_higher(words, questions):
    max_words = 2 if len(words) > 5 else 9
    context, texts = " ".join(words), [[" ".join(answer) for answer in answers] for answers in questions]
    ends = itertools.combinations(range(len(words) + 1), 2)
    spans = {" ".join(words[i:j]) for i, j in ends if j - i <= max_words} | {""}
    given_texts = {text for own in texts for text in own} | {""}
    f1 = max(sum(answer_scores(span, own)[1] for own in texts) for span in spans | given_texts) / len(texts)
    exact = max(sum(answer_scores(text, own)[0] for own in texts) for text in given_texts) / len(texts)
    with mock.patch.object(text_metrics, "BLOCK", 2):  # spans that are compared at once
        found = scores_without_question([context] * len(texts), texts, max_words)
    assert found == pytest.approx((exact, f1), abs=1e-6)
