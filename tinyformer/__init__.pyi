from .app.trained_run import TrainedRun, train
from .loading import load
from .model import Model

__all__ = ["Model", "TrainedRun", "load", "train"]
