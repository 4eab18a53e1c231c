"""Masked language modelling and classification as users run them."""

import random
from pathlib import Path

import pytest
import torch
from commands import SMALL, Program, ran, results_of, table, weights_of

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
    # A pair of texts, and a label that the model does not have.
    Path("other.csv").write_text("text,label\nfine,1\nodd,perhaps\n")
    for mistake, told in (("reviews analysis=maps analysis.text=[a,b]", "must be one text;"), ("other.csv", "perhaps")):
        ended = program("evaluate.py", f"checkpoint=run/checkpoints/best.ckpt data.files={mistake}")
        assert (ended.code, told in ended.err) == (2, True), ended.err


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
