"""Pipelines that are ready to use: bring the programs."""

from hera_pipelines.pipelines.train import Program, Training, train_pipeline

__all__ = ["Program", "Training", "train_pipeline"]
