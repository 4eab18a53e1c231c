"""`python evaluate.py`, as its users run it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import BOOK, Program, Trained, ran, results_of, table

import tinyformer


@pytest.fixture(autouse=True)
def _text(book: Path) -> None:
    """The text of the run, where an evaluation looks for it."""


def evaluate(program: Program, trained: Trained, *overrides: str) -> dict[str, Any]:
    asked = f"checkpoint={trained.last} data.files=book.txt hydra.run.dir=evaluated"
    ran(program, "evaluate.py", asked, *overrides)
    return results_of("evaluated")


def edit_checkpoint(trained: Trained, path: str, scale: float = 1.0, **overrides: str) -> None:
    """Write a copy of the checkpoint with other overrides, and with one weight scaled."""
    raw = torch.load(trained.last, weights_only=True)
    raw["state_dict"]["network.encoder.layers.0.attention.o_proj.weight"] *= scale
    raw["tinyformer"]["overrides"] |= overrides
    torch.save(raw, path)


def test_it_gives_the_loss_of_the_run(program: Program, trained: Trained) -> None:
    results = evaluate(program, trained)
    for key in ("val/loss", "val/bits_per_byte", "val/accuracy"):
        assert results[key] == pytest.approx(trained.results[key], abs=1e-5)
    for key in ("val/num_tokens", "val/num_bytes", "train/num_tokens", "num_parameters", "steps", "device"):
        assert results[key] == trained.results[key]
    assert results["attention_kernel"] == "flash"
    assert results["val/perplexity"] == pytest.approx(math.exp(results["val/loss"]))
    bits = results["val/loss"] * results["val/num_tokens"] / math.log(2) / results["val/num_bytes"]
    assert results["val/bits_per_byte"] == pytest.approx(bits)
    for picture in ("step", "measures"):
        assert Path(f"evaluated/attention/{picture}_000030.png").exists()
    heads = zip(table("evaluated/attention/heads.csv"), table(trained.folder / "attention/heads.csv"), strict=True)
    for head, trained_head in heads:
        assert head.keys() == trained_head.keys() >= {"layer", "head", "entropy", "induction"}
        assert head.pop("label") == trained_head.pop("label")
        for name, value in head.items():
            assert float(value) == pytest.approx(float(trained_head[name]), abs=1e-5)
    assert "attention/layer_01/head_01/entropy" in Path("evaluated/metrics.csv").read_text().splitlines()[0]


def test_weights_heads_and_backend_are_those_that_are_asked_for(program: Program, trained: Trained) -> None:
    eager = evaluate(program, trained, "attention.backend=eager data.batch_size=7 data.pack=document")
    assert (eager["attention_kernel"], eager["val/num_tokens"]) == ("eager", trained.results["val/num_tokens"])
    assert eager["val/loss"] == pytest.approx(trained.results["val/loss"], abs=1e-5)
    # The file alone is needed, wherever it is.
    edit_checkpoint(trained, "scaled.ckpt", scale=1.5)
    scaled = evaluate(program, trained, "checkpoint=scaled.ckpt")
    assert abs(scaled["val/loss"] - trained.results["val/loss"]) > 1e-4
    ablated = evaluate(program, trained, "'attention.ablated_heads=[[0,0],[1,1]]'")
    assert abs(ablated["val/loss"] - trained.results["val/loss"]) > 1e-6


def test_other_text_is_scored_whole(program: Program, trained: Trained) -> None:
    Path("other.txt").write_text("The cat sees 3 birds.\n" * 5)
    results = evaluate(program, trained, "data=text data.files=other.txt")
    assert results["val/num_bytes"] == 22 * 5
    assert results["val/num_unknown"] == 5  # the T of The
    Path("folder").mkdir()
    Path("folder/train.txt").write_text("In line 1 the cat sees 3 birds.\n" * 20)
    Path("folder/valid.txt").write_text("In line 2 the cat sees 4 birds.\n")
    assert evaluate(program, trained, "data.files=folder")["val/num_bytes"] == 32


def test_text_of_the_training_split_is_never_scored_as_held_out(program: Program, trained: Trained) -> None:
    """Whatever the path and the order of the data, what is added to them, and how they are divided."""
    Path("there").mkdir()
    Path("there/moved.txt").write_text(BOOK)
    Path("there/.moved.txt").write_text(BOOK)
    moved = evaluate(program, trained, f"data.files={Path('there').resolve()}")
    assert (moved["split"], moved["val/loss"]) == ("validation", pytest.approx(trained.results["val/loss"], abs=1e-5))
    facts = {"files": 1, "documents": 1, "tokens": trained.results["val/num_tokens"], "left_out": {}}
    assert trained.results["data"]["validation"] == facts | {"files": 0}  # held out of the training file
    assert trained.results["data"]["train"]["files"] == 1
    assert "\ntrain           1 file (book.txt), 1 document, 4,262 tokens\n" in trained.out
    unseen = BOOK[int(len(BOOK) * 0.8) :]  # beside the training text, 127 characters may belong to it
    new = "The mice do not see this line.\n" * 9
    Path("there/appended.txt").write_text(BOOK + new)
    for overrides, size in {
        "data.files=there/appended.txt": len(unseen) + len(new) - 127,
        "data.test_fraction=0.5 data.validation_fraction=0 split=test": len(unseen) - 127,
    }.items():
        results = evaluate(program, trained, overrides)
        assert results["test/num_bytes" if results["split"] == "test" else "val/num_bytes"] == size, overrides
        assert results["data"][results["split"]]["left_out"].keys() == {"characters of the run's training split"}


def test_a_prompt_is_continued(program: Program, trained: Trained) -> None:
    Path("prompt.txt").write_text("In line 3")
    greedy = "generate.temperature=0 generate.num_tokens=12"
    prompts = ["In line 3", "the cat sees 1 of the birds"]
    asked = f"checkpoint={trained.last} data.files=book.txt hydra.run.dir=run 'generate.prompt=[{', '.join(prompts)}]'"
    out = ran(program, "evaluate.py", asked, greedy)
    assert "prompt 2: only its last 16 tokens fit\n" in out
    first, second = results_of("run")["sample"]
    assert out.replace("\n  ", "\n").endswith(f"\nSample 1 of 2:\n{first}\n\nSample 2 of 2:\n{second}\n")
    assert first.startswith("In line 3")
    assert len(first) == len("In line 3") + 12
    likeliest = "generate.top_k=1 generate.num_tokens=12"
    assert evaluate(program, trained, likeliest, "generate.prompt_file=prompt.txt")["sample"] == first
    # In Python the same.
    model = tinyformer.load(trained.last)
    assert model.generate(prompts, num_tokens=12, temperature=0) == [first, second]
    Path("line.txt").write_text("In line 3")
    nats, [ids] = -model.logits("In line 3").log_softmax(-1)[0], model.tokenize("In line 3")[0].tolist()
    scored = evaluate(program, trained, "data=text data.files=line.txt")
    assert scored["val/loss"] == pytest.approx(float(nats[range(len(ids) - 1), ids[1:]].mean()), abs=1e-5)


MISTAKES = {
    "checkpoint=none.ckpt": "checkpoint=none.ckpt: does not exist",
    "checkpoint=foreign.ckpt": "checkpoint=foreign.ckpt: its norm._target_ calls 'posix.system'",
    "model.num_layers=3": "checkpoint=",
    "split=dev": "split=dev: should be 'train', ",
    "data.test_fraction=0.2 data.validation_fraction=0.05 split=validation": "split=validation: the run was trained on",
}


def test_mistakes_are_reported_in_a_few_lines(program: Program, trained: Trained) -> None:
    edit_checkpoint(trained, "foreign.ckpt", **{"norm._target_": "posix.system"})
    for override, said in MISTAKES.items():
        ended = program("evaluate.py", f"checkpoint={trained.last} data.files=book.txt", override)
        assert ended.code == 2, ended.err
        assert ended.err.startswith(f"Error: {said}"), ended.err
        assert len(ended.err.strip().splitlines()) <= 4


@pytest.mark.slow
def test_no_number_of_tokens_is_claimed_where_a_part_is_scored(program: Program, trained: Trained) -> None:
    asked = f"checkpoint={trained.last} data.files=book.txt trainer.limit_val_batches=1 hydra.run.dir=part"
    assert "over a part of the text (trainer.limit_val_batches=1)" in ran(program, "evaluate.py", asked)
    results = results_of("part")
    assert results["val/num_tokens"] is results["val/num_bytes"] is results["throughput/tokens_per_second"] is None
