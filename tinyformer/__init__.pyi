from .model.loading import load
from .model.model import Model
from .model.trained_run import TrainedRun, train

__all__ = ["Model", "TrainedRun", "load", "train"]
