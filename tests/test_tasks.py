"""The tasks beside causal language modelling, as users run them: runs, their files, checkpoints and analyses."""

import itertools
import json
import random
import re
from pathlib import Path

import pytest
import torch
from commands import SMALL, Program, Trained, ran, results_of, table, weights_of
from model.models import answerer

import tinyformer
from tinyformer.checkpoint.file import load_checkpoint
from tinyformer.errors import ArgumentError
from tinyformer.files import write_table

TINY = f"{SMALL} model.num_layers=1 callbacks.attention=null trainer.val_check_interval=2"
MASKED = "task=masked_lm data=text data.files=book.txt tokenizer=byte"
CLASSES = "task=classification data=text data.files=reviews tokenizer=byte data.label_column=label"
GOOD, BAD = ("fine warm bright lovely", "dull cold grey awful")


@pytest.fixture
def reviews(tmp_path: Path) -> None:
    """Three splits of reviews whose words determine the label."""
    draw = random.Random(0)
    (tmp_path / "reviews").mkdir()
    for split, number in (("train", 64), ("validation", 24), ("test", 24)):
        rows = [(draw.sample((BAD, GOOD)[row % 2].split(), k=1 + row % 3), row % 2) for row in range(number)]
        lines = ["text,label", *(f"{' '.join(words)} 🙂,{label}" for words, label in rows)]
        (tmp_path / "reviews" / f"{split}.csv").write_text("\n".join(lines))


# Masked language modelling.


def test_a_masked_model_is_trained_evaluated_and_analysed(program: Program, book: Path) -> None:
    out = ran(program, "train.py", TINY, MASKED, "hydra.run.dir=run")
    assert "A sample" not in out
    trained = results_of("run")
    assert trained["val/pseudo_perplexity"] > 1
    assert not {"val/perplexity", "val/bits_per_byte"} & trained.keys()  # only masked tokens are scored
    evaluated = "checkpoint=run/checkpoints/last.ckpt data.files=book.txt callbacks.attention=null"
    analysis = "analysis=heads score=true hydra.run.dir=evaluated"
    assert "layer 0 head 0" in ran(program, "evaluate.py", evaluated, analysis)
    for name in ("loss", "accuracy", "pseudo_perplexity", "majority_share"):
        assert results_of("evaluated")[f"val/{name}"] == pytest.approx(trained[f"val/{name}"], abs=1e-5)


# Classification.


def test_a_classifier_learns_and_is_tested_with_its_best_weights(program: Program, reviews: None) -> None:
    settings = "optimizer.lr=1e-2 trainer.max_steps=60 trainer.val_check_interval=20"
    ran(program, "train.py", TINY, CLASSES, settings, "data.batch_size=16 hydra.run.dir=run")
    results = results_of("run")
    assert results["test/accuracy"] >= 0.9
    assert results["best/val/accuracy"] >= 0.9
    assert results["val/majority_share"] == results["test/majority_share"] == 0.5
    confusion = [[int(number) for number in [*row.values()][1:]] for row in table("run/confusion.csv")]
    assert (confusion[0][0] + confusion[1][1]) / 24 == pytest.approx(results["test/accuracy"])
    assert len(table("run/worst_examples.csv")) == 24
    # The test scores the best weights, which are not the last.
    evaluated = "callbacks.attention=null split=test hydra.run.dir"
    ran(program, "evaluate.py", f"checkpoint=run/checkpoints/best.ckpt data.files=reviews {evaluated}=best")
    ran(program, "evaluate.py", f"checkpoint=run/checkpoints/last.ckpt data.files=reviews {evaluated}=last")
    assert results_of("best")["test/loss"] == pytest.approx(results["test/loss"], abs=1e-5)
    assert results_of("last")["test/loss"] != pytest.approx(results["test/loss"], abs=1e-4)
    assert table("best/confusion.csv") == table("run/confusion.csv")


@pytest.mark.slow
def test_the_labels_of_the_test_split_do_not_influence_the_weights(program: Program, reviews: None) -> None:
    settings = f"{TINY} {CLASSES} trainer.max_steps=6 optimizer.lr=3e-3"
    ran(program, "train.py", settings, "hydra.run.dir=first")
    test = Path("reviews/test.csv")
    test.write_text(test.read_text().translate({ord("0"): "1", ord("1"): "0"}))
    ran(program, "train.py", settings, "hydra.run.dir=second")
    assert results_of("first")["test/accuracy"] == pytest.approx(1 - results_of("second")["test/accuracy"])
    first, second = weights_of("first"), weights_of("second")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_a_classifier_starts_from_any_checkpoint(program: Program, reviews: None, book: Path) -> None:
    ran(program, "train.py", TINY, MASKED, "hydra.run.dir=masked")
    ran(program, "train.py", TINY, MASKED.replace("masked_lm", "causal_lm"), "hydra.run.dir=causal")
    for start in ("masked", "causal"):
        frozen = f"init_from={start}/checkpoints/last.ckpt freeze_encoder=true hydra.run.dir=from_{start}"
        ran(program, "train.py", TINY, CLASSES.replace("tokenizer=byte", ""), frozen)
        old, new = (weights_of(run) for run in (start, f"from_{start}"))
        encoder = [name for name in new if ".encoder." in name]
        for name in encoder:
            rows = len(old[name])  # a causal vocabulary has no <mask>
            assert torch.equal(new[name][:rows], old[name]), name
        assert len(encoder) > 5
        assert new["network.readout.proj.weight"].abs().sum() > 0


# Encoder–decoders.

PAIRS = "task=seq2seq data=text data.files=pairs.tsv tokenizer=byte hydra.run.dir=run"


@pytest.fixture
def pairs(tmp_path: Path) -> None:
    rows = [(f"{n} {n * 7 % 10}", f"{n * 7 % 10}-{n}") for n in range(80)]
    (tmp_path / "pairs.tsv").write_text("source\ttarget\n" + "".join(f"{one}\t{two}\n" for one, two in rows))


def evaluate(program: Program, *overrides: str) -> tuple[str, dict]:
    """Evaluate on pairs, and return what is printed and the results."""
    own = "checkpoint=run/checkpoints/last.ckpt data.files=pairs.tsv callbacks.attention=null hydra.run.dir=evaluated"
    return ran(program, "evaluate.py", own, *overrides), results_of("evaluated")


@pytest.mark.slow
def test_a_translator_its_continuation_and_its_evaluation(program: Program, pairs: None) -> None:
    overrides = "cross_attention=gqa cross_attention.score=additive model.num_encoder_layers=1"
    out = ran(program, "train.py", SMALL, PAIRS, overrides)
    results = results_of("run")
    names = ("loss", "accuracy", "bleu", "chrf", "rouge1", "rougeL", "exact_match")
    assert {f"{split}/{name}" for split in ("val", "test") for name in names} <= results.keys()
    outputs = table("run/translations.csv")
    assert len(outputs) == 4
    assert results["sample"] == [row["output"] for row in outputs[:3]]
    assert f"source     {outputs[0]['source']}" in out
    heads = table("run/attention/heads.csv")
    kinds = [(row["kind"], row["layer"]) for row in heads[::2]]
    assert kinds == [("encoder", "0"), ("decoder", "0"), ("decoder", "1"), ("cross", "0"), ("cross", "1")]
    ran(program, "train.py", "resume=run trainer.max_steps=6")
    assert results_of("run")["steps"] == 6
    out, evaluated = evaluate(program)
    assert re.search(r"\nvalidation +held out, 4 pairs, \d+ tokens\n", out)
    for name in ("loss", "bleu", "chrf", "num_decoded"):
        assert evaluated[f"val/{name}"] == pytest.approx(results_of("run")[f"val/{name}"], abs=1e-4)
    for limit, number in (("2", 6), ("0.5", 36)):  # batches, or a fraction of those of the 72 training pairs
        _, few = evaluate(program, f"split=train data.batch_size=3 trainer.limit_val_batches={limit}")
        assert few["train/num_decoded"] == len(table("evaluated/translations.csv")) == number
    _, prompted = evaluate(program, "'generate.prompt=[3 1,4 8]' generate.beams=2")
    assert prompted["sample"] == tinyformer.load("run/checkpoints/last.ckpt").generate(["3 1", "4 8"], beams=2)


@pytest.mark.slow
def test_a_run_from_a_pruned_translator_keeps_its_heads(program: Program, pairs: None) -> None:
    sizes = "model.num_heads=4 model.d_model=32"
    ran(program, "train.py", SMALL, PAIRS, sizes)
    evaluate(program, "analysis=prune analysis.num_windows=100")
    Path("evaluated/pruned.ckpt").rename("pruned.ckpt")
    heads = load_checkpoint("pruned.ckpt").overrides["model.pruned_heads"]
    assert tinyformer.load("pruned.ckpt").network.pruned_heads() == heads
    ran(program, "train.py", SMALL, PAIRS.replace("=run", "=next"), sizes, "init_from=pruned.ckpt")
    Path("pruned.ckpt").unlink()  # the run does not need it any more
    ran(program, "train.py", "resume=next trainer.max_steps=6")
    assert load_checkpoint("next/checkpoints/last.ckpt").overrides["model.pruned_heads"] == heads


# Rows without labels.

UNLABELLED = {
    "classification": ["text"],
    "classification 'data.text_column=[one,two]'": ["one", "two"],
    "seq2seq data.too_long=skip task.objective.num_decoded=1": ["source"],
    "span data=squad": ["question", "context"],
}


@pytest.mark.slow
@pytest.mark.parametrize("task", UNLABELLED)
def test_the_rows_of_a_file_are_predicted(task: str, program: Program, tmp_path: Path) -> None:
    columns, letters = UNLABELLED[task], ["ab", "b c", "de" * 12, "x", "d"]
    rows = [{"id": f"0{n}"} | {name: letters[(n + i) % 5] for i, name in enumerate(columns)} for n in range(20)]
    answers = [{"text": [letters[(n + 1) % 5]], "answer_start": [0]} for n in range(20)]
    known = [row | {"answers": answers[n], "target": f"{n}", "label": n % 2} for n, row in enumerate(rows)]
    Path("known.jsonl").write_text("\n".join(map(json.dumps, known)))
    write_table(Path("new.csv"), ["id", *columns], [[*row.values()] for row in rows])
    own = "tokenizer=byte data.files=known.jsonl data.max_examples=9 data.validation_fraction=0.2 hydra.run.dir=run"
    ran(program, "train.py", TINY, "data=text", f"task={task}", own)
    predicted = "checkpoint=run/checkpoints/last.ckpt predict=true hydra.run.dir=out data.files"
    out = ran(program, "evaluate.py", f"{predicted}=new.csv")
    assert ("documents truncated" in out) == task.startswith("classification")
    found, model = table("out/predictions.csv"), tinyformer.load("run/checkpoints/last.ckpt")
    assert [{name: row[name] for name in ("id", *columns)} for row in found] == rows
    texts = [[row[name] for row in rows] for name in columns]
    if task == "classification":
        shares = model.logits([text[:15] for text in texts[0]]).softmax(-1)
        assert [float(row["probability_1"]) for row in found] == pytest.approx(shares[:, 1].tolist(), abs=1e-5)
    elif not task.startswith("classification"):
        expected = model.generate(*texts) if len(texts) == 1 else [one.text for one in model.answer(*texts)]
        assert [row["prediction"] for row in found] == expected
    ran(program, "evaluate.py", f"{predicted}=known.jsonl")  # where labels are not read
    again = table("out/predictions.csv")
    assert [row["prediction"] for row in again] == [row["prediction"] for row in found]
    assert [json.loads(row["answers"]) for row in again] == answers


# Questions about contexts.

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


def write_squad(has_answer: bool = True) -> None:
    Path("squad").mkdir()
    numbers = itertools.count()
    for split, size in (("train", 20), ("dev", 6), ("test", 4)):
        paragraphs = [paragraph(next(numbers), has_answer) for _ in range(size)]
        Path("squad", f"{split}-v1.1.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))


def test_an_answer_is_read_in_windows_of_the_given_stride() -> None:
    model, context = answerer(), "the cat sat in the tree and looked at the birds of the garden"
    usual, overlapping = model.answer("who", context), model.answer("who", context, stride=1)
    model.task.stride = 1
    assert model.answer("who", context) == overlapping != usual


@pytest.mark.slow
def test_a_reader_its_continuation_and_its_evaluation(program: Program, trained: Trained, book: Path) -> None:
    write_squad()
    out = ran(program, "train.py", SMALL, SQUAD, "data.stride=10 data.max_question_length=8")
    assert ", 40 questions truncated" in out
    assert "without question  F1 50.0%, exact match 50.0% at most" in out
    results = results_of("run")
    names = ("loss", "accuracy", "exact_match", "f1", "f1_without_question")
    assert {f"{split}/{name}" for split in ("val", "test") for name in names} <= results.keys()
    worst = table("run/worst_examples.csv")
    assert len(worst) == 8  # questions of the test split
    assert sum(float(row["f1"]) for row in worst) / 8 == pytest.approx(results["test/f1"])
    assert all(row["prediction"] in row["context"] and row["answer"] in CITIES for row in worst)
    ran(program, "train.py", "resume=run trainer.max_steps=6")
    assert results_of("run")["steps"] == 6
    checkpoint = "run/checkpoints/last.ckpt"
    ran(program, "evaluate.py", f"checkpoint={checkpoint} data.files=squad hydra.run.dir=evaluated")
    for name in names:
        assert results_of("evaluated")[f"val/{name}"] == pytest.approx(results_of("run")[f"val/{name}"], abs=1e-5)
    ended = program("evaluate.py", f"checkpoint={checkpoint} data=text data.files=book.txt")
    assert (ended.code, ended.out, "text: has no questions about contexts" in ended.err) == (2, "", True), ended.err
    model = tinyformer.load(checkpoint)
    predicted = table("evaluated/worst_examples.csv")
    found = model.answer([row["question"] for row in predicted], [row["context"] for row in predicted])
    assert [one.text for one in found] == [row["prediction"] for row in predicted]
    assert model.logits("a text").shape == (1, 7, 2)
    for arguments in (("", "c"), ("q", ["a", "b"]), (["q", "r"], ["a", " "]), ("q", "c", 0)):
        with pytest.raises(ArgumentError, match=r"^(questions|contexts|stride)="):
            model.answer(*arguments)


@pytest.mark.slow
def test_no_answer(program: Program) -> None:
    write_squad(has_answer=False)
    ended = program("train.py", SMALL, SQUAD)
    assert (ended.code, ended.out) == (2, "")
    assert "task.objective.no_answer_threshold=null: 20 of 40 questions of the train split have no answer" in ended.err
    assert not Path("run").exists()
    out = ran(program, "train.py", SMALL, SQUAD, "task.objective.no_answer_threshold=-1000")
    assert "no answer              F1 100.0% of questions without an answer, 0.0% of the other questions" in out
    checkpoint = "checkpoint=run/checkpoints/last.ckpt data.files=squad task.objective.no_answer_threshold=1000"
    ran(program, "evaluate.py", checkpoint, "hydra.run.dir=evaluated")
    assert [results_of(run)["val/f1_unanswerable"] for run in ("run", "evaluated")] == [1.0, 0.0]
