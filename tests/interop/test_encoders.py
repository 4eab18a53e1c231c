"""Encoders without a head: states and maps of `transformers`, ablation by the states, and what is refused."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Program, ran, table

import tinyformer
from interop.models import BERT, SEQ, VARIANTS, change_weights, checkpoint_of, theirs, tokens, transformers
from interop.test_vocabulary import their_tokenizer
from tinyformer import analysis
from tinyformer.analysis import AnalysisContext
from tinyformer.checkpoint.file import load_checkpoint
from tinyformer.errors import ArgumentError
from tinyformer.interop import FAMILIES
from tinyformer.programs.convert.conversion import export_model

LENGTHS = torch.tensor([SEQ, 7])
NAMES = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert", "modernbert": "ModernBert"}
ENCODERS = {f"{family}Model": (family, VARIANTS[name][1]) for name, family in NAMES.items()}
"""The prefix of the config's class, and its fields, for each class without a head."""


@torch.no_grad()
def states_of(model: Any, **options: Any) -> Any:
    mask = (torch.arange(SEQ) < LENGTHS[:, None]).long()
    return model(input_ids=tokens(), attention_mask=mask, **options)


@pytest.mark.parametrize("architecture", ENCODERS)
def test_states_and_maps_are_the_same_also_after_an_export(architecture: str, tmp_path: Path) -> None:
    family, fields = ENCODERS[architecture]
    model = theirs(family, architecture, **fields, attn_implementation="eager")
    model.save_pretrained(tmp_path / "model")
    checkpoint_of(tmp_path / "model", tmp_path / "in.ckpt")
    ours, expected = tinyformer.load(tmp_path / "in.ckpt"), states_of(model, output_attentions=True)
    mask = ours.task.mask({"inputs": tokens(), "lengths": LENGTHS})
    with torch.no_grad():
        states = ours.network(tokens(), mask)
    for row, length in enumerate(LENGTHS.tolist()):
        text = tokens()[row : row + 1, :length]
        (maps,) = ours.attention(text)
        for given in (states[row, :length], ours.encode(text)[0], ours.run(text).logits[0]):
            assert (given - expected.last_hidden_state[row, :length]).abs().max() <= 1e-5
        for layer, of_layer in enumerate(expected.attentions):
            of_heads = torch.stack([torch.as_tensor(maps[layer, head]) for head in range(of_layer.shape[1])])
            assert (of_heads - of_layer[row, :, :length, :length]).abs().max() <= 1e-5
    export_model(tmp_path / "in.ckpt", tmp_path / "out")
    again, report = getattr(transformers(), architecture).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {name.partition(".")[0] for names in report.values() for name in names} <= {"pooler"}
    hidden = LENGTHS[:, None] > torch.arange(SEQ)
    torch.testing.assert_close(states_of(again).last_hidden_state[hidden], expected.last_hidden_state[hidden])
    prefixed = {f"{model.base_model_prefix}.{name}": weight for name, weight in model.state_dict().items()}
    change_weights(tmp_path / "model", **dict.fromkeys(model.state_dict()), **prefixed)  # as an older file has them
    weights = load_checkpoint(tmp_path / "in.ckpt").weights
    for folder in ("out", "model"):
        other = checkpoint_of(tmp_path / folder, tmp_path / f"{folder}.ckpt").weights
        assert other.keys() == weights.keys()
        assert all(torch.equal(other[name], weight) for name, weight in weights.items())


def test_the_class_in_a_config_determines_the_family() -> None:
    for named in ({}, {"architectures": ["BertForMaskedLM"]}, {"architectures": ["BertModel"]}):
        family = next(of for of in FAMILIES if of.model_type == "bert" and of.covers(named))
        assert [family.architecture] == named.get("architectures", ["BertForMaskedLM"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tinyformer.Model:
    folder, tokenizer = tmp_path_factory.mktemp("encoder"), their_tokenizer("bert")
    theirs("Bert", "BertModel", **BERT, vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    checkpoint_of(folder / "model", folder / "in.ckpt")
    return tinyformer.load(folder / "in.ckpt")


@pytest.fixture
def context(model: tinyformer.Model) -> AnalysisContext:
    batches: Any = [{"inputs": tokens(7), "lengths": LENGTHS}, {"inputs": tokens(7)[:1, :9]}]
    return AnalysisContext(model.network, batches, model.task, model.tokenizer, untrained=lambda: model.network)


def test_the_change_of_the_states_is_that_without_the_output_of_the_head(context: AnalysisContext) -> None:
    layer = context.layers[1].o_proj
    texts = [tokens(7)[:1], tokens(7)[1:, :7], tokens(7)[:1, :9]]
    columns, rows = analysis.HeadAblation()(context).tables["ablation"]
    with torch.no_grad():
        before, whole = list(map(context.network, texts)), layer.weight.clone()
        layer.weight[:, 12:18] = 0  # the columns that read head 2
        after = list(map(context.network, texts))
        layer.weight.copy_(whole)
    ratios = [float((new - old).norm() / old.norm()) for new, old in zip(after, before, strict=True)]
    (row,) = (dict(zip(columns, row, strict=True)) for row in rows if row[:2] == [1, 2])
    assert row["change_of_states"] == pytest.approx(sum(ratios) / 3, rel=1e-4)
    interval = [min(ratios) * 0.9999, row["low"], row["change_of_states"], row["high"], max(ratios) * 1.0001]
    assert interval == sorted(interval)


def test_what_needs_predictions_is_refused_in_a_sentence(model: tinyformer.Model, context: AnalysisContext) -> None:
    names = ("LogitLens", "LogitAttribution", "HeadImportance", "HeadGating", "GradientFlow", "HeadPruning")
    calls = [*(partial(getattr(analysis, name)(), context) for name in names), partial(model.loss, "a b")]
    for call in (*calls, partial(model.logits, "a b"), partial(model.generate, "a b")):
        with pytest.raises(ArgumentError, match=r"^task='States': [^.]*(no loss|cannot generate text)[^\n]*\.$"):
            call()
    assert model.points["logits"] == ("batch", "seq", BERT["hidden_size"])


def test_programs_analyse_an_encoder_and_train_it_with_a_head(program: Program, model: tinyformer.Model) -> None:
    shutil.copy(model.origin.checkpoint.path, "in.ckpt")  # type: ignore[union-attr]
    Path("book.txt").write_text("a b b a. " * 40)
    Path("rows.csv").write_text("text,label\n" + "".join(f"{n:b},{n % 2}\n" for n in range(64)))
    evaluated = "evaluate.py", "checkpoint=in.ckpt data=text data.files=book.txt hydra.run.dir=run"
    refused = {"": "analysis=null: ", "analysis=heads score=true": "score=true: ", "analysis=lens": "analysis=lens: "}
    for words, beginning in refused.items():
        ended = program(*evaluated, words)
        assert (ended.code, ended.err.count("\n"), Path("run").exists()) == (2, 1, False)
        assert ended.err.startswith(f"Error: {beginning}")
        assert ended.err.endswith(" works.\n")
    for name, file in {"maps": "maps", "atlas": "atlas", "heads": "ablation"}.items():
        assert "loss" not in ran(program, *evaluated, f"analysis={name}")
        assert len(table(f"run/{file}.csv")) == 14
    train = "train.py", "init_from=in.ckpt data=text trainer.max_steps=1 freeze_encoder=true callbacks.attention=null"
    assert "task=states: " in program(*train, "data.files=book.txt task=states").err
    ran(program, *train, "data.files=rows.csv data.label_column=label task=classification hydra.run.dir=tuned")
    tuned = load_checkpoint("tuned/checkpoints/last.ckpt").weights
    assert all(torch.equal(tuned[name], weight) for name, weight in load_checkpoint("in.ckpt").weights.items())
