"""`load`: the trained model of a checkpoint, in Python."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tinyformer.checkpoint.file import load_weights
from tinyformer.checkpoint.snapshots import load_step
from tinyformer.config.checks import check_types
from tinyformer.config.errors import cause_of
from tinyformer.config.stored import admit_config
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.model.model import Model, Origin
from tinyformer.nn import EncoderDecoder, LearnedPosition, Network, SpanReadout
from tinyformer.nn.heads import plain_address
from tinyformer.nn.transformer import NoInitialisation
from tinyformer.run.match import register_score
from tinyformer.run.network import make_network, require_known_tokens
from tinyformer.run.starting_checkpoint import tokenizer_of
from tinyformer.tasks import SpanExtraction
from tinyformer.tasks.span import is_positive


def load(
    checkpoint: str | Path,
    backend: str = "auto",
    device: str = "cpu",
    trusted: Sequence[str] = (),
    max_seq_len: int | None = None,
    step: int | None = None,
) -> Model:
    """Load the model of a checkpoint, in evaluation mode and in the dtype of its weights.

    As in `evaluate.py`, the file is not trusted: no code in it runs, and its config may name only classes of this
    package.

    Args:
        checkpoint: the file, such as `outputs/…/checkpoints/last.ckpt`; with `step`, also the folder of a run.
        backend: attention backend: "auto" or a name in `tinyformer.nn.BACKENDS`, whatever the run used.
        device: the device, as in torch: "cpu", "cuda", …
        trusted: further classes that the checkpoint may use, such as "mine.Block".
        max_seq_len: the length of the longest text in tokens, which may be beyond that of the run; None for that of the
            run, which alone works with learned positions.
        step: the optimizer step of a snapshot of the checkpoint's run, see `tinyformer.training.Snapshots`, which is
            loaded in place of the checkpoint.

    Raises:
        ArgumentError: the file cannot be read, or the backend or the device does not exist or support the model.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device", device, "this machine has none", {"device": "cpu"})
    with argument_path(passed={"path": "checkpoint"}):
        stored = load_step(checkpoint, None if step is None else int(step))
        plain = admit_config(stored, lambda key, name: name in trusted, "name it in `trusted`")
        tokenizer = tokenizer_of(stored) if stored.tokenizer else None
    register_score(plain)
    config = OmegaConf.create(plain)
    for axis in ("attention", "cross_attention"):
        if config.get(axis) is not None:
            config[axis].backend = backend
    longest = config.model.max_seq_len
    if max_seq_len is not None:
        (config.model.max_seq_len,) = plain_address([max_seq_len])
    try:
        for part in ("network", "task.objective"):
            check_types(config, part)
        with NoInitialisation():
            network = make_network(config, tokenizer)
        _require_positions(network, longest)
    except InstantiationException as error:
        cause = cause_of(error)
        if isinstance(cause, ArgumentError) and cause.path[-1] in ("backend", "max_seq_len"):
            cause.path = cause.path[-1:]
        raise cause from error
    load_weights(network, stored)
    dtype = next(tensor.dtype for tensor in stored.weights.values() if tensor.is_floating_point())
    task = instantiate(config.task.objective, _convert_="all")
    network.to(device, dtype)
    kept = replace(stored, weights=network.state_dict())  # the same memory
    has_spans = isinstance(network.readout, SpanReadout)
    belongs = isinstance(network, task.network_class) and isinstance(task, SpanExtraction) == has_spans
    if not belongs or (tokenizer is None and has_spans):
        names = f"{type(network).__name__} and a {type(task).__name__}"
        raise ArgumentError("checkpoint", str(checkpoint), f"has a {names}, which do not belong together")
    require_known_tokens(task, network)
    if isinstance(network, EncoderDecoder) and tokenizer is None and task.special_tokens.eos is None:
        reason = "has no tokenizer, and does not say which token ends a text (model.special_tokens.eos)"
        raise ArgumentError("checkpoint", str(checkpoint), reason)
    for name in ("max_question_length", "stride") if has_spans else ():  # as the run cut contexts into windows
        if (value := OmegaConf.select(config, f"data.{name}")) is not None:
            if not is_positive(value):
                reason = f"its data.{name}={value!r:.60} is no positive integer"
                raise ArgumentError("checkpoint", str(checkpoint), reason)
            setattr(task, name, value)
    return Model(network, tokenizer, task, Origin(kept, trusted))


def _require_positions(network: Network, longest: int) -> None:
    """Refuse another length than that of the run, `longest`, where positions are learned."""
    if network.max_seq_len != longest and any(isinstance(part, LearnedPosition) for part in network.modules()):
        reason = f"must be {longest}: the model has learned a vector for each position, and has no others"
        raise ArgumentError("max_seq_len", network.max_seq_len, reason, {"max_seq_len": longest})
