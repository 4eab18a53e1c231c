"""`evaluate.py model.max_seq_len=N`: the loss of a model that was built for N tokens with the weights of the run."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from commands import SMALL, TEXT, Program, ran, results_of, weights_of
from hydra.utils import instantiate

from tinyformer.config.compose import compose_run
from tinyformer.nn import AttentionMask

ARGUMENTS = f"{SMALL} {TEXT} callbacks.attention=null"
LONGER = 40  # trained at 16


@pytest.mark.slow
@pytest.mark.parametrize("position", ["sinusoidal", "rotary", "alibi", "t5", "relative", "none"])
def test_a_longer_context_is_that_of_a_model_built_for_it(position: str, program: Program, book: Path) -> None:
    longer = f"position={position} model.max_seq_len={LONGER}"
    ran(program, "train.py", ARGUMENTS, f"position={position} hydra.run.dir=run")
    evaluated = f"checkpoint=run/checkpoints/last.ckpt data.files=book.txt model.max_seq_len={LONGER}"
    ran(program, "evaluate.py", evaluated, "callbacks.attention=null hydra.run.dir=evaluated")
    config, _ = compose_run("train", [*ARGUMENTS.split(), *longer.split()])
    data = instantiate(config.datamodule, _convert_="all")
    data.prepare()
    config.model.vocab_size = data.tokenizer.vocab_size
    built = instantiate(config.network, _convert_="all").eval()
    weights = {name.removeprefix("network."): weight for name, weight in weights_of("run").items()}
    built.load_state_dict(weights)
    nats, number = 0.0, 0
    with torch.no_grad():
        for batch in data.val_dataloader():
            assert batch["inputs"].shape[1] == LONGER
            logits = built(batch["inputs"], AttentionMask(causal=True))
            nats += float(F.cross_entropy(logits.mT, batch["targets"], ignore_index=-100, reduction="sum"))
            number += int((batch["targets"] != -100).sum())
    results = results_of("evaluated")
    assert results["val/num_tokens"] == number
    assert results["val/loss"] == pytest.approx(nats / number, rel=1e-5)
    assert results["val/loss"] != results_of("run")["val/loss"]  # windows of 16


@pytest.mark.slow
def test_learned_positions_are_refused_in_a_sentence(program: Program, book: Path) -> None:
    ran(program, "train.py", ARGUMENTS, "position=learned hydra.run.dir=run")
    for tokens in (8, LONGER):
        evaluated = f"checkpoint=run/checkpoints/last.ckpt data.files=book.txt model.max_seq_len={tokens}"
        ended = program("evaluate.py", evaluated, "hydra.run.dir=evaluated")
        sentence = f"model.max_seq_len={tokens}: the run has learned vectors for 16 positions, and for no others; "
        assert (ended.code, sentence + "model.max_seq_len=16 works." in ended.err) == (2, True), ended.err
        assert not Path("evaluated").exists()
