"""`task=span` from the command line: a run, its files, its checkpoint, its analyses, and what is refused."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from commands import SMALL, Program, Trained, ran, results_of, table
from model.models import answerer

import tinyformer
from tinyformer.errors import ArgumentError
from tinyformer.model.model import Model
from tinyformer.run import pipeline

SQUAD = "task=span data=squad data.files=squad tokenizer=byte model.max_seq_len=48 hydra.run.dir=run"
CITIES = ["Rome", "Oslo", "Bonn", "Lima", "Kyiv", "Doha"]


def paragraph(number: int, has_answer: bool) -> dict:
    """A paragraph with two questions; with 20 to 60 letters, some of them take several windows."""
    home, work = CITIES[number % 6], CITIES[(number + 1 + number // 6) % 6]
    context = f"{'So it is. ' * (number % 4)}She lives in {home}, and works in {work}."
    answers = [[{"text": text, "answer_start": context.index(text)}] for text in (home, work)]
    lives = {"question": "Where does she live?", "answers": answers[0]}
    works = {"question": "Where does she work?", "answers": answers[1] if has_answer else []}
    return {"context": context, "qas": [lives, works]}


def write_squad(train: int = 20, dev: int = 6, test: int = 4, has_answer: bool = True) -> None:
    Path("squad").mkdir(exist_ok=True)
    numbers = itertools.count()
    for split, size in (("train", train), ("dev", dev), ("test", test)):
        paragraphs = [paragraph(next(numbers), has_answer) for _ in range(size)]
        Path("squad", f"{split}-v1.1.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))


@pytest.fixture(autouse=True)
def squad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_squad()


def test_an_answer_is_read_in_windows_of_the_given_stride() -> None:
    model, context = answerer(), "the cat sat in the tree and looked at the birds of the garden"
    usual, overlapping = model.answer("who", context), model.answer("who", context, stride=1)
    model.task.stride = 1
    assert model.answer("who", context) == overlapping != usual


@pytest.mark.slow
def test_a_run_its_continuation_its_evaluation_and_its_analyses(
    program: Program, trained: Trained, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = []
    monkeypatch.setattr(pipeline, "find_memory_shortage", lambda *facts: longest.append(facts[-1]))
    out = ran(program, "train.py", SMALL, SQUAD, "data.stride=10 data.max_question_length=8")
    assert longest == [48]  # tokens of a window, not of a whole context
    assert ", 40 questions truncated" in out
    assert "without question  F1 50.0%, exact match 50.0% at most" in out
    results = results_of("run")
    names = ("loss", "accuracy", "exact_match", "f1", "f1_without_question")
    assert {f"{split}/{name}" for split in ("val", "test") for name in names} <= results.keys()
    worst = table("run/worst_examples.csv")
    assert len(worst) == 8  # questions of the test split
    scores = [float(row["f1"]) for row in worst]
    assert scores == sorted(scores)
    assert sum(scores) / 8 == pytest.approx(results["test/f1"])
    assert all(row["prediction"] in row["context"] and row["answer"] in CITIES for row in worst)
    assert table("run/attention/heads.csv")[-1]["induction"]
    assert Path("run/attention/step_000004.png").exists()
    ran(program, "train.py", "resume=run trainer.max_steps=6")
    assert results_of("run")["steps"] == 6
    checkpoint = "run/checkpoints/last.ckpt"
    ran(program, "evaluate.py", f"checkpoint={checkpoint} data.files=squad hydra.run.dir=evaluated")
    for name in names:
        assert results_of("evaluated")[f"val/{name}"] == pytest.approx(results_of("run")[f"val/{name}"], abs=1e-5)
    for analysis in ("heads", "importance", "prune", "residual", "gradients", "maps"):
        number = "" if analysis == "prune" else "analysis.num_windows=8"
        evaluated = f"checkpoint={checkpoint} data.files=squad analysis={analysis} callbacks.attention=null {number}"
        ran(program, "evaluate.py", evaluated, f"hydra.run.dir={analysis}")
        assert Path(f"{analysis}/{'ablation' if analysis == 'heads' else analysis}.csv").exists()
    other = f"checkpoint={checkpoint} data=text data.files=book.txt"
    objective = "task.objective._target_", "tinyformer.tasks.SpanExtraction"
    refuse_changed(trained.last, *objective, "Transformer and a SpanExtraction, which do not belong together")
    for script, arguments, message in (
        ("evaluate.py", other, "text: has no questions about contexts"),
        ("evaluate.py", f"checkpoint={checkpoint} data.files=squad generate.prompt=a", "cannot generate text"),
        ("train.py", f"init_from={checkpoint} task=seq2seq", "is of class Transformer, and this run trains Enc"),
    ):
        ended = program(script, arguments)
        assert (ended.code, ended.out) == (2, ""), ended.err
        assert message in ended.err
    model = tinyformer.load(checkpoint)
    assert isinstance(model, Model)
    predicted = table("evaluated/worst_examples.csv")
    found = model.answer([row["question"] for row in predicted], [row["context"] for row in predicted])
    assert [one.text for one in found] == [row["prediction"] for row in predicted]
    assert model.logits("a text").shape == (1, 7, 2)
    for arguments in (
        ("", "c"),
        ("q", ["a", "b"]),
        (["q", "r"], ["a", " "]),
        ([], "c"),
        ("\ud800", "c"),
        ("q", "c", 0),
    ):
        with pytest.raises(ArgumentError, match=r"^(questions|contexts|stride)=|surrogate pair"):
            model.answer(*arguments)
    for key, value in (("stride", "x"), ("max_question_length", -1), ("max_question_length", True)):
        refuse_changed(checkpoint, f"data.{key}", value, f"data.{key}={value!r} is no positive integer")


def refuse_changed(checkpoint: str | Path, key: str, value: object, message: str) -> None:
    """A checkpoint with another override is not loaded."""
    raw = torch.load(checkpoint, weights_only=True)
    raw["tinyformer"]["overrides"][key] = value
    torch.save(raw, "other.ckpt")
    with pytest.raises(ArgumentError) as caught:
        tinyformer.load("other.ckpt")
    assert message in str(caught.value)


@pytest.mark.slow
def test_a_model_learns_to_read_the_question(program: Program) -> None:
    write_squad(100, 10, 20)
    settings = "model.max_seq_len=96 model.d_model=32 trainer.max_steps=300 trainer.val_check_interval=100"
    ran(program, "train.py", SMALL, SQUAD, settings, "data.batch_size=20 callbacks.attention=null")
    results = results_of("run")
    assert results["test/f1"] >= results["test/f1_without_question"] + 0.3


@pytest.mark.slow
def test_no_answer(program: Program) -> None:
    write_squad(has_answer=False)
    ended = program("train.py", SMALL, SQUAD)
    assert (ended.code, ended.out) == (2, "")
    assert "task.objective.no_answer_threshold=null: 20 of 40 questions of the train split have no answer" in ended.err
    assert not Path("run").exists()
    out = ran(program, "train.py", SMALL, SQUAD, "task.objective.no_answer_threshold=-1000")
    assert "no answer              F1 100.0% of questions without an answer, 0.0% of the others" in out
    checkpoint = "checkpoint=run/checkpoints/last.ckpt data.files=squad task.objective.no_answer_threshold=1000"
    ran(program, "evaluate.py", checkpoint, "hydra.run.dir=evaluated")
    assert results_of("run")["val/f1_unanswerable"] == 1.0
    assert results_of("evaluated")["val/f1_unanswerable"] == 0.0


MISTAKES = {
    "data.files=none: the file does not exist": SQUAD.replace("files=squad", "files=none"),
    "source=text: has no questions about contexts": "task=span data=text data.files=squad",
    "data=induction: has no questions about contexts for task=span": "task=span data=induction",
    "data.stride=45: must be less than 45, or no two windows of model.max_seq_len=48": f"{SQUAD} data.stride=45",
    "generate.prompt='Who?': SpanExtraction cannot generate text": f"{SQUAD} generate.prompt=Who?",
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(message: str, program: Program) -> None:
    ended = program("train.py", SMALL, MISTAKES[message])
    assert (ended.code, ended.out) == (2, ""), ended.err
    assert message in ended.err
    assert not Path("run").exists()
