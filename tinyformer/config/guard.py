"""The folder of a run, before Hydra writes into it."""

from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from tinyformer.config.errors import ConfigError, report
from tinyformer.config.invocation import config_dir
from tinyformer.config.resume import is_first_process, refuse_foreign_files, require_unused
from tinyformer.files import relative_path


class FolderGuard(Callback):
    """Ends the program if the folder that Hydra is about to write into is used, or contains links of a stranger.

    Hydra turns an error in a callback into a warning, so this one reports it and exits.
    """

    replaced: ClassVar[dict[Path, bytes]] = {}  # by Hydra, before a job can refuse the command

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the folder of a run or an evaluation."""
        self._check("hydra.run.dir", config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the folder of a sweep, with those of its jobs."""
        self._check("hydra.sweep.dir", config)

    def _check(self, key: str, config: DictConfig) -> None:
        folder = Path(config.hydra[key.split(".")[1]].dir)
        try:
            refuse_foreign_files(folder, key)
            if config.get("resume") is None:
                require_unused(relative_path(folder), key)
        except ConfigError as error:
            raise SystemExit(report(error, config_dir(), "train")) from error
        if is_first_process():
            files = (path for path in (folder / "multirun.yaml", *folder.rglob(".hydra/*")) if path.is_file())
            self.replaced.update({path.absolute(): path.read_bytes() for path in files})

    @classmethod
    def put_back(cls) -> None:
        """Put back what Hydra has replaced for a command that was refused."""
        for path, contents in cls.replaced.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents)
        cls.replaced.clear()
