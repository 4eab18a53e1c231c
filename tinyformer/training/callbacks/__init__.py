"""Lightning callbacks: checkpoints, reports, finite steps, progress, telemetry and training scores."""

from tinyformer.training.callbacks.checkpoints import Checkpoints, Interrupted
from tinyformer.training.callbacks.finite import FiniteCheck, NonFiniteStep
from tinyformer.training.callbacks.progress import StepProgress
from tinyformer.training.callbacks.report import Report
from tinyformer.training.callbacks.telemetry import AttentionTelemetry
from tinyformer.training.callbacks.training_scores import TrainingScores

__all__ = [
    "AttentionTelemetry",
    "Checkpoints",
    "FiniteCheck",
    "Interrupted",
    "NonFiniteStep",
    "Report",
    "StepProgress",
    "TrainingScores",
]
