"""The loggers of a run: `metrics.csv` always, and what the `logger` group asks for."""

import contextlib
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path, PurePath
from secrets import token_hex
from typing import Any

from hydra.utils import get_class, instantiate
from lightning.pytorch.loggers import Logger, MLFlowLogger
from omegaconf import DictConfig, OmegaConf

from tinyformer.config.conf import values_of_keys
from tinyformer.config.errors import ConfigError
from tinyformer.config.folder import is_first_process
from tinyformer.config.keys import format_value
from tinyformer.costs.network import count_costs
from tinyformer.errors import ArgumentError
from tinyformer.files import relative_path
from tinyformer.nn import Network
from tinyformer.training import RunCSVLogger, RunWandbLogger
from tinyformer.training.loggers import map_texts, public


def make_loggers(group: DictConfig, folder: Path, is_sweep: bool = False, first_step: int = 0) -> list[Logger]:
    """The loggers of a run: `metrics.csv`, and those of the `logger` group; the folder is made if it does not exist.

    The group is the node of a logger, or has one for each. The runs of a sweep are one group in Weights & Biases. A
    resumed run continues from `first_step`.
    """
    chosen = {"logger": group} if "_target_" in group else {f"logger.{name!s}": node for name, node in group.items()}
    nodes = {key: node for key, node in chosen.items() if node is not None}
    for key, node in nodes.items():
        if not (OmegaConf.is_dict(node) and "_target_" in node and issubclass(get_class(node._target_), Logger)):
            raise ConfigError(f"{key}={format_value(node)}: must have the _target_ of a logger of Lightning.")
    folder.mkdir(parents=True, exist_ok=True)
    loggers: list[Logger] = [RunCSVLogger(folder / "metrics.csv", first_step)]
    for node in nodes.values():
        loggers.append(instantiate(node, _convert_="all", **_facts_of_run(node, folder, is_sweep)))
    return loggers


def _facts_of_run(node: DictConfig, folder: Path, is_sweep: bool) -> dict[str, Any]:
    """The arguments that a logger takes from the run, unless its node sets them: where to log, and the run's name."""
    logger = get_class(node._target_)
    facts: dict[str, Any] = {"save_dir": str(folder), "run_name": "/".join(folder.parts[-2:])}
    if issubclass(logger, RunWandbLogger):
        group = "/".join(folder.parts[-3:-1]) if is_sweep else None
        facts = {"run_dir": str(folder), "run_id": _wandb_id(folder), "group": group}
    elif issubclass(logger, MLFlowLogger):  # whose own default is a folder, which MLflow reads no more
        facts["tracking_uri"] = os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    return {name: facts[name] for name in facts.keys() & inspect.signature(logger).parameters.keys() - node.keys()}


def log_hyperparameters(loggers: list[Logger], config: dict[str, Any], network: Network) -> None:
    """Log the unresolved config of a run and the costs of its network, except into `metrics.csv`."""
    for logger in loggers[1:]:
        logger.log_hyperparams(_hyperparameters(config, network))


@contextlib.contextmanager
def closing(loggers: list[Logger]) -> Iterator[None]:
    """Close loggers at the end of the block, so that the next job of a sweep opens its own."""
    status = "failed"
    try:
        yield
        status = "success"
    finally:
        for logger in loggers:
            logger.finalize(status)
            if isinstance(logger, RunWandbLogger):
                logger.finish(failed=status != "success")


def wandb_location(loggers: list[Logger]) -> str | None:
    """The place of the run in Weights & Biases; None if it is not logged there."""
    return next((logger.location() for logger in loggers if isinstance(logger, RunWandbLogger)), None)


def _hyperparameters(config: dict[str, Any], network: Network) -> dict[str, Any]:
    """The config as nested plain values, with `${oc.env:NAME}` as it is, without folders of paths; `costs` as well."""
    ours = {value for values in values_of_keys().values() for value in values if isinstance(value, str)}

    def shortened(text: str) -> str:
        is_path = text.startswith(("/", "~", "..")) or os.path.exists(text)
        return text if text in ours else public(PurePath(text).name if is_path else text)

    costs = {}
    with contextlib.suppress(ArgumentError):  # of layers that cannot be counted
        costs = asdict(count_costs(network))
    config = map_texts(lambda text: text.replace("${", "\\${") if "oc.env" in text else text, config)
    return map_texts(shortened, OmegaConf.to_container(OmegaConf.create(config), resolve=True)) | {"costs": costs}


def _wandb_id(folder: Path) -> str:
    """An id that a run and its resumption share, so that they are one run in the browser; a copy of it has its own."""

    def stored(path: Path) -> list[str]:
        return os.fsdecode(path.read_bytes()).split("\n", 1) if path.is_file() else []

    path, here = folder / "wandb" / "run_id", str(folder.resolve())
    run_id, *home = stored(path) or [token_hex(4)]
    if not re.fullmatch(r"[0-9a-f]{8}", run_id):
        raise ConfigError(f"{relative_path(path)} contains no id of a run of wandb; remove it for a new one.")
    if home != [here] and is_first_process():  # the folder is new, or was moved or copied
        run_id = token_hex(4) if home and stored(Path(*home, "wandb", "run_id"))[:1] == [run_id] else run_id
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(f"{run_id}\n{here}"))
    return run_id
