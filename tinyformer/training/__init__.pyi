from .callbacks.attention import AttentionTelemetry
from .callbacks.checkpoints import Snapshots
from .callbacks.finite import FiniteCheck
from .callbacks.metrics import TrainingScores
from .loggers import RunCSVLogger, RunWandbLogger
from .module import TrainingModule
from .optimizers import AdamW, InverseSquareRoot, MuonWithAdamW, WarmupCosine, WarmupStableDecay

__all__ = [
    "AdamW",
    "AttentionTelemetry",
    "FiniteCheck",
    "InverseSquareRoot",
    "MuonWithAdamW",
    "RunCSVLogger",
    "RunWandbLogger",
    "Snapshots",
    "TrainingModule",
    "TrainingScores",
    "WarmupCosine",
    "WarmupStableDecay",
]
