"""Ready-made pipelines: authors supply only the programs."""

from hera_pipelines.pipelines.programs import Program, Training
from hera_pipelines.pipelines.sweep import sweep_pipeline
from hera_pipelines.pipelines.train import train_pipeline

__all__ = ["Program", "Training", "sweep_pipeline", "train_pipeline"]
