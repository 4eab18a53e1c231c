"""Lightning callbacks: checkpoints, reports, finite steps, progress and telemetry."""

from tinyformer.training.callbacks.checkpoints import Checkpoints, Interrupted
from tinyformer.training.callbacks.finite import FiniteCheck, NonFiniteStep
from tinyformer.training.callbacks.progress import StepProgress
from tinyformer.training.callbacks.report import Report
from tinyformer.training.callbacks.telemetry import AttentionTelemetry

__all__ = [
    "AttentionTelemetry",
    "Checkpoints",
    "FiniteCheck",
    "Interrupted",
    "NonFiniteStep",
    "Report",
    "StepProgress",
]
