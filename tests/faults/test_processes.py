"""Runs of two processes: a signal, a value that is not finite, or the final test meets them together."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import ROOT, SMALL, TEXT, Program, ran, results_of, weights_of

from tinyformer.checkpoint.file import load_checkpoint

pytestmark = pytest.mark.slow

TWO = "trainer=ddp trainer.accelerator=cpu trainer.devices=2 hydra.run.dir=run"
CONSTANT = "schedule=wsd schedule.decay_fraction=0 schedule.warmup_steps=2 model.dropout=0.2"


def start(*arguments: str) -> subprocess.Popen[str]:
    words = [word for argument in arguments for word in argument.split()]
    command = [sys.executable, str(ROOT / "train.py"), *words]
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def end(run: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit code and the output of a run, which is killed with its processes if it does not end."""
    try:
        out, error = run.communicate(timeout=120)
        return run.returncode, out, error
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)


def test_a_signal_to_one_process_stops_both_and_they_resume_bit_equal(program: Program, book: Path) -> None:
    settings = f"{SMALL} {TEXT} {TWO} {CONSTANT} trainer.val_check_interval=20"
    run = start(settings, "trainer.max_steps=1000000")
    while not Path("run/checkpoints/last.ckpt").exists() and run.poll() is None:
        time.sleep(0.05)
    begun = time.monotonic()
    (second,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(second), signal.SIGTERM)
    code, out, _ = end(run)
    assert time.monotonic() - begun < 30
    step = load_checkpoint("run/checkpoints/last.ckpt").step
    assert code == 128 + signal.SIGTERM
    assert f"Stopped at step {step}. To continue: " in out
    for words in ("resume=run", settings.replace("dir=run", "dir=unbroken")):
        code, _, error = end(start(words, f"trainer.max_steps={step + 3}"))
        assert code == 0, error
    unbroken, resumed = weights_of("unbroken"), weights_of("run")
    assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)


def test_a_step_that_is_not_finite_in_one_process_stops_both(program: Program, book: Path) -> None:
    Path("poison_of_one.py").write_text(
        "import os, lightning as L\n"
        "class Poison(L.Callback):\n"
        "    def setup(self, trainer, module, stage):\n"
        "        compute = module.training_step\n"
        "        def training_step(batch, batch_idx):\n"
        "            bad = trainer.global_rank == 1 and trainer.global_step == 4\n"
        "            loss = compute(batch, batch_idx)\n"
        "            return loss.detach() * float('inf') + loss * 0 if bad else loss\n"
        "        module.training_step = training_step\n"
    )
    poison = "+callbacks.poison._target_=poison_of_one.Poison trainer.max_steps=50 trainer.log_every_n_steps=3"
    code, _, error = end(start(f"{SMALL} {TEXT} {TWO} {CONSTANT} trainer.val_check_interval=3", poison))
    assert code == 2, error
    assert error.count("Error: step 5 has a loss of ") == 1, error
    assert load_checkpoint("run/checkpoints/last.ckpt").step == 3


def test_the_final_test_is_scored_once_and_right(program: Program, book: Path) -> None:
    rows = [f"film {n} is {('dull', 'fine')[n * 7 % 3 % 2]},{n * 7 % 3 % 2}\n" for n in range(203)]
    Path("reviews.csv").write_text("text,label\n" + "".join(rows))
    texts = "task=classification data=text data.files=reviews.csv data.label_column=label data.test_fraction=0.2"
    code, out, error = end(start(f"{SMALL} {texts} {TWO} trainer.max_steps=8"))
    assert code == 0, error
    # The first process alone looks at the heads, and counts its time.
    assert len(Path("run/attention/heads.csv").read_text().splitlines()) == 1 + 2 * 2
    assert out.count("measurements") == 1
    test = "checkpoint=run/checkpoints/best.ckpt split=test data.files=reviews.csv hydra.run.dir=evaluated"
    ran(program, "evaluate.py", test)
    trained, evaluated = results_of("run"), results_of("evaluated")
    assert trained["test/num_tokens"] == evaluated["test/num_tokens"] > 0
    for name in ("loss", "accuracy", "macro_f1"):
        assert trained[f"test/{name}"] == pytest.approx(evaluated[f"test/{name}"], rel=1e-6)
