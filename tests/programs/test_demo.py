"""The demonstration: what it prints is true of the model that it has trained."""

import re
from pathlib import Path

import pytest
from commands import Program, ran, results_of, table


@pytest.mark.slow
def test_its_heads_are_those_of_patching_and_its_losses_those_of_ablation(call: Program, program: Program) -> None:
    ended = call("demo seed=1")
    trained, previous, induction, reads, losses, film = ended.out.splitlines()
    run = Path(film.removeprefix("Open ").partition(" in ")[0]).parent
    head = r"[Ll]ayer (\d) head (\d)"
    heads = {re.match(head, line).groups() for line in (previous, induction)}
    for line in (previous, induction):
        assert re.search(r" became an? .* head at step \d+ \(0\.\d\d of its attention\)\.$", line), line
    assert set(re.findall(head, reads)) == heads
    whole, *without, both, other = map(float, re.findall(r"\d+\.\d\d", losses))
    assert whole <= other < min(*without, both) - 1
    ran(program, "evaluate.py", f"checkpoint={run}/checkpoints/last.ckpt analysis=patching hydra.run.dir=patching")
    named = {
        (row["layer"], row["head"])
        for row in table("patching/heads.csv")
        if row["what"] == "output" and max(float(row["denoising_low"]), float(row["noising_low"])) > 0.1
    }
    assert named == heads
    assert f"{100 * results_of(run)['val/accuracy']:.1f} %" in trained
