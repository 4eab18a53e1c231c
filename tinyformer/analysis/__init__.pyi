from .atlas.head_atlas import HeadAtlas
from .causes.attribution import LogitAttribution
from .causes.edges import EdgeAttribution
from .causes.gates import HeadGating
from .causes.lens import LogitLens
from .causes.patching import ActivationPatching
from .causes.weights import HeadWeights
from .context import Analysis, AnalysisContext, Snapshot, Trained
from .depth.by_depth import AccuracyByDistance
from .depth.gradients import GradientFlow
from .depth.residual import ResidualSurgery
from .over_training.dynamics import TrainingDynamics
from .over_training.film import TrainingFilm
from .removal.ablation import HeadAblation, HeadImportance
from .removal.circuit import HeadCircuit
from .removal.pruning import HeadPruning
from .removal.redundancy import HeadRedundancy
from .texts.alignment import CrossAlignment
from .texts.maps import HeadMaps
from .texts.predictions import analyse_predictions
from .texts.relations import HeadRelations

__all__ = [
    "AccuracyByDistance",
    "ActivationPatching",
    "Analysis",
    "AnalysisContext",
    "CrossAlignment",
    "EdgeAttribution",
    "GradientFlow",
    "HeadAblation",
    "HeadAtlas",
    "HeadCircuit",
    "HeadGating",
    "HeadImportance",
    "HeadMaps",
    "HeadPruning",
    "HeadRedundancy",
    "HeadRelations",
    "HeadWeights",
    "LogitAttribution",
    "LogitLens",
    "ResidualSurgery",
    "Snapshot",
    "Trained",
    "TrainingDynamics",
    "TrainingFilm",
    "analyse_predictions",
]
