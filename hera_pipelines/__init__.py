"""Training pipelines written with Hera that survive on Argo Workflows."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hera_pipelines.compile.settings import SharedVolume, Spot
    from hera_pipelines.containers import Step, Train
    from hera_pipelines.cron import CronPipeline
    from hera_pipelines.drift import Drift
    from hera_pipelines.functions import step, train
    from hera_pipelines.loading import load_pipeline
    from hera_pipelines.pipeline import Pipeline
    from hera_pipelines.plugins import PluginTemplate
    from hera_pipelines.policies import AKS_SPOT, EKS_SPOT, GKE_SPOT, KARPENTER_SPOT, AutoResume, Checkpoints, Retries
    from hera_pipelines.sweeps import choice, grid, integers, log_uniform, random_search, uniform
    from hera_pipelines.sweeps.best import best

__all__ = [
    "AKS_SPOT",
    "EKS_SPOT",
    "GKE_SPOT",
    "KARPENTER_SPOT",
    "AutoResume",
    "Checkpoints",
    "CronPipeline",
    "Drift",
    "Pipeline",
    "PluginTemplate",
    "Retries",
    "SharedVolume",
    "Spot",
    "Step",
    "Train",
    "best",
    "choice",
    "grid",
    "integers",
    "load_pipeline",
    "log_uniform",
    "random_search",
    "step",
    "train",
    "uniform",
]

# Importing Hera takes half a second, and neither the `tiphys` command nor a training program should wait for it.
_HOMES = {
    **dict.fromkeys(("SharedVolume", "Spot"), "compile.settings"),
    **dict.fromkeys(("Step", "Train"), "containers"),
    **dict.fromkeys(("step", "train"), "functions"),
    **dict.fromkeys(
        ("AKS_SPOT", "EKS_SPOT", "GKE_SPOT", "KARPENTER_SPOT", "AutoResume", "Checkpoints", "Retries"), "policies"
    ),
    **dict.fromkeys(("choice", "grid", "integers", "log_uniform", "random_search", "uniform"), "sweeps"),
    "best": "sweeps.best",
    "CronPipeline": "cron",
    "Drift": "drift",
    "Pipeline": "pipeline",
    "PluginTemplate": "plugins",
    "load_pipeline": "loading",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
