"""The line above each picture that a run or an analysis saves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from analysis.subjects import TOKENIZER, make_subject
from matplotlib.image import imread
from nn.model_cases import make_transformer

from tinyformer import analysis
from tinyformer.analysis import Findings, HeadMaps, HeadRelations, head_maps
from tinyformer.analysis.pictures.picture import CAPTION_HEIGHT
from tinyformer.data import CharTokenizer, SourceDataModule, TextFiles, WindowFormat
from tinyformer.run import analysis_run
from tinyformer.run.analysis_run import describe_subject, keep_findings
from tinyformer.training.callbacks.telemetry import HeadLog

PICTURE = head_maps([torch.eye(4)[None]], list("abcd"), "Attention maps")


def by_analysis(folder, facts):
    keep_findings(Findings(figures={"maps": PICTURE}), folder, [], facts)
    return folder / "maps.png"


def by_telemetry(folder, facts):
    return HeadLog(folder, [], facts["data"]).picture(7, "maps", "step", PICTURE)


@pytest.mark.parametrize("save", [by_analysis, by_telemetry])
def test_a_saved_picture_has_a_line_above_it(tmp_path, save):
    path = save(tmp_path, {"checkpoint": "run/last.ckpt", "step": "7", "data": "text, validation split"})
    image, plain = imread(path), np.asarray(PICTURE.image().convert("RGB")) / 255
    above, below = image[:CAPTION_HEIGHT], image[CAPTION_HEIGHT:, : plain.shape[1], :3]
    assert below == pytest.approx(plain, abs=0.01)
    assert (above[..., :3] < 0.5).any()


@pytest.mark.parametrize("checkpoint", [None, "run/last.ckpt"])
def test_pictures_of_telemetry_name_the_checkpoint_of_an_evaluation(tmp_path, monkeypatch, checkpoint):
    lines = []
    monkeypatch.setattr(analysis, "save_png", lambda picture, path, line: lines.append(line))
    monkeypatch.chdir(tmp_path)
    path = checkpoint and tmp_path / checkpoint
    HeadLog(tmp_path / "folder", [], "text, validation split", path).picture(7, "maps", "step", PICTURE)
    source = f"checkpoint {checkpoint}" if checkpoint else "run folder"
    assert lines == [f"{source} · step 7 · data text, validation split"]


def test_pictures_of_a_text_name_it_in_place_of_the_data(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(analysis_run, "save_png", lambda figure, path, line: lines.append(line) or path)
    facts = {"step": "7", "data": "text, validation split"}
    subject = replace(make_subject(make_transformer()), tokenizer=TOKENIZER, facts=facts)
    given = HeadMaps("a\ncab " * 40, num_windows=1, importance=False)
    for kind in (given, HeadMaps(num_windows=1, importance=False), HeadRelations("ab cd", [["cd", "ab"]])):
        keep_findings(kind(subject, tmp_path), tmp_path, [], facts)
    beginning = "a cab " * 9 + "a"
    assert lines == [
        f'step 7 · text "{beginning} …"',
        "step 7 · data text, validation split",
        'step 7 · text "ab cd"',
    ]


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        (["a.txt"], "text (a.txt), test split"),
        (["x/a.txt", "b.txt", "*.csv", "d"], "text (a.txt, b.txt and 2 more), test split"),
    ],
)
def test_the_line_names_the_files_of_the_data(tmp_path, files, shown):
    data = SourceDataModule(TextFiles(files), CharTokenizer(), WindowFormat(8), 1)
    facts = describe_subject(tmp_path / "last.ckpt", 1234, data, "test")
    assert facts == {"checkpoint": str(tmp_path / "last.ckpt"), "step": "1,234", "data": shown}
