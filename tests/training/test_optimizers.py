"""Optimizers: which parameters decay, which ones Muon updates, how both step as one; schedules by hand and in runs."""

import copy

import lightning as L
import pytest
import torch
from nn.model_cases import make_transformer
from omegaconf import OmegaConf
from torch import nn

from tinyformer.run.trainer import make_callbacks
from tinyformer.training import AdamW, InverseSquareRoot, MuonWithAdamW, WarmupCosine, WarmupStableDecay
from tinyformer.training.optimizers import StackedMuon
from training.runs import QUIET, fit, make_data, make_module, make_trainer

pytestmark = pytest.mark.filterwarnings(*QUIET)

# No setting has its default in torch.
RECIPES = {
    "adamw": AdamW(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3),
    "muon": MuonWithAdamW(lr=0.02, momentum=0.9, weight_decay=0.3, adamw_lr=1e-2, adamw_betas=(0.8, 0.9)),
}


def make_network(**changes):
    torch.manual_seed(0)
    return make_transformer(**{"num_layers": 2, "bias": True, "qk_norm": True} | changes)


SHAPES = [(8, 8), (8, 32), (32, 8), (8, 8), (3, 8), (8, 32), (1, 5)]
MUON = {"momentum": 0.8, "weight_decay": 0.3}


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}], ids=str
)
def test_stacked_matrices_are_updated_as_by_torchs_muon(options, native_bf16):
    torch.manual_seed(0)
    first = [torch.randn(shape) for shape in SHAPES]
    both = []
    for kind in (torch.optim.Muon, StackedMuon):
        matrices = [nn.Parameter(matrix.clone()) for matrix in first]
        both.append((matrices, kind(matrices, lr=0.1, **MUON | options)))
    for step in range(4):
        gradients = [torch.randn(shape) * 10.0 ** (step - 2) for shape in SHAPES]
        gradients[step % 3] = None
        for matrices, optimizer in both:
            for matrix, gradient in zip(matrices, gradients, strict=True):
                matrix.grad = gradient if gradient is None else gradient.clone()
            optimizer.step()
    (theirs, their_optimizer), (ours, our_optimizer) = both
    for before, expected, actual in zip(first, theirs, ours, strict=True):
        assert (expected - before).abs().max() > 0.1
        torch.testing.assert_close(actual, expected, atol=2e-3, rtol=0)  # of steps of 0.1, in bf16
    torch.testing.assert_close(our_optimizer.state_dict()["state"], their_optimizer.state_dict()["state"])


# Parameters and settings.


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_matrices_other_than_embeddings_decay_and_muon_updates_those_of_layers(recipe, tied):
    network = make_network(tied=tied)
    optimizer = recipe(network)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    stepped = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    assert sorted(stepped) == sorted(names.values())
    of_layers = {name for name in stepped if name.startswith("encoder.layers.") and name.endswith("_proj.weight")}
    assert len(of_layers) == 2 * 6  # q, k, v, o, up and down
    decayed = of_layers | (set() if tied else {"readout.proj.weight"})
    assert {name: group["weight_decay"] for name, group in stepped.items()} == {
        name: 0.3 if name in decayed else 0.0 for name in stepped
    }
    others = [group for name, group in stepped.items() if isinstance(recipe, AdamW) or name not in of_layers]
    eps = 1e-6 if isinstance(recipe, AdamW) else 1e-8
    assert all((group["lr"], group["betas"], group["eps"]) == (0.01, (0.8, 0.9), eps) for group in others)
    if isinstance(recipe, MuonWithAdamW):
        muon, _ = optimizer.optimizers
        assert {names[id(p)] for group in muon.param_groups for p in group["params"]} == of_layers
        assert all((group["lr"], group["momentum"]) == (0.02, 0.9) for group in muon.param_groups)
    assert [group["weight_decay"] for group in AdamW(weight_decay=0.1, decay_all=True)(network).param_groups] == [0.1]


# Schedules.

FACTORS = {
    WarmupCosine(4, final_factor=0.1): {
        0: 1 / 5,  # not 0, which would waste a step
        3: 4 / 5,
        4: 1.0,  # the end of the warm-up
        8: 0.1 + 0.9 * 0.5 * (1 + 2**-0.5),  # after a quarter: cos(π/4)
        12: 0.1 + 0.9 * 0.5,  # after half: cos(π/2) = 0
        20: 0.1,
        25: 0.1,  # constant after the end
    },
    WarmupCosine(100): {3: 4 / 101},  # longer than the run
    WarmupStableDecay(4, decay_fraction=0.2, final_factor=0.2): {
        **{0: 1 / 5, 3: 4 / 5, 4: 1.0, 16: 1.0},
        **{17: 0.8, 18: 0.6, 19: 0.4, 20: 0.2, 25: 0.2},
    },
    WarmupStableDecay(0, decay_fraction=0.0): {0: 1.0, 19: 1.0},
    InverseSquareRoot(3): {0: 1 / 4, 2: 3 / 4, 3: 1.0, 15: 1 / 2, 35: 1 / 3},
    InverseSquareRoot(0): {0: 1.0},
}


@pytest.mark.parametrize("schedule", FACTORS, ids=str)
def test_factors_by_hand(schedule):
    found = {step: schedule.factor(step, 20) for step in FACTORS[schedule]}
    assert found == pytest.approx(FACTORS[schedule])


# In runs.


def test_learning_rates_follow_the_schedule_and_all_weights_are_trained(tmp_path):
    rates, schedule = [], WarmupCosine(warmup_steps=4, final_factor=0.1)
    module = make_module(make_data(tmp_path), MuonWithAdamW(lr=0.02, adamw_lr=0.01), schedule)
    module.on_before_optimizer_step = lambda optimizer: rates.append([group["lr"] for group in optimizer.param_groups])
    trainer = make_trainer(tmp_path, max_steps=20, limit_val_batches=0)
    before = copy.deepcopy(module.network)
    trainer.fit(module, datamodule=module.data)
    factors = [schedule.factor(step, 20) for step in range(20)]
    assert [muon for muon, _ in rates] == pytest.approx([0.02 * f for f in factors])
    assert [adamw for _, adamw in rates] == pytest.approx([0.01 * f for f in factors])
    assert not any(map(torch.equal, module.network.parameters(), before.parameters()))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (AdamW(), AdamW(lr=3e-4, betas=(0.5, 0.6), weight_decay=0.3)),
        (MuonWithAdamW(), MuonWithAdamW(lr=3e-3, momentum=0.8, weight_decay=0.3, adamw_lr=1e-4)),
    ],
)
def test_a_resumed_run_has_the_options_that_it_is_given(first, second, tmp_path):
    path = tmp_path / "last.ckpt"
    fit(tmp_path, optimizer=first, max_steps=4)[0].save_checkpoint(path)
    trainer, module = fit(tmp_path, optimizer=second, max_steps=5, checkpoint=path)
    scale = module.schedule.factor(5, 5)
    for group, expected in zip(trainer.optimizers[0].param_groups, second(module.network).param_groups, strict=True):
        options = {"lr": expected["lr"] * scale, "params": group["params"]}
        assert {name: group[name] for name in expected} == expected | options


class Doubling(L.Callback):
    """Doubles gradients, before they are clipped."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        for parameter in module.parameters():
            parameter.grad *= 2


def weights_of(trainer):
    return [weight for group in trainer.optimizers[0].param_groups for weight in group["params"]]


def of_a_part(network):
    return torch.optim.SGD([network.encoder.token_embedding.weight], lr=0.1)


@pytest.mark.parametrize("recipe", [*RECIPES.values(), of_a_part], ids=[*RECIPES, "a part"])
def test_the_gradients_that_the_optimizer_takes_are_clipped(recipe, tmp_path):
    """Under mixed precision Lightning refuses to clip if an optimizer undoes the loss scaling itself."""
    targets = {"finite": "tinyformer.training.FiniteCheck", "mine": f"{__name__}.Doubling"}
    norms, look = [], L.Callback()
    look.on_before_optimizer_step = look.on_train_batch_end = lambda trainer, module, *args: norms.append(
        float(torch.cat([weight.grad.flatten() for weight in weights_of(trainer)]).norm())
    )
    group = OmegaConf.create({name: {"_target_": target} for name, target in targets.items()})
    fit(
        tmp_path,
        *make_callbacks(group).values(),
        look,
        optimizer=recipe,
        precision="bf16-mixed",
        gradient_clip_val=0.01,
        max_steps=2,
    )
    for before, after in zip(norms[::2], norms[1::2], strict=True):
        assert before > 0.1
        assert after == pytest.approx(0.01, rel=1e-3)
    assert len(norms) == 4
