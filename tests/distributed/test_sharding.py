"""Sharded training: the steps of one process, checkpoints for any number of processes, and all that reads weights."""

import subprocess
from pathlib import Path

import lightning as L
import pytest
import torch
from commands import PYTHON, ROOT, SMALL, TEXT, Program, ran, results_of, table, weights_of
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing import ProcessRaisedException
from training.runs import CONTENTS, QUIET, fit, interrupt, strategy_of
from training.step_cases import TASKS, off, trained

from tinyformer.checkpoint.file import load_raw
from tinyformer.costs.memory import count_gpus
from tinyformer.errors import ArgumentError
from tinyformer.run.settings import make_settings
from tinyformer.run.trainer import training_trainer
from tinyformer.training import AdamW, MuonWithAdamW, Snapshots, optimizers
from tinyformer.training.callbacks.checkpoints import Checkpoints, Interrupted
from tinyformer.training.callbacks.finite import FiniteCheck
from tinyformer.training.trainer_parts import WholeCheckpointIO

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(*QUIET, "ignore:.*fork", "ignore:You defined a .validation")]

LAYOUTS = {"causal_lm": [(2, 1, 5), (3, 1, 3)], "seq2seq": [(2, 2, 2)]}
LAYOUTS |= {name: [(2, 1, 4)] for name in ("masked_lm", "classification", "span")}
"""Processes, accumulated batches and their rows, by task; three processes have 11, 11 and 10 rows of a matrix."""


@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]
)
def test_the_steps_are_those_of_one_process(name, layout, tmp_path):
    gradients, weights, loss, _ = trained(tmp_path, name)
    found, after, reported, _ = trained(tmp_path, name, layout, strategy="fsdp")
    assert off(found, gradients) < 1e-9
    assert off(after, weights) < 1e-9
    assert reported == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize(
    ("strategy", "processes", "is_bf16"), [("fsdp", 2, False), ("fsdp", 3, False), ("fsdp", 2, True), ("ddp", 2, True)]
)
def test_the_steps_of_muon_are_those_of_one_process(strategy, processes, is_bf16, tmp_path, monkeypatch):
    """Also where the number of processes divides neither rows nor number of matrices; in bf16 losses alone."""
    monkeypatch.setattr(optimizers, "has_native_bf16", lambda device: is_bf16)
    muon, exact = MuonWithAdamW(lr=0.01), {"precision": "32-true"}
    _, weights, loss, _ = trained(tmp_path, "seq2seq", optimizer=muon, **exact)
    layout = (processes, 1, 4 if processes == 2 else 3)
    _, after, reported, _ = trained(tmp_path, "seq2seq", layout, optimizer=muon, strategy=strategy, **exact)
    assert is_bf16 or off(after, weights) < 2e-4
    assert reported == pytest.approx(loss, rel=1e-3 if is_bf16 else 1e-4)


ONE = ("", 1)


def run(folder, kind, *callbacks, optimizer=None, precision="64-true", checkpoint=None):
    """A run of 8 steps of 6 rows, by a strategy and in a number of processes: what its last checkpoint holds."""
    settings = strategy_of(*kind, precision) | {"log_every_n_steps": 1, "gradient_clip_val": 1.0}
    settings["plugins"] = [*filter(None, [settings.get("plugins")]), WholeCheckpointIO()]
    parts = [*callbacks, Checkpoints(folder, CONTENTS)]
    data = {"batch_size": 6 // kind[1]}
    try:
        fit(folder, *parts, checkpoint=checkpoint, optimizer=optimizer, data=data, **settings)
    except Interrupted:
        pass
    except ProcessRaisedException as end:
        if Interrupted.__name__ not in str(end):
            raise
    return load_raw(folder / "last.ckpt")


@pytest.mark.parametrize(("first", "second"), [(("fsdp", 2), ("fsdp", 3)), (("fsdp", 3), ONE), (ONE, ("fsdp", 2))])
def test_a_run_continues_with_any_number_of_processes(first, second, tmp_path, capfd):
    """Its batches are the same, and so are its weights and the state of its optimizer."""
    whole = run(tmp_path / "whole", ONE)
    begun = run(tmp_path / "broken", first, interrupt(3))
    assert begun["global_step"] == 3
    rest = run(tmp_path / "broken", second, checkpoint=str(tmp_path / "broken/last.ckpt"))
    assert rest["global_step"] == whole["global_step"] == 8
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(rest[part], whole[part], rtol=1e-9, atol=1e-12)
    assert f"processes: {second[1]} instead of {first[1]}; dropout" in capfd.readouterr().out


class Noted(L.Callback):
    """Writes the bytes that each process holds, and the dtypes of a block's weight and of another when gathered."""

    def __init__(self, path):
        self.path, self.dtypes = path, {}

    def on_train_start(self, trainer, module):
        layer, others = module.network.encoder.layers[0], module.network.encoder.token_embedding
        for name, part in {"block": layer.feed_forward.down_proj, "others": others}.items():
            part.register_forward_pre_hook(lambda part, _, name=name: self.dtypes.update({name: part.weight.dtype}))

        layer.register_forward_pre_hook(lambda part, args: self.dtypes.update(stream=args[0].dtype))
        self.policy = fully_shard.state(layer)._mp_policy

    def on_before_backward(self, trainer, module, loss):
        encoder = module.network.encoder
        self.gathered = [not isinstance(part.weight, DTensor) for part in (encoder.token_embedding, encoder.final_norm)]

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.gradients = held(weight.grad for weight in module.parameters())

    def on_train_end(self, trainer, module):
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        found = held(module.parameters()), self.gradients, held(states)
        saved = {
            weight.data_ptr(): weight.numel() for weight in trainer.strategy.lightning_module_state_dict().values()
        }
        module.eval()
        with module.whole_network():
            is_training = module.network.training
        told = self.dtypes, self.policy.reduce_dtype, self.gathered, sum(saved.values()), is_training
        torch.save((found, told), self.path / f"{trainer.global_rank}.pt")


def held(tensors):
    own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in own)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_each_process_holds_what_the_card_counts_and_gathers_blocks_in_bf16(processes, tmp_path):
    """The card counts those of the first, which has 13 of 50 rows of the embedding where there are four."""
    trained(tmp_path, "causal_lm", (processes, 1, 2), None, [Noted(tmp_path)], "fsdp", "bf16-mixed")
    found, told = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(processes)), strict=True)
    costs, total = count_gpus(TASKS["causal_lm"][1], AdamW(), processes), TASKS["causal_lm"][1]().num_parameters()
    assert found[0] == (costs.sharded_weight_bytes, costs.sharded_gradient_bytes, costs.sharded_optimizer_bytes)
    assert sum(weights for weights, _, _ in found) == 4 * total
    dtypes = {"block": torch.bfloat16, "others": torch.float32, "stream": torch.float32}
    # The first process alone keeps what is gathered, in which tied weights are one; a copy is in the mode of the model.
    assert list(told) == [
        (dtypes, torch.float32, [True, True], total * (rank == 0), False) for rank in range(processes)
    ]


class Poison(L.Callback):
    """Makes the loss of one process infinite at a step, and its part of a weight at the sixth."""

    def __init__(self, step):
        self.step = step

    def setup(self, trainer, module, stage):
        def training_step(batch, batch_idx):
            is_bad = trainer.global_rank == 1 and trainer.global_step == self.step - 1
            return compute(batch, batch_idx) * (torch.inf if is_bad else 1.0)

        compute, module.training_step = module.training_step, training_step

    def on_train_batch_start(self, trainer, module, *args):
        if trainer.global_rank == 1 and trainer.global_step == 5:
            weight = module.network.encoder.layers[1].feed_forward.down_proj.weight
            weight.data.to_local().fill_(torch.inf)


def test_all_processes_skip_a_bad_step_of_one_and_name_its_bad_weight(tmp_path):
    """Found before it would be saved, or, where the run does not skip steps, when the step is run again."""
    muon, kind, exact = MuonWithAdamW(), ("fsdp", 2), {"precision": "32-true"}
    before = run(tmp_path / "before", kind, interrupt(2), optimizer=muon, **exact)
    weight = r"encoder\.layers\.1\.feed_forward\.down_proj\.weight"
    with pytest.raises(
        ProcessRaisedException, match=rf"step 6 left weights that are not finite.* weight network\.{weight}"
    ):
        run(tmp_path / "run", kind, Poison(3), FiniteCheck("skip"), optimizer=muon, **exact)
    skipped = load_raw(tmp_path / "run/last.ckpt")
    assert skipped["global_step"] == 3
    for raw in (skipped, before):  # learning rates advance
        raw["states"] = [part["state"] for part in raw["optimizer_states"][0]["optimizers"]]
    for part in ("state_dict", "states"):
        torch.testing.assert_close(skipped[part], before[part], rtol=0, atol=0)
    with pytest.raises(
        ProcessRaisedException, match=rf"step 6 has a loss of nan.*first not finite: the weight {weight}"
    ):
        run(tmp_path / "run", kind, Poison(9), FiniteCheck())


def settings_of(**changes):
    fixed = {"accelerator": "cpu", "precision": "32-true", "limit_val_batches": None, "enable_progress_bar": False}
    return make_settings(fixed | {"devices": 2, "max_steps": 1, "strategy": "fsdp"} | changes)


def test_a_strategy_is_given_by_its_name_or_in_full(tmp_path):
    node = {"_target_": "lightning.pytorch.strategies.DDPStrategy", "static_graph": True}
    made = [training_trainer(settings_of(strategy=each), tmp_path, [], []) for each in ("ddp", dict(node))]
    sent = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
    assert [trainer.strategy._ddp_kwargs for trainer in made] == [sent, {"static_graph": True}]


def test_what_sharded_weights_do_not_support_is_refused(tmp_path):
    for precision in ("64-true", "16-mixed", "16-true"):
        with pytest.raises(
            ArgumentError, match=f"precision='{precision}': must be one of 32-true, bf16-mixed, bf16-true"
        ):
            settings_of(precision=precision)
    for averages in (EMAWeightAveraging(), StochasticWeightAveraging(0.1)):
        with pytest.raises(ArgumentError, match=r"trainer.strategy='fsdp': cannot average weights"):
            training_trainer(settings_of(), tmp_path, [], [averages])
    with pytest.raises(ProcessRaisedException, match="every_n_steps=2: makes 6 snapshots"):
        run(tmp_path / "run", ("fsdp", 2), Snapshots(2, max_gb=1e-9))


def test_a_run_is_measured_scored_and_saved_as_one_of_one_process(program: Program, book: Path) -> None:
    """Validation has five batches in one process and four in the other; in another run blocks share their positions."""
    words = f"{SMALL} {TEXT} data.test_fraction=0.1 optimizer=adamw optimizer.lr=0.01 schedule.warmup_steps=1 "
    words += "callbacks.training_scores.num_rows=8 callbacks.snapshots.every_n_steps=2 data.validation_fraction=0.099"
    ran(program, "train.py", words, "data.batch_size=8 hydra.run.dir=one position=rotary")
    sharded = "trainer=fsdp trainer.accelerator=cpu trainer.devices=2 data.batch_size=4 hydra.sweep.dir=sweep"
    sweep = [PYTHON, ROOT / "train.py", "-m", *words.split(), *sharded.split(), "position=t5,rotary"]
    subprocess.run(sweep, check=True, capture_output=True, timeout=120)
    Path("sharded").symlink_to("sweep/1")
    one, other = results_of("one"), results_of("sharded")
    assert -(-one["val/num_tokens"] // 16) == 33
    names = [name for name in one if name.startswith(("val/", "test/", "train/", "best/"))]
    assert {name: other[name] for name in names} == pytest.approx({name: one[name] for name in names}, rel=1e-5)
    assert (other["num_parameters"], other["sample"]) == (one["num_parameters"], one["sample"])
    for name in ("last", "best", "../snapshots/step_000000", "../snapshots/step_000002"):
        torch.testing.assert_close(weights_of("sharded", name), weights_of("one", name), rtol=1e-4, atol=1e-6)
    heads, others = (table(f"{run}/attention/heads.csv") for run in ("one", "sharded"))
    assert [row["label"] for row in others] == [row["label"] for row in heads]
    entropies = [float(row["entropy"]) for row in heads]
    assert [float(row["entropy"]) for row in others] == pytest.approx(entropies, rel=1e-4)


def test_a_run_of_one_process_follows_one_that_ended_in_a_mistake(program: Program, book: Path) -> None:
    """As in a notebook: the mistake is found when there is a process group."""
    words = f"{SMALL} {TEXT} trainer=fsdp trainer.accelerator=cpu trainer.devices=1 callbacks.snapshots.every_n_steps=1"
    for folder, gigabytes, code in (("mistaken", "1e-9", 2), ("first", "1", 0), ("second", "1", 0)):
        ended = program("train.py", f"{words} callbacks.snapshots.max_gb={gigabytes} hydra.run.dir={folder}")
        assert ended.code == code, ended.err
        assert not torch.distributed.is_initialized()
