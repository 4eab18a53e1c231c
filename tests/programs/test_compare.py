"""The comparison of finished runs, on the command line and as its parts."""

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import SMALL, TEXT, Program, results_of, table
from matplotlib.image import imread
from omegaconf import OmegaConf

from tinyformer.programs.compare.comparison import Comparison, notes_on
from tinyformer.programs.compare.comparison import compare as group
from tinyformer.programs.compare.folders import find_runs, read_run


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)


def write_run(
    name: str,
    loss: float | None = 1.0,
    seed: int = 1,
    typed: str = "",
    config: dict[str, Any] | None = None,
    written: dict[str, Any] | None = None,
    **results: Any,
) -> None:
    """A run's folder; its config, by default of what was typed, and `written`, with interpolations unresolved."""
    run = Path(name)
    config = OmegaConf.to_container(OmegaConf.from_dotlist(typed.split())) if config is None else config
    (run / ".hydra").mkdir(parents=True)
    seeds = {"seed": seed, "datamodule": {"seed": seed}}
    unresolved = {"seed": seed, "datamodule": {"seed": "${seed}"}}
    hydra = {"hydra": {"runtime": {"choices": {"attention": "gqa" if "attention=gqa" in typed else "mha"}}}}
    (run / "config.yaml").write_text(yaml.safe_dump(seeds | config))
    (run / ".hydra" / "config.yaml").write_text(yaml.safe_dump(unresolved | (written or config)))
    (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump([*typed.split(), f"seed={seed}"]))
    (run / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(hydra))
    known = {"val/loss": loss, "steps": 10, "data_fingerprint": "text", "num_parameters": 7}
    (run / "results.json").write_text(json.dumps(known | {"throughput/tokens_per_second": 100.0} | results))


def grouped(*folders: str, by: str = "seed") -> Comparison:
    """The comparison that the program would print."""
    found = find_runs([Path(folder) for folder in folders])
    return group([read_run(path) for path in found.finished], "val/loss", by)


def means(comparison: Comparison) -> list[tuple[object, ...]]:
    """The settings and the mean of each row."""
    return [(*row.settings.values(), row.mean) for row in comparison.rows]


@pytest.mark.slow
def test_a_sweep_at_equal_parameters_is_averaged_over_its_seeds(program: Program, book: Path, call: Program) -> None:
    """Each attention with two seeds, and as many jobs with heads that fail, as `train.py` leaves them."""
    axes = "callbacks.attention=null model.num_heads=2,3 attention=mha,mqa seed=1,2"
    ended = program("train.py", f"-m {SMALL} {TEXT} match=parameters {axes} hydra.sweep.dir=sweep")
    assert (ended.code, ended.err.count("Error: model.num_heads=3: ")) == (2, 4)
    ends = [*(f"sweep/{job}" for job in range(4)), "seed=1", "seed=2", "seed=1", "seed=2"]
    assert [line.split()[-1] for line in ended.out.splitlines()] == ends
    runs = [results_of(f"sweep/{job}") for job in range(4)]
    assert [run["matched"]["size"] for run in runs] == [64, 64, 72, 72]  # mqa: 2 x 16 x 8 fewer, of d_ff 2 x 16
    assert len({run["num_parameters"] for run in runs}) == 1
    ended = call("compare sweep --metric val/accuracy --out there/below")
    assert (ended.code, ended.err) == (0, "")
    scores = [run["val/accuracy"] for run in runs]
    means = {row["attention"]: float(row["mean"]) for row in table("there/below/compare_val_accuracy.csv")}
    assert means == pytest.approx({"mha": sum(scores[:2]) / 2, "mqa": sum(scores[2:]) / 2})
    missing = "4 of 8 runs have no results.json (failed, stopped or still running): sweep/4, sweep/5, sweep/6, sweep/7."
    assert f"Note: {missing}\n" in ended.out
    assert imread("there/below/compare_val_accuracy.png").std() > 0.05  # something is drawn
    again = program("evaluate.py", "checkpoint=sweep/2/checkpoints/last.ckpt data.files=book.txt hydra.run.dir=again")
    assert (again.code, results_of("again")["val/loss"]) == (0, runs[2]["val/loss"]), again.err


def test_table_and_csv_are_in_the_order_of_the_numbers(call: Program) -> None:
    for number, losses in ((10, (1.0, 1.5)), (2, (3.0, 4.0)), (9, (2.0, 2.0))):
        for seed, loss in enumerate(losses):
            write_run(f"runs/{number}-{seed}", loss, seed, typed=f"n={number} lr=0.1")
    ended = call("compare runs")
    header, *rows = [re.split(r"  +", line.strip()) for line in ended.out.splitlines() if line.strip(" ─")][:4]
    assert header == ["n", "val/loss", "±", "seeds", "parameters", "tokens/s"]
    assert [row[:2] for row in rows] == [["2", "3.5000"], ["9", "2.0000"], ["10", "1.2500"]]
    assert rows[0][2:] == ["± 0.7071", "2", "7", "100"]
    first = table("runs/compare_val_loss.csv")[0]
    numbers = [float(first[name]) for name in ("n", "mean", "std", "min", "max", "num_seeds", "num_parameters")]
    assert numbers == pytest.approx([2, 3.5, 0.5**0.5, 3, 4, 2, 7])


def test_one_seed_has_no_spread(call: Program) -> None:
    """Also where it was run again."""
    for index, (loss, seed) in enumerate(((1.0, 1), (1.5, 1), (2.0, 1), (3.0, 2))):
        write_run(f"runs/{index}", loss, seed, typed=f"n={1 + index // 2}")
    first, second = [re.split(r"  +", line.strip()) for line in call("compare runs").out.splitlines()[3:5]]
    assert (first[1:4], second[1:4]) == (["1.2500", "one seed", "1"], ["2.5000", "± 0.7071", "2"])


def test_a_choice_is_one_column_without_the_values_that_it_brings() -> None:
    for index, (choice, heads, shared) in enumerate((("mha", 4, 4), ("gqa", 4, 2), ("mha", 8, 8), ("gqa", 8, 4))):
        config = {"model": {"num_heads": heads}, "attention": {"num_heads": heads, "num_kv_heads": shared}}
        written = config | {"attention": {"num_heads": "${model.num_heads}", "num_kv_heads": f"${{of_{choice}:}}"}}
        typed = f"attention={choice} model.num_heads={heads}"
        write_run(f"runs/{index}", index, 1, typed, config, written)
    assert grouped("runs").columns == ["attention", "model.num_heads"]
    assert means(grouped("runs")) == [("mha", "4", 0), ("gqa", "4", 1), ("mha", "8", 2), ("gqa", "8", 3)]
    assert means(grouped("runs", by="model.num_heads")) == [("mha", 1.0), ("gqa", 2.0)]
    assert means(grouped("runs", by="attention")) == [("4", 0.5), ("8", 2.5)]


def test_a_key_that_a_run_did_not_type_has_its_configured_value() -> None:
    write_run("a/run", 1.0, typed="attention=gqa ++model.size=3", config={"model": {"size": 3}})
    write_run("b/run", 2.0, config={"model": {"size": 5}, "other": 1})
    write_run("c/run", 3.0, typed="~model.size", config={})
    assert grouped("a", "b", "c/run").columns == ["attention", "model.size"]
    assert means(grouped("a", "b", "c/run")) == [("gqa", "3", 1.0), ("mha", "5", 2.0), ("mha", "–", 3.0)]


def test_a_difference_that_nobody_typed_is_not_averaged_away() -> None:
    """As when a default changes between two runs."""
    for seed in (1, 2, 3):
        rate = 0.1 if seed == 3 else 0.2
        config = {"lr": rate, "copy": rate}
        write_run(f"runs/{seed}", seed, seed, config=config, written=config | {"copy": "${lr}"})
    assert grouped("runs").columns == ["lr"]
    assert means(grouped("runs")) == [("0.1", 3.0), ("0.2", 1.5)]


def test_runs_of_one_setting_and_runs_without_a_number() -> None:
    write_run("resumed/a", 1.0, 1, config={"resume": None})
    write_run("resumed/b", 2.0, 2, typed="resume=runs/b")
    write_run("numbers/a", 1.0, 1, typed="clip=1")
    write_run("numbers/b", 2.0, 2, typed="clip=1.0")
    write_run("none/a", None, typed="clip=null")
    assert means(grouped("resumed")) == means(grouped("numbers")) == [(1.5,)]
    assert means(grouped("none", "numbers")) == [("1", 1.5), ("null", None)]


NOTES: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    ({}, {}, None),
    ({"data_fingerprint": "x"}, {"data_fingerprint": "y"}, "different data (data_fingerprint)"),
    *(
        ({"config": {"task": one}}, {"config": {"task": other}}, f"what is scored, so that *: task.{note}.")
        for one, other, note in (
            ({"masking": {"rate": 0.15}}, {"masking": {"rate": 0.3}}, "masking={rate:0.15} or {rate:0.3}"),
            ({"masking": {"whole_words": True}}, {"masking": None}, "masking={whole_words:true} or null"),
            ({"objective": {"num_decoded": 9}}, {"objective": {}}, "objective.num_decoded=9 or –"),
        )
    ),
    ({"typed": "data.split_seed=1"}, {"typed": "data.split_seed=2"}, "scored, so that *: data.split_seed=1 or 2."),
    ({"typed": "n=1 model.max_seq_len=8"}, {"typed": "n=2 model.max_seq_len=9"}, "*: model.max_seq_len=8 or 9."),
    ({"typed": "trainer.limit_val_batches=1"}, {"typed": "n=2"}, "*: trainer.limit_val_batches=1 or –."),
    ({"typed": "tokenizer=char"}, {"typed": "tokenizer=byte"}, "*: tokenizer=char or byte."),
    ({"steps": 1000}, {"steps": 2000}, "different numbers of steps: 1,000 to 2,000."),
    ({"steps": 10, "typed": "trainer.max_steps=10"}, {"steps": 20, "typed": "trainer.max_steps=20"}, None),
]


def test_a_note_says_where_runs_are_not_comparable() -> None:
    for index, (first, second, note) in enumerate(NOTES):
        write_run(f"{index}/a", **{"typed": "n=1"} | first)
        write_run(f"{index}/b", **{"typed": "n=2"} | second)
        found = notes_on(grouped(str(index)), find_runs([Path(str(index))]))
        assert [fnmatchcase(told, f"*{note}*") for told in found] == [True] * (note is not None), found


MISTAKES = {
    "empty": "RUN=empty: has no finished run (with a results.json); a sweep is in",
    "unfinished": "RUN=unfinished: has no finished run (with a results.json), but 1 unfinished; a sweep",
    "run --metric val/los": "--metric=val/los: is not a number in any results.json; val/loss, steps, ",
    "run --by sed": "--by=sed: is not a key of config.yaml; --by=seed works.",
}


def test_a_mistake_exits_with_2_and_a_short_sentence(call: Program) -> None:
    write_run("run")
    write_run("unfinished")
    Path("empty").mkdir()
    Path("unfinished/results.json").unlink()
    for arguments, sentence in MISTAKES.items():
        ended = call(f"compare {arguments}")
        assert (ended.code, ended.out) == (2, ""), arguments
        assert ended.err.startswith(f"Error: {sentence}")
        assert len(ended.err.splitlines()) <= 4
