from .model.loading import TrainedRun, load, train
from .model.model import Model

__all__ = ["Model", "TrainedRun", "load", "train"]
