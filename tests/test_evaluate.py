"""`python evaluate.py`, as its users run it."""

import csv
import json
import math
from pathlib import Path

import pytest
import torch
from programs import SMALL, Program

import tinyformer

TEXT = "data=text data.files=book.txt tokenizer=char data.validation_fraction=0.1 data.test_fraction=0.1"
LAST = "run/checkpoints/last.ckpt"


def results_of(run: str) -> dict[str, object]:
    return json.loads(Path(run, "results.json").read_text())


@pytest.fixture
def trained(program: Program, book: Path) -> dict[str, object]:
    """The results of a run in `run/`."""
    settings = "attention=gqa position=rotary attention.backend=flash trainer.max_steps=30 optimizer.lr=1e-2"
    ended = program("train.py", SMALL, TEXT, settings, "hydra.run.dir=run")
    assert ended.code == 0, ended.err
    return results_of("run")


def evaluate(program: Program, *overrides: str) -> dict[str, object]:
    ended = program("evaluate.py", f"checkpoint={LAST} hydra.run.dir=evaluated", *overrides)
    assert ended.code == 0, ended.err
    return results_of("evaluated")


def edit_checkpoint(path: str, **changes: object) -> None:
    """Change entries of the file beside the weights, and scale one weight by `scale`."""
    raw = torch.load(LAST, weights_only=True)
    if "scale" in changes:
        raw["state_dict"]["network.encoder.layers.0.attention.o_proj.weight"] *= changes["scale"]
    raw["tinyformer"]["config"].update(changes.get("config", {}))
    torch.save(raw, path)


def test_it_gives_the_loss_of_the_run(program: Program, trained: dict[str, object]) -> None:
    results = evaluate(program)
    for key in ("val/loss", "val/bits_per_byte", "val/accuracy"):
        assert results[key] == pytest.approx(trained[key], abs=1e-5)
    for key in ("val/num_tokens", "val/num_bytes", "train/num_tokens", "num_parameters", "steps", "device"):
        assert results[key] == trained[key]
    assert results["attention_kernel"] == "flash"
    for picture in ("step", "measures"):
        assert Path(f"evaluated/attention/{picture}_000030.png").exists()
    with Path("run/attention/heads.csv").open() as ours, Path("evaluated/attention/heads.csv").open() as theirs:
        for trained_head, head in zip(csv.DictReader(ours), csv.DictReader(theirs), strict=True):
            assert head.keys() == trained_head.keys() >= {"layer", "head", "entropy", "induction"}
            for name, value in head.items():
                assert float(value) == pytest.approx(float(trained_head[name]), abs=1e-5)
    assert "attention/layer_01/head_01/entropy" in Path("evaluated/metrics.csv").read_text().splitlines()[0]


def test_one_scaled_weight_moves_the_loss(program: Program, trained: dict[str, object]) -> None:
    edit_checkpoint("scaled.ckpt", scale=1.5)
    results = evaluate(program, "checkpoint=scaled.ckpt")
    assert abs(results["val/loss"] - trained["val/loss"]) > 1e-4


def test_the_backend_can_be_another(program: Program, trained: dict[str, object]) -> None:
    results = evaluate(program, "attention.backend=eager")
    assert results["attention_kernel"] == "eager"
    assert results["val/loss"] == pytest.approx(trained["val/loss"], abs=1e-5)


def test_heads_can_be_taken_away(program: Program, trained: dict[str, object]) -> None:
    results = evaluate(program, "'attention.ablated_heads=[[0,0],[1,1]]'")
    assert abs(results["val/loss"] - trained["val/loss"]) > 1e-6


@pytest.mark.slow
def test_splits(program: Program, trained: dict[str, object]) -> None:
    text = Path("book.txt").read_text()
    sizes = {}
    for split, prefix in {"train": "train", "validation": "val", "test": "test", "all": "val"}.items():
        sizes[split] = evaluate(program, f"split={split}")[f"{prefix}/num_bytes"]
    assert sizes["all"] == len(text.encode())
    assert sizes["train"] + sizes["validation"] + sizes["test"] == len(text.encode())
    ended = program("evaluate.py", f"checkpoint={LAST} split=dev")
    assert (ended.code, "validation" in ended.err) == (2, True)


def test_other_text_is_scored_whole(program: Program, trained: dict[str, object]) -> None:
    Path("other.txt").write_text("The cat sees 3 birds.\n" * 5)
    results = evaluate(program, "data=text data.files=other.txt")
    assert results["val/num_bytes"] == 22 * 5
    assert results["val/num_unknown"] == 5  # the T of The
    Path("folder").mkdir()
    Path("folder/train.txt").write_text("In line 1 the cat sees 3 birds.\n" * 20)
    Path("folder/valid.txt").write_text("In line 2 the cat sees 4 birds.\n")
    assert evaluate(program, "data.files=folder")["val/num_bytes"] == 32


def test_a_prompt_is_gone_on_with(program: Program, trained: dict[str, object]) -> None:
    Path("prompt.txt").write_text("In line 3")
    greedy = "generate.temperature=0 generate.num_tokens=12"
    first, second = evaluate(program, greedy, "'generate.prompt=[In line 3, the cat sees 1 of the birds]'")["sample"]
    assert first.startswith("In line 3")
    assert len(first) == len("In line 3") + 12
    likeliest = "generate.top_k=1 generate.num_tokens=12"
    assert evaluate(program, likeliest, "generate.prompt_file=prompt.txt")["sample"] == first
    # In Python the same.
    model = tinyformer.load(LAST)
    prompts = ["In line 3", "the cat sees 1 of the birds"]
    assert model.generate(prompts, num_tokens=12, temperature=0) == [first, second]
    Path("line.txt").write_text("In line 3")
    nats, [ids] = -model.logits("In line 3").log_softmax(-1)[0], model.tokenize("In line 3")[0].tolist()
    scored = evaluate(program, "data=text data.files=line.txt")
    assert scored["val/loss"] == pytest.approx(float(nats[range(len(ids) - 1), ids[1:]].mean()), abs=1e-5)


def test_a_long_prompt_is_told_in_the_summary(program: Program, trained: dict[str, object]) -> None:
    ended = program("evaluate.py", f"checkpoint={LAST} hydra.run.dir=long 'generate.prompt=[the cat sees 12 birds,a]'")
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("prompt ")] == [
        "prompt 1: only its last 16 tokens fit"
    ]
    first, second = results_of("long")["sample"]
    shown = ended.out.partition("\nSample 1 of 2:\n")[2]
    assert shown.startswith("  the cat sees 12 birds")
    assert shown.replace("\n  ", "\n") == f"  {first}\n\nSample 2 of 2:\n{second}\n"


def test_it_needs_nothing_but_the_file(program: Program, trained: dict[str, object]) -> None:
    Path(LAST).rename("elsewhere.ckpt")
    results = evaluate(program, "checkpoint=elsewhere.ckpt")
    assert results["val/loss"] == pytest.approx(trained["val/loss"], abs=1e-5)


def test_perplexity_and_bits_belong_to_the_loss(program: Program, trained: dict[str, object]) -> None:
    results = evaluate(program)
    assert results["val/perplexity"] == pytest.approx(math.exp(results["val/loss"]))
    bits = results["val/loss"] * results["val/num_tokens"] / math.log(2) / results["val/num_bytes"]
    assert results["val/bits_per_byte"] == pytest.approx(bits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("checkpoint=none.ckpt", "none.ckpt"),
        ("checkpoint=cut.ckpt", "cut.ckpt"),
        ("checkpoint=run", "checkpoint=run/checkpoints/"),
        ("checkpoint=book.txt", "book.txt"),
        ("checkpoint=foreign.ckpt", "posix.system"),
        ("model.num_layers=3", "layers.2"),
        ("attention.num_kv_heads=2", "k_proj"),
        ("model.num_layer=3", "model.num_layers"),
        ("data.files=none.txt", "none.txt"),
        ("data=textt", "text"),
        ("generate.top_p=2", "generate.top_p=0.9"),
        ("generate.prompt_file=none.txt", "none.txt"),
        ("attention.backend=fast", "flash"),
    ],
)
def test_mistakes_are_told_in_a_few_lines(
    program: Program, trained: dict[str, object], override: str, said: str
) -> None:
    Path("cut.ckpt").write_bytes(Path(LAST).read_bytes()[:5000])
    edit_checkpoint("foreign.ckpt", config={"task": {"objective": {"_target_": "posix.system"}}})
    ended = program("evaluate.py", f"checkpoint={LAST}", override)
    assert ended.code == 2, ended.err
    assert said in ended.err
    assert len(ended.err.strip().splitlines()) <= 4
    assert "Traceback" not in ended.err


def test_a_checkpoint_is_needed(program: Program) -> None:
    ended = program("evaluate.py")
    assert (ended.code, "checkpoint=" in ended.err) == (2, True)


@pytest.mark.slow
def test_no_number_of_tokens_is_claimed_where_a_part_is_scored(program: Program, trained: dict[str, object]) -> None:
    ended = program("evaluate.py", f"checkpoint={LAST} trainer.limit_val_batches=1 hydra.run.dir=part")
    assert ended.code == 0, ended.err
    assert "over a part of the text (trainer.limit_val_batches=1)" in ended.out
    results = results_of("part")
    assert results["val/num_tokens"] is results["val/num_bytes"] is results["throughput/tokens_per_second"] is None
    assert "over a part" not in program("evaluate.py", f"checkpoint={LAST} hydra.run.dir=whole").out
