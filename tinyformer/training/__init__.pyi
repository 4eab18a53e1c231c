from .callbacks.finite import FiniteCheck
from .callbacks.report import TrainingScores
from .callbacks.snapshots import Snapshots
from .callbacks.telemetry import AttentionTelemetry
from .loggers import RunCSVLogger, RunWandbLogger
from .module import TrainingModule
from .optimizers import AdamW, MuonWithAdamW
from .schedules import InverseSquareRoot, WarmupCosine, WarmupStableDecay

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
