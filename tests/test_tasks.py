"""`task=masked_lm` and `task=classification`, as their users run them."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import SMALL, Program
from wandb_file import read_history

TINY = f"{SMALL} model.num_layers=1 callbacks.attention=null trainer.val_check_interval=2"
MASKED = "task=masked_lm data=text data.files=book.txt tokenizer=byte"
CLASSES = "task=classification data=text data.files=reviews tokenizer=byte data.label_column=label"
GOOD, BAD = ("fine warm bright lovely", "dull cold grey awful")


def results_of(run: str) -> dict[str, Any]:
    return json.loads(Path(run, "results.json").read_text())


def weights_of(path: str) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def write_reviews(folder: str = "reviews", flipped: bool = False, missing: bool = False) -> None:
    """Three splits of reviews, whose words tell the label; those of the test may be flipped."""
    draw = random.Random(0)
    Path(folder).mkdir(exist_ok=True)
    for split, number in (("train", 64), ("validation", 24), ("test", 24)):
        with Path(folder, f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "label"])
            for index in range(number):
                label = index % 2
                words = draw.sample((BAD, GOOD)[label].split(), k=1 + index % 3)
                shown = 1 - label if flipped and split == "test" else label
                rows.writerow([" ".join([*words, "🙂"]), "" if missing and index == 3 else shown])


@pytest.fixture
def reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_reviews()


def ran(program: Program, script: str, *overrides: str) -> str:
    ended = program(script, *overrides)
    assert ended.code == 0, ended.err
    return ended.out


# Masked language modelling.


def test_a_masked_model_is_trained_evaluated_and_analysed(program: Program, book: Path) -> None:
    out = ran(program, "train.py", TINY, MASKED, "hydra.run.dir=run")
    assert "masked token    " in out
    assert "the most frequent token makes up" in out
    assert "A sample" not in out
    trained = results_of("run")
    assert trained["val/pseudo_perplexity"] > 1
    assert trained["val/perplexity" if "val/perplexity" in trained else "val/accuracy"] <= 1
    assert "val/bits_per_byte" not in trained  # what is hidden is not the whole text
    ran(program, "evaluate.py", "checkpoint=run/checkpoints/last.ckpt hydra.run.dir=evaluated callbacks.attention=null")
    for name in ("loss", "accuracy", "pseudo_perplexity", "majority_share"):
        assert results_of("evaluated")[f"val/{name}"] == pytest.approx(trained[f"val/{name}"], abs=1e-5)
    other = "checkpoint=run/checkpoints/last.ckpt hydra.run.dir=other callbacks.attention=null data.seed=1"
    assert program("evaluate.py", other).code == 2  # there is no such key: the seed is the run's
    heads = "checkpoint=run/checkpoints/last.ckpt analysis=heads hydra.run.dir=heads callbacks.attention=null"
    assert "layer 0 head 0" in ran(program, "evaluate.py", heads)


@pytest.mark.slow
def test_a_masked_run_goes_on_as_if_unbroken(program: Program, book: Path) -> None:
    constant = "schedule=wsd schedule.warmup_steps=0 schedule.decay_fraction=0 model.dropout=0.1"
    ran(program, "train.py", TINY, MASKED, constant, "hydra.run.dir=unbroken trainer.max_steps=7")
    ran(program, "train.py", TINY, MASKED, constant, "hydra.run.dir=run")
    ran(program, "train.py", "resume=run trainer.max_steps=7")
    first, second = (weights_of(f"{run}/checkpoints/last.ckpt") for run in ("unbroken", "run"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("task.masking.rate=0", "task.masking.rate=0: "),
        ("data=induction", "a repeated block is seen from both sides"),
        ("generate.prompt=Hello", "generate.prompt=Hello: a model of MaskedLM goes on from no text"),
    ],
)
def test_what_a_masked_model_cannot_do_is_told(program: Program, book: Path, overrides: str, said: str) -> None:
    given = MASKED.replace("data=text data.files=book.txt tokenizer=byte", "") if "data=" in overrides else MASKED
    ended = program("train.py", TINY, given, overrides)
    assert ended.code == 2
    assert said in ended.err
    assert len(ended.err.strip().splitlines()) == 1


# Classification.


SLOW = pytest.mark.slow


@pytest.mark.parametrize("pooling", [pytest.param("cls", marks=SLOW), "mean", pytest.param("attention", marks=SLOW)])
def test_a_classifier_learns_and_is_tested_at_its_best(program: Program, reviews: None, pooling: str) -> None:
    settings = f"task.readout.pooling={pooling} optimizer.lr=1e-2 trainer.max_steps=60 trainer.val_check_interval=20"
    out = ran(program, "train.py", TINY, CLASSES, settings, "data.batch_size=16 hydra.run.dir=run")
    results = results_of("run")
    assert results["test/accuracy"] >= 0.9
    assert results["best/val/accuracy"] >= 0.9
    assert results["val/majority_share"] == results["test/majority_share"] == 0.5
    assert "test accuracy   " in out
    with Path("run/confusion.csv").open() as file:
        table = [[int(number) for number in row[1:]] for row in list(csv.reader(file))[1:]]
    assert (table[0][0] + table[1][1]) / 24 == pytest.approx(results["test/accuracy"])
    with Path("run/worst_examples.csv").open() as file:
        worst = list(csv.DictReader(file))
    shares = [float(row["probability_of_label"]) for row in worst]
    assert shares == sorted(shares)
    assert len(worst) == 24
    assert all("🙂" in row["text"] for row in worst if len(row["text"].encode()) < 12)
    assert Path("run/confusion.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_labels_of_the_test_decide_nothing(program: Program, reviews: None) -> None:
    settings = f"{TINY} {CLASSES} trainer.max_steps=6 optimizer.lr=3e-3"
    ran(program, "train.py", settings, "hydra.run.dir=first")
    write_reviews(flipped=True)
    ran(program, "train.py", settings, "hydra.run.dir=second")
    first, second = results_of("first"), results_of("second")
    assert first["test/accuracy"] == pytest.approx(1 - second["test/accuracy"])
    for name in ("last.ckpt", "best.ckpt"):
        one, other = (weights_of(f"{run}/checkpoints/{name}") for run in ("first", "second"))
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_weights_are_averaged_by_lightnings_callback(program: Program, reviews: None) -> None:
    averaged = "_target_=lightning.pytorch.callbacks.EMAWeightAveraging decay=0.5"
    averaged = " ".join(f"+callbacks.averaged.{field}" for field in averaged.split())
    settings = f"{TINY} {CLASSES} optimizer.lr=1e-2 schedule=wsd schedule.warmup_steps=0 schedule.decay_fraction=0"
    for step in (1, 2):
        ran(program, "train.py", settings, f"trainer.max_steps={step} hydra.run.dir=plain{step}")
        ran(program, "train.py", settings, averaged, f"trainer.max_steps={step} hydra.run.dir=averaged{step}")
    first, second = (weights_of(f"plain{step}/checkpoints/last.ckpt") for step in (1, 2))
    average = weights_of("averaged2/checkpoints/last.ckpt")
    name = "network.encoder.token_embedding.weight"
    torch.testing.assert_close(average[name], (first[name] + second[name]) / 2)
    # What is validated, kept and tested is the average; training goes on from the weights themselves.
    ran(program, "evaluate.py", "checkpoint=averaged2/checkpoints/last.ckpt hydra.run.dir=evaluated")
    assert results_of("evaluated")["val/loss"] == pytest.approx(results_of("averaged2")["val/loss"], abs=1e-5)
    ran(program, "train.py", "resume=averaged1 trainer.max_steps=2")
    resumed = weights_of("averaged1/checkpoints/last.ckpt")
    assert all(torch.equal(resumed[key], average[key]) for key in average)


@pytest.mark.slow
def test_a_classifier_starts_from_any_checkpoint(program: Program, reviews: None, book: Path) -> None:
    ran(program, "train.py", TINY, MASKED, "hydra.run.dir=masked")
    ran(program, "train.py", TINY, MASKED.replace("masked_lm", "causal_lm"), "hydra.run.dir=causal")
    for start in ("masked", "causal"):
        frozen = f"init_from={start}/checkpoints/last.ckpt freeze_encoder=true hydra.run.dir=from_{start}"
        ran(program, "train.py", TINY, CLASSES.replace("tokenizer=byte", ""), frozen)
        old, new = (weights_of(f"{run}/checkpoints/last.ckpt") for run in (start, f"from_{start}"))
        encoder = [name for name in new if ".encoder." in name]
        for name in encoder:
            rows = len(old[name])  # a causal vocabulary has no mask
            assert torch.equal(new[name][:rows], old[name]), name
        assert len(encoder) > 5
        assert new["network.readout.proj.weight"].abs().sum() > 0
    # The weights of one task and the other are not those of a new one.
    further = "init_from=from_masked/checkpoints/last.ckpt hydra.run.dir=back optimizer.lr=1e-12"
    ran(program, "train.py", TINY, MASKED.replace("tokenizer=byte", ""), further)
    old, new = (weights_of(f"{run}/checkpoints/last.ckpt") for run in ("masked", "back"))
    torch.testing.assert_close(new["network.readout.proj.weight"], old["network.readout.proj.weight"])


@pytest.mark.slow
def test_a_classifier_is_evaluated_analysed_and_kept_in_wandb(program: Program, reviews: None) -> None:
    ran(program, "train.py", TINY, CLASSES, "logger=wandb hydra.run.dir=run")
    (file,) = Path("run/wandb").glob("offline-run-*/run-*.wandb")
    last = {key: value for row in read_history(file) for key, value in row.items()}
    stored = json.loads((file.parent / "files" / last["analysis/worst_examples"]["path"]).read_text())
    assert stored["columns"] == ["text", "label", "predicted", "probability_of_label"]
    assert len(stored["data"]) == 24
    assert "analysis/confusion" in last
    assert "analysis/confusion_figure" in last
    for split, prefix in (("test", "test"), ("validation", "val")):
        given = f"checkpoint=run/checkpoints/best.ckpt split={split} hydra.run.dir={split} callbacks.attention=null"
        ran(program, "evaluate.py", given)
        assert results_of(split)[f"{prefix}/num_tokens"] == results_of("run")[f"{prefix}/num_tokens"]
    assert results_of("test")["test/loss"] == pytest.approx(results_of("run")["test/loss"], abs=1e-5)
    for analysis in ("heads", "maps"):
        given = f"checkpoint=run/checkpoints/best.ckpt analysis={analysis} hydra.run.dir={analysis}"
        ran(program, "evaluate.py", given, "callbacks.attention=null")
    assert "per example" in ran(
        program, "evaluate.py", "checkpoint=run/checkpoints/best.ckpt analysis=importance callbacks.attention=null"
    )


def test_an_imagined_label_is_told(program: Program, reviews: None) -> None:
    ran(program, "train.py", TINY, CLASSES, "hydra.run.dir=run")
    Path("other.csv").write_text("text,label\nfine,1\nodd,perhaps\n")
    ended = program("evaluate.py", "checkpoint=run/checkpoints/last.ckpt data.files=other.csv")
    assert ended.code == 2
    assert "perhaps" in ended.err
    assert "0, 1" in ended.err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("data=pydoc", "its texts have no class labels; docstrings"),
        ("data=induction", "data=induction: has no labels for classification; data=docstrings has"),
        ("data.label_column=stars", "data.label_column=stars"),
        ("data.label_column=null", "data.label_column=label"),
        ("data.label_column=text", "data.label_column=text: this column holds the text (data.text_column)"),
        ("task.readout.pooling=max", "task.readout.pooling=max: must be one of cls, mean, attention"),
        ("task.objective.label_smoothing=2", "task.objective.label_smoothing=2"),
        ("data.token_dropout=1.5", "data.token_dropout=1.5"),
        ("data.files=missing", "no label"),
    ],
)
def test_mistakes_are_told_in_a_line(program: Program, reviews: None, overrides: str, said: str) -> None:
    write_reviews("missing", missing=True)
    given = "task=classification" if overrides.startswith("data=") else CLASSES
    ended = program("train.py", TINY, given, overrides)
    assert ended.code == 2, ended.err
    assert said in ended.err
    assert len(ended.err.strip().splitlines()) == 1
    assert not list(Path().glob("outputs/**/*.ckpt"))


@pytest.mark.slow
def test_a_start_of_another_size_is_told(program: Program, reviews: None, book: Path) -> None:
    ran(program, "train.py", TINY, MASKED, "hydra.run.dir=masked")
    given = CLASSES.replace("tokenizer=byte", "init_from=masked/checkpoints/last.ckpt model.d_model=32")
    ended = program("train.py", TINY, given)
    assert ended.code == 2
    assert "init_from=masked/checkpoints/last.ckpt: does not fit this model" in ended.err
