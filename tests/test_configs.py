"""The config files: every choice composes and builds what it says, and the docs show the losses of the variants."""

import json
import runpy

import pytest
import torch
from commands import ROOT
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from tinyformer.config.checks import check_types
from tinyformer.config.conf import choices_of, read
from tinyformer.config.launch import compose_run
from tinyformer.nn import AttentionMask, BaseAttention, Transformer
from tinyformer.programs.doctor.exactness import SHAPE, make_module
from tinyformer.programs.doctor.variants import VARIANTS

OTHERS = ("finding", "analysis")  # which are chosen by other programs, and run in their tests
CHOICES = [(f.parent.name, f.stem) for f in sorted((ROOT / "conf").glob("*/[!_]*.yaml")) if f.parent.name not in OTHERS]
NEEDED = {
    **{choice: ["data.files=book.txt"] for choice in ("text", "translate_cpu", "translate_lm_cpu")},
    "hub": ["data.path=owner/name"],
    "file": ["tokenizer.path=tokenizer.json"],
    "encoder_decoder": ["task=seq2seq"],
}


def composed(*overrides: str) -> DictConfig:
    return compose_run("train", [*overrides])[0]


def network(*overrides: str) -> Transformer:
    with torch.device("meta"):
        return instantiate(composed(*overrides).network, _convert_="all")


@pytest.mark.slow
@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes_and_fits_its_classes(group: str, choice: str) -> None:
    config = composed(f"{group}={choice}", *NEEDED.get(choice, []))
    check_types(config)
    assert OmegaConf.to_container(config, resolve=True)


def test_the_kinds_of_a_layer_are_the_choices_for_all_layers() -> None:
    attention, position = read("by_layer", "attention")["kinds"], read("by_layer", "position")["relative"]
    assert {*attention, "by_layer"} == {*choices_of("attention")}
    assert {*position["kinds"], "by_layer", "learned", "sinusoidal"} == {*choices_of("position")}
    for kind, node in attention.items():
        whole = read(kind, "attention")
        shared = read("_shared", "attention") if whole.pop("defaults", None) else {}
        assert shared | node == whole
    for kind, node in position["kinds"].items():
        alone = read(kind, "position")["relative"] or {"_target_": "tinyformer.nn.RelativePosition", "_partial_": True}
        assert {name: position[name] for name in alone if name in position} | node == alone


ORIGINAL = {
    "block._target_": "tinyformer.nn.PostNormBlock",
    "position.absolute._target_": "tinyformer.nn.SinusoidalPosition",
    "position.relative": None,
    "feed_forward.activation": "relu",
    "network.encoder.num_layers": 6,  # N of table 3; the other sizes are there, too
    "network.decoder.num_layers": 6,
    "model.d_model": 512,
    "feed_forward.d_ff": 2048,
    "attention.num_heads": 8,
    "attention.num_kv_heads": 8,
    "cross_attention.num_heads": 8,
    "block.dropout": 0.1,
    "network.encoder.dropout": 0.1,  # of the sums of embeddings and positions, §5.4
    "network.decoder.dropout": 0.1,
    "attention.dropout": 0.0,
    "task.objective.label_smoothing": 0.1,
    "trainer.max_steps": 100_000,
    "feed_forward.bias": True,  # equation 2
    "attention.bias": False,  # §3.2.2
    "network.init": "xavier",
    "optimizer.betas": [0.9, 0.98],  # §5.3
    "optimizer.eps": 1e-9,
    "optimizer.weight_decay": 0.0,
    "schedule.warmup_steps": 4000,
    "tokenizer.vocab_size": 37_000,  # §5.1
    "generate.beams": 4,  # §6.1
    "generate.length_penalty": 0.6,
    "generate.length_offset": 5,
}
"""The hyperparameters of the base model of Vaswani et al. 2017, arXiv 1706.03762."""


def test_the_original_is_that_of_the_paper() -> None:
    config = composed("experiment=original")
    assert {key: OmegaConf.select(config, key) for key in ORIGINAL} == ORIGINAL
    schedule, rate = instantiate(config.schedule), config.optimizer.lr
    for step in (1, 100, 3999, 4001, 20_000, 100_000):  # equation 3; our warm-up has its peak at step 4001
        paper = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert rate * schedule.factor(step - 1, 100_000) == pytest.approx(paper, rel=3e-4)
    whole = network("experiment=original", "model.vocab_size=37000")
    assert whole.num_parameters() == pytest.approx(65e6, rel=0.05)  # table 3
    assert whole.readout.proj.weight is whole.encoder.token_embedding.weight is whole.decoder.token_embedding.weight
    assert (whole.encoder.position.scale, whole.decoder.position.scale) == (512**0.5, 512**0.5)  # §3.4
    assert composed("experiment=original", "model.d_model=128", "schedule.warmup_steps=200").optimizer.lr == 0.00625


def kind_of(attention: BaseAttention) -> tuple[object, ...]:
    """The class, the parameters and the features that an attention needs of a backend."""
    features = attention.planned_case("cpu", torch.float32, AttentionMask(), 8, True).features
    names = {name: tuple(parameter.shape) for name, parameter in attention.named_parameters()}
    return type(attention), type(attention.position), attention.window, names, features


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "cross"])
def test_the_overrides_of_a_variant_make_the_same_attention_as_its_arguments(name: str) -> None:
    sizes = ["experiment=gpt2", "model=nano", "model.num_layers=1", "model.vocab_size=9"]
    made = network(*sizes, *VARIANTS[name].overrides).attentions()[0]
    assert kind_of(made) == kind_of(make_module(VARIANTS[name], SHAPE))


def test_each_documented_variant_was_brought_below_the_unigram_entropy() -> None:
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "variants.py"))
    record = json.loads((ROOT / "benchmarks" / "results" / "variants.json").read_text())
    rows = record["variants"]
    assert {name: row["overrides"] for name, row in rows.items()} == benchmark["VARIANTS"]
    assert all(max(row["val/loss"]) < record["unigram_entropy"] for row in rows.values())
    assert benchmark["table"](rows) in (ROOT / "docs" / "pages" / "results.md").read_text()
    # One unit of d_ff is 1,024 parameters in 4 layers of 128.
    assert all(abs(row["num_parameters"] - rows["multi-head"]["num_parameters"]) <= 512 for row in rows.values())
