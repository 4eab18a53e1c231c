"""Runs side by side, as one gets them on the command line."""

import csv
import json
import math
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from matplotlib.figure import Figure
from programs import ROOT, SMALL, Ended

import tinyformer.analysis
from tinyformer.compare.__main__ import main
from tinyformer.compare.folders import find_runs, read_run
from tinyformer.compare.grouping import Comparison
from tinyformer.compare.grouping import compare as group

Compare = Callable[[str], Ended]


@pytest.fixture(scope="module")
def real_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two numbers of heads with two seeds each, and a third that cannot be: as `train.py` leaves it."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "book.txt").write_text("".join(f"In line {n} the cat sees {n * 7 % 13} birds.\n" for n in range(120)))
    text = "data=text data.files=book.txt tokenizer=char data.validation_fraction=0.1"
    command = f"train.py -m {SMALL} {text} model.num_heads=1,2,3 seed=1,2 hydra.sweep.dir=sweep"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HYDRA_FULL_ERROR", "0")
        patch.setattr(sys, "argv", command.split())
        GlobalHydra.instance().clear()
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    return folder / "sweep"


@pytest.fixture
def sweep(real_sweep: Path, tmp_path: Path) -> Path:
    """The real sweep, to be changed."""
    return Path(shutil.copytree(real_sweep, tmp_path / "sweep", ignore=shutil.ignore_patterns("*.ckpt", "*.png")))


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Compare:
    """The program in this process, which takes seconds less."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def run(arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["compare", *arguments.split()])
        capsys.readouterr()
        code = main()
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    saved: list[Figure] = []
    save = tinyformer.analysis.save_png

    def keep(figure: Figure, path: Path) -> Path:
        saved.append(figure)
        return save(figure, path)

    monkeypatch.setattr("tinyformer.analysis.save_png", keep)
    return saved


def table(out: str) -> list[list[str]]:
    """The cells of the printed table, its header first."""
    lines = [line for line in re.split("The same in all|Note: |Saved in", out)[0].splitlines() if line.strip(" ─")]
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def drawn(figure: Figure) -> list[tuple[float, float]]:
    """The dots of single runs."""
    (axes,) = figure.axes
    (seeds,) = [dots for dots in axes.collections if dots.get_label() == "single runs"]
    return [tuple(point) for point in seeds.get_offsets().tolist()]


def write_run(
    name: str,
    loss: float | None = 1.0,
    seed: int = 1,
    typed: str = "",
    choices: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    written: dict[str, Any] | None = None,
    **results: Any,
) -> None:
    """A run's folder, written by hand; `written` is the config before `${…}` was filled in."""
    run = Path(name)
    (run / ".hydra").mkdir(parents=True)
    seeds = {"seed": seed, "datamodule": {"seed": seed}}
    unresolved = {"seed": seed, "datamodule": {"seed": "${seed}"}}
    hydra = {"hydra": {"runtime": {"choices": {"attention": "mha", **(choices or {})}}}}
    (run / "config.yaml").write_text(yaml.safe_dump(seeds | (config or {})))
    (run / ".hydra" / "config.yaml").write_text(yaml.safe_dump(unresolved | (written or config or {})))
    (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump([*typed.split(), f"seed={seed}"]))
    (run / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(hydra))
    known = {"val/loss": loss, "steps": 10, "data_fingerprint": f"text, {seed}", "num_parameters": 7}
    (run / "results.json").write_text(json.dumps(known | {"throughput/tokens_per_second": 100.0} | results))


def grouped(*folders: str, by: str = "seed") -> Comparison:
    """What the program would draw, without drawing it."""
    found = find_runs([Path(folder) for folder in folders], ROOT / "conf")
    return group([read_run(path) for path in found.finished], "val/loss", by)


def means(comparison: Comparison) -> list[tuple[object, ...]]:
    """Each row's settings and mean."""
    return [(*row.settings.values(), row.mean) for row in comparison.rows]


@pytest.mark.slow
def test_a_real_sweep_is_averaged_over_its_seeds(sweep: Path, compare: Compare, figures: list[Figure]) -> None:
    # Jobs in the order of the command line: heads 1, seeds 1 and 2; heads 2, seeds 1 and 2; heads 3, which fail.
    results = [json.loads((sweep / str(job) / "results.json").read_text()) for job in range(4)]
    losses = [result["val/loss"] for result in results]
    # Of two values, the standard deviation by n - 1 is their distance over the root of two.
    expected = [((a + b) / 2, abs(a - b) / math.sqrt(2), min(a, b), max(a, b)) for a, b in (losses[:2], losses[2:])]
    ended = compare("sweep")
    assert (ended.code, ended.err) == (0, "")
    header, *rows = table(ended.out)
    assert header == ["model.num_heads", "val/loss", "±", "seeds", "parameters", "tokens/s"]
    for row, heads, (mean, std, _, _) in zip(rows, ("1", "2"), expected, strict=True):
        assert row[:4] == [heads, f"{mean:.4f}", f"± {std:.4f}", "2"]
        assert row[4] == f"{results[0]['num_parameters']:,}"
    assert "The same in all: model.num_layers=2 model.d_model=16 " in ended.out
    assert "Note: 2 of 6 runs have no results.json (failed, stopped or still running): sweep/4, sweep/5." in ended.out
    assert ended.out.count("Note: ") == 1
    with (sweep / "compare_val_loss.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["model.num_heads"] for line in lines] == ["1", "2"]
    for line, statistics in zip(lines, expected, strict=True):
        assert [float(line[name]) for name in ("mean", "std", "min", "max")] == pytest.approx(statistics, rel=1e-12)
        assert (line["num_seeds"], line["num_runs"]) == ("2", "2")
    (figure,) = figures
    assert sorted(drawn(figure)) == sorted(zip((1, 1, 2, 2), losses, strict=True))
    assert figure.axes[0].get_xscale() == "log"
    assert matplotlib.image.imread(sweep / "compare_val_loss.png").shape[:2] == (720, 1125)


@pytest.mark.slow
def test_json_is_all_that_json_prints(sweep: Path, compare: Compare) -> None:
    ended = compare("sweep --json --metric val/accuracy --out there/below")
    found = json.loads(ended.out)
    assert [row["settings"] for row in found["rows"]] == [{"model.num_heads": "1"}, {"model.num_heads": "2"}]
    first = json.loads((sweep / "0" / "results.json").read_text())
    assert found["rows"][0]["runs"][0] == {"path": "sweep/0", "seed": "1", "val/accuracy": first["val/accuracy"]}
    assert "tokenizer=char" in found["constant"]
    assert len(found["notes"]) == 1
    files = {"csv": "there/below/compare_val_accuracy.csv", "picture": "there/below/compare_val_accuracy.png"}
    assert found["files"] == files
    assert all(Path(path).stat().st_size for path in files.values())


def test_a_sweep_that_was_stopped_says_what_was_not_started(sweep: Path, compare: Compare) -> None:
    for job in (3, 4, 5):
        shutil.rmtree(sweep / str(job))
    ended = compare("sweep")
    assert "Note: 3 more runs that sweep/multirun.yaml asks for were not started." in ended.out
    assert [row[-3] for row in table(ended.out)] == ["seeds", "2", "1"]
    assert ["± " in " ".join(row) for row in table(ended.out)[1:]] == [True, False]


def test_the_order_is_that_of_the_numbers(compare: Compare, figures: list[Figure]) -> None:
    for folder, number, loss in (("a", 10, 1.0), ("b", 2, 3.0), ("c", 9, 2.0)):
        write_run(f"runs/{folder}", loss, typed=f"n={number}", config={"n": number})
    assert [row[:2] for row in table(compare("runs").out)[1:]] == [["2", "3.0000"], ["9", "2.0000"], ["10", "1.0000"]]
    assert drawn(figures[0]) == [(2, 3.0), (9, 2.0), (10, 1.0)]
    assert figures[0].axes[0].get_xscale() == "linear"


def test_words_are_sorted_by_their_mean_and_none_comes_last(compare: Compare, figures: list[Figure]) -> None:
    for index, (choice, loss) in enumerate(
        (("mqa", math.nan), ("mha", 3.0), ("gqa", -1.0), ("mla", 2.0), ("mqa", None))
    ):
        write_run(f"runs/{index}", loss, typed=f"attention={choice}", choices={"attention": choice})
    ended = compare("runs")
    assert [row[:2] for row in table(ended.out)[1:]] == [
        *(["gqa", "-1.0000"], ["mla", "2.0000"], ["mha", "3.0000"], ["mqa", "none"])
    ]
    assert (
        "Note: val/loss is none (not a number, or infinite) in 2 of 5 runs, which no mean counts: runs/0, runs/4."
        in ended.out
    )
    (figure,) = figures
    assert drawn(figure) == [(-1.0, 0), (2.0, 1), (3.0, 2)]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["gqa", "mla", "mha", "mqa"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["none"]


def test_a_choice_is_one_column(here: Path) -> None:
    """What it brings along, and what follows from another key, is not typed and splits no setting."""
    for index, (choice, heads, shared) in enumerate((("mha", 4, 4), ("gqa", 4, 2), ("mha", 8, 8), ("gqa", 8, 4))):
        expression = "${model.num_heads}" if choice == "mha" else "${default_num_kv_heads:${model.num_heads}}"
        write_run(
            f"runs/{index}",
            index,
            typed=f"attention={choice} model.num_heads={heads}",
            choices={"attention": choice},
            config={"model": {"num_heads": heads}, "attention": {"num_heads": heads, "num_kv_heads": shared}},
            written={
                "model": {"num_heads": heads},
                "attention": {"num_heads": "${model.num_heads}", "num_kv_heads": expression},
            },
        )
    assert grouped("runs").columns == ["attention", "model.num_heads"]
    assert means(grouped("runs")) == [("mha", "4", 0), ("gqa", "4", 1), ("mha", "8", 2), ("gqa", "8", 3)]
    assert means(grouped("runs", by="model.num_heads")) == [("mha", 1.0), ("gqa", 2.0)]
    assert means(grouped("runs", by="attention")) == [("4", 0.5), ("8", 2.5)]


def test_a_key_that_was_not_typed_has_its_configured_value(here: Path) -> None:
    write_run(
        "a/run", 1.0, typed="attention=gqa ++model.size=3", choices={"attention": "gqa"}, config={"model": {"size": 3}}
    )
    write_run("b/run", 2.0, config={"model": {"size": 5}, "other": 1})
    write_run("c/run", 3.0, typed="~model.size")
    assert grouped("a", "b", "c/run").columns == ["attention", "model.size"]
    assert means(grouped("a", "b", "c/run")) == [("gqa", "3", 1.0), ("mha", "5", 2.0), ("mha", "–", 3.0)]


def test_a_difference_that_nobody_typed_is_not_averaged_away(here: Path) -> None:
    """As when a default changes between two runs."""
    for seed in (1, 2, 3):
        rate = 0.1 if seed == 3 else 0.2
        write_run(
            f"runs/{seed}", float(seed), seed, config={"lr": rate, "copy": rate}, written={"lr": rate, "copy": "${lr}"}
        )
    assert grouped("runs").columns == ["lr"]
    assert means(grouped("runs")) == [("0.1", 3.0), ("0.2", 1.5)]


def test_the_resolved_config_alone_will_do(here: Path) -> None:
    for heads in (1, 2):
        for seed in (1, 2):
            sizes = {"model": {"num_heads": heads}, "attention": {"num_heads": heads}}
            write_run(f"runs/{heads}-{seed}", heads + seed, seed, typed=f"model.num_heads={heads}", config=sizes)
            shutil.rmtree(f"runs/{heads}-{seed}/.hydra")
    assert means(grouped("runs")) == [("1", 2.5), ("2", 3.5)]


def test_a_resumed_run_is_its_setting_still(here: Path) -> None:
    write_run("runs/a", 1.0, 1, config={"resume": None})
    write_run("runs/b", 2.0, 2, typed="resume=runs/b hydra.run.dir=runs/b", config={"resume": "runs/b"})
    assert means(grouped("runs")) == [(1.5,)]


def test_one_and_one_point_nought_are_one_setting(here: Path) -> None:
    write_run("runs/a", 1.0, 1, typed="clip=1", config={"clip": 1})
    write_run("runs/b", 2.0, 2, typed="clip=1.0", config={"clip": 1.0})
    assert means(grouped("runs")) == [(1.5,)]


def test_the_same_seed_twice_is_told_and_counted(compare: Compare) -> None:
    for name, loss in (("a", 1.0), ("b", 2.0)):
        write_run(f"runs/{name}", loss, 7)
    write_run("runs/c", 6.0, 8)
    ended = compare("runs")
    assert "Note: runs/a, runs/b have the same settings and seed=7; each counts" in ended.out
    assert table(ended.out)[1][:3] == ["3.0000", "± 2.6458", "2"]


def test_a_run_that_is_named_twice_counts_once(compare: Compare) -> None:
    write_run("runs/a", 1.0, 1)
    write_run("runs/b", 2.0, 2)
    ended = compare("runs runs/a ./runs/b")
    assert table(ended.out)[1][:3] == ["1.5000", "± 0.7071", "2"]
    assert "Note" not in ended.out


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ({}, {}, None),
        ({"data_fingerprint": "x"}, {"data_fingerprint": "y"}, "on different data (data_fingerprint)"),
        ({"seed": 1, "data_fingerprint": "x"}, {"seed": 2, "data_fingerprint": "y"}, None),
        ({"seed": 1, "val/num_bytes": 5}, {"seed": 2, "val/num_bytes": 6}, "Each seed holds out other text"),
        ({"steps": 1000}, {"steps": 2000}, "different numbers of steps: 1,000 to 2,000."),
    ],
)
def test_what_does_not_compare_is_told(
    compare: Compare, first: dict[str, Any], second: dict[str, Any], told: str | None
) -> None:
    write_run("runs/a", typed="n=1", config={"n": 1}, **first)
    write_run("runs/b", typed="n=2", config={"n": 2}, **second)
    ended = compare("runs")
    assert ended.code == 0, ended.err
    notes = [line for line in ended.out.splitlines() if line.startswith("Note: ")]
    assert len(notes) == (told is not None)
    assert told is None or told in notes[0]


def test_steps_that_were_asked_for_need_no_note(compare: Compare) -> None:
    for steps in (10, 20):
        write_run(
            f"runs/{steps}", typed=f"trainer.max_steps={steps}", config={"trainer": {"max_steps": steps}}, steps=steps
        )
    assert "Note" not in compare("runs").out


def test_evaluations_are_left_out_and_named(compare: Compare) -> None:
    write_run("outputs/run", 1.0)
    write_run("outputs/run-evaluate", 9.0, typed="checkpoint=outputs/run/checkpoints/last.ckpt")
    Path("outputs/run-evaluate/config.yaml").unlink()
    ended = compare("outputs")
    assert table(ended.out)[1][0] == "1.0000"
    assert "Note: Evaluations are no runs and were left out: outputs/run-evaluate." in ended.out


def test_a_single_run_has_no_spread(compare: Compare) -> None:
    write_run("run", 2.5)
    ended = compare("run")
    assert table(ended.out)[1] == ["2.5000", "1", "7", "100"]
    names, values = (line.split(",") for line in Path("run/compare_val_loss.csv").read_text().splitlines())
    assert dict(zip(names, values, strict=True))["std"] == ""
    assert Path("run/compare_val_loss.png").exists()


def test_files_go_to_the_folder_that_holds_all_runs(compare: Compare) -> None:
    write_run("day/one/run", 1.0, 1)
    write_run("day/two/run", 2.0, 2)
    assert compare("day/one day/two").out.splitlines()[-1] == (
        "Saved in day/compare_val_loss.csv and compare_val_loss.png."
    )
    assert Path("day/compare_val_loss.png").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("nowhere", "nowhere: there is no such folder. A sweep is in multirun/DATE/TIME."),
        ("empty", "empty: there is no results.json, which a run writes at its end."),
        ("unfinished", "unfinished: there is no results.json, which a run writes at its end, but 1 unfinished."),
        (
            "run --metric val/los",
            "--metric val/los is no key of results.json. Did you mean val/loss? Numbers: val/loss, ",
        ),
        ("run --metric device", "--metric device is no number in any run. Numbers: val/loss, steps, "),
        ("run --metric none", "--metric none is no number in any run. Numbers: val/loss, steps, "),
        ("run --metric flag", "--metric flag is no number in any run. Numbers: val/loss, steps, "),
        ("run --by sed", "--by sed is no key of config.yaml. Did you mean seed?"),
        ("run --by x", "--by x is no key of config.yaml. --by seed works."),
        ("cut", "cut/results.json cannot be read: Expecting"),
        ("list", "list/results.json cannot be read: it holds no dict."),
        ("binary", "binary/results.json cannot be read: 'utf-8' codec can't decode"),
        ("yaml", "yaml/config.yaml cannot be read: while parsing"),
        ("missing", "missing/config.yaml cannot be read: No such file or directory."),
        ("run --out run/results.json", "--out run/results.json cannot be made: File exists; --out comparison works."),
    ],
)
def test_mistakes_are_told_in_a_few_lines(compare: Compare, arguments: str, told: str) -> None:
    for name in ("run", "unfinished", "cut", "list", "binary", "yaml", "missing"):
        write_run(name, device="CPU", none=None, flag=True)
    Path("empty").mkdir()
    Path("unfinished/results.json").unlink()
    Path("cut/results.json").write_text('{"val/loss": ')
    Path("list/results.json").write_text("[1]")
    Path("binary/results.json").write_bytes(b"\xff\xfe\x00")
    Path("yaml/config.yaml").write_text("a: [1\nb: 2")
    Path("missing/config.yaml").unlink()
    ended = compare(arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"Error: {told}")
    assert len(ended.err.splitlines()) <= 4


def test_the_newest_sweep_is_offered(compare: Compare) -> None:
    for day in ("2026-01-30", "2026-01-31"):
        Path(f"multirun/{day}/12-00-00").mkdir(parents=True)
        Path(f"multirun/{day}/12-00-00/multirun.yaml").touch()
    assert compare("nowhere").err.endswith("The newest sweep is multirun/2026-01-31/12-00-00.\n")


def test_mistakes_are_told_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom tinyformer.compare.__main__ import main\ncode = main()\n"
        "assert not {'torch', 'matplotlib', 'lightning'} & sys.modules.keys()\nsys.exit(code)"
    )
    command = [sys.executable, "-c", code, "nowhere"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("Error: nowhere: there is no such folder.")


@pytest.mark.slow
def test_it_is_a_module(real_sweep: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tinyformer.compare", str(real_sweep), "--out", "out"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert table(ended.stdout)[0][:2] == ["model.num_heads", "val/loss"]
