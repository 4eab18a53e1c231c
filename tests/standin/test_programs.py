"""Runs on a CUDA device from the first step to the last picture, and what a step costs there."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from commands import BOOK, TEXT

from .conftest import Report, Run

SMALL = (
    "trainer=gpu model.num_layers=2 model.num_heads=2 model.d_model=32 model.max_seq_len=32 data.batch_size=4 "
    "generate.num_tokens=3 callbacks.attention.num_tokens=6 trainer.max_steps=4 hydra.run.dir=run"
)
TASKS = {
    "causal": TEXT,
    "documents": f"{TEXT} data.document_mask=true",
    "masked": f"{TEXT} task=masked_lm",
    "masked documents": f"{TEXT} task=masked_lm data.document_mask=true",
    "classification": "task=classification data=text data.files=reviews.csv data.label_column=label tokenizer=byte",
    "pairs": "task=seq2seq data=text data.files=pairs.csv tokenizer=byte",
    "questions": "task=span data=squad data.files=questions.json data.validation_fraction=0.1 tokenizer=byte",
    "values and gates": f"{TEXT} attention.value_residual=0.5 attention.value_embedding=true attention.exclusive=true "
    "attention.gate=elementwise attention.sink=zero attention.ssmax=true position.relative.fraction=0.5 block=sandwich "
    "block.attention_residual.learned=true block.attention_residual.embedding=true model.readout_softcap=30",
    "earlier tokens": f"{TEXT} attention=[mha,mqa] attention.shifted_keys=true attention.convolution=qkv "
    "block.attention_convolution=true block.feed_forward_convolution=true feed_forward.convolution=true",
    "forgetting": f"{TEXT} attention.forget=true position=[rotary,none] block=parallel attention.qk_norm=projection",
}
FILES = {"classification": "reviews.csv", "pairs": "pairs.csv", "questions": "questions.json"}


@pytest.fixture(autouse=True)
def texts(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(BOOK)
    rows = [f"the film was {'good' if n % 2 else 'bad'} {n},{n % 2}" for n in range(200)]
    (tmp_path / "reviews.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    pairs = [f"word {n},{n} is the word" for n in range(200)]
    (tmp_path / "pairs.csv").write_text("\n".join(["source,target", *pairs]) + "\n")
    asked = [{"id": str(n), "question": "who?", "answers": [{"text": f"x{n}", "answer_start": 3}]} for n in range(100)]
    paragraphs = [{"context": f"by x{n}", "qas": [one]} for n, one in enumerate(asked)]
    (tmp_path / "questions.json").write_text(json.dumps({"version": "1.1", "data": [{"paragraphs": paragraphs}]}))


@pytest.mark.parametrize("compiled", ["false", "auto"])
@pytest.mark.parametrize("task", TASKS)
def test_a_run_ends_and_is_resumed_and_evaluated(task: str, compiled: str, run: Run) -> None:
    ended = run("run_program.py", "train.py", SMALL, TASKS[task], f"compile={compiled}")
    assert ended.code == 0, ended.text
    assert ended.values["graphs"] <= 3
    # The first one makes states, and both compile: Inductor makes a graph of its own for lengths that 8 divides.
    assert [waits for _, waits in ended.values["steps"][2:]] == [0, 0]
    ended = run("run_program.py", "train.py", "resume=run trainer.max_steps=6")
    assert ended.code == 0, ended.text
    files = f"data.files={FILES.get(task, 'book.txt')}"
    analysis = "analysis=heads analysis.num_windows=4 score=true"
    ended = run("run_program.py", "evaluate.py", "checkpoint=run/checkpoints/last.ckpt", files, analysis)
    assert ended.code == 0, ended.text


MOST_LAUNCHES = {  # of a step, and of a measurement of the heads, a pass for each probe; a CUDA graph is one launch
    "experiment=gpt2": (50, 400),
    "experiment=gpt2 compile_mode=default": (360, 400),
    "optimizer=muon": (105, 540),
    "task=masked_lm": (105, 530),
    "task=masked_lm data.document_mask=true": (420, 550),
    "experiment=shakespeare_gpu": (105, 610),
}


@pytest.mark.parametrize("overrides", MOST_LAUNCHES)
def test_a_step_of_six_layers_launches_few_kernels_and_waits_for_none(overrides: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(BOOK * 8)
    sizes = "model.num_layers=6 model.num_heads=6 model.d_model=384 model.max_seq_len=256"
    steps = "callbacks.attention.every_n_steps=2 trainer.max_steps=5"
    ended = run("run_program.py", "train.py", SMALL, TEXT, sizes, steps, overrides)
    most, most_of_a_measurement = MOST_LAUNCHES[overrides]
    assert ended.code == 0, ended.text
    for launches, waits in ended.values["steps"][2::2]:  # the others are followed by a measurement
        assert launches <= most
        assert waits == 0
    # That of step 4; the first and the last one have costly measures, too.
    launches, waits = ended.values["measurements"][2]
    assert launches <= most_of_a_measurement
    assert waits <= 4


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_no_step_of_a_strategy_waits_for_the_device(strategy: str, processes: int, run: Run) -> None:
    """Except at reports, and twice in the second step of DistributedDataParallel, which arranges its buckets."""
    words = f"{SMALL} {TEXT} trainer={strategy} trainer.devices=1 trainer.num_nodes={processes} trainer.max_steps=8"
    words += f" compile={'auto' if processes == 1 else 'false'}"

    def of_all(*words: str) -> Iterator[Report]:
        one = partial(run, "run_program.py", "train.py", *words, processes=processes)
        with ThreadPoolExecutor(processes) as pool:
            return pool.map(lambda rank: one(rank=rank), range(processes))

    for ended in of_all(words, "trainer.log_every_n_steps=4"):
        assert ended.code == 0, ended.text
        assert "stream does not match" not in ended.text
        buckets = 2 if strategy == "ddp" else 0
        assert [waits for _, waits in ended.values["steps"][1:]] == [buckets, 0, 1, 0, 0, 0, 1]
    for ended in of_all("resume=run trainer.max_steps=10"):
        assert (ended.code, len(ended.values["steps"])) == (0, 2), ended.text


def test_the_benchmarks_of_a_gpu_run_to_their_end(run: Run, tmp_path: Path) -> None:
    ended = run("run_program.py", "benchmarks/gpu.py", "--quick --output gpu.json")
    assert ended.code == 0, ended.text
    ended = run("run_program.py", "benchmarks/gpu.py", "--table .")
    assert (ended.code, ended.text.count("| T 512, causal |")) == (0, 1), ended.text
    curves = f"benchmarks/curves.py --backends eager,flash --steps 4 --output curves.json {SMALL} {TEXT}"
    ended = run("run_program.py", curves)
    assert (ended.code, ended.text.count("flash - eager: ")) == (0, 1), ended.text
