"""Training pipelines, written with Hera, that survive preemption and crashes on Argo Workflows."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hera_pipelines.authoring.best_trial import best
    from hera_pipelines.authoring.containers import Plain, Step, Train
    from hera_pipelines.authoring.cron import CronPipeline
    from hera_pipelines.authoring.functions.decorators import plain, step, train
    from hera_pipelines.authoring.loading import load_pipeline
    from hera_pipelines.authoring.pipeline import Pipeline
    from hera_pipelines.authoring.plugins import PluginTemplate
    from hera_pipelines.authoring.policies import AutoResume, Checkpoints, Drift, ObjectTrigger, Retries
    from hera_pipelines.authoring.registration import RegisterModel
    from hera_pipelines.authoring.step_options import AKS_SPOT, EKS_SPOT, GKE_SPOT, KARPENTER_SPOT
    from hera_pipelines.authoring.tracking import Mlflow, Wandb
    from hera_pipelines.compile.settings import Dvc, Lakefs, SharedVolume, Spot
    from hera_pipelines.sweeps import choice, grid, integers, log_uniform, random_search, uniform

__all__ = [
    "AKS_SPOT",
    "EKS_SPOT",
    "GKE_SPOT",
    "KARPENTER_SPOT",
    "AutoResume",
    "Checkpoints",
    "CronPipeline",
    "Drift",
    "Dvc",
    "Lakefs",
    "Mlflow",
    "ObjectTrigger",
    "Pipeline",
    "Plain",
    "PluginTemplate",
    "RegisterModel",
    "Retries",
    "SharedVolume",
    "Spot",
    "Step",
    "Train",
    "Wandb",
    "best",
    "choice",
    "grid",
    "integers",
    "load_pipeline",
    "log_uniform",
    "plain",
    "random_search",
    "step",
    "train",
    "uniform",
]

# Names are imported on first use: importing Hera takes half a second, which training programs need not spend.
_MODULE_BY_NAME = {
    **dict.fromkeys(("Dvc", "Lakefs", "SharedVolume", "Spot"), "compile.settings"),
    **dict.fromkeys(("Plain", "Step", "Train"), "authoring.containers"),
    **dict.fromkeys(("plain", "step", "train"), "authoring.functions.decorators"),
    **dict.fromkeys(("AKS_SPOT", "EKS_SPOT", "GKE_SPOT", "KARPENTER_SPOT"), "authoring.step_options"),
    **dict.fromkeys(("AutoResume", "Checkpoints", "Drift", "ObjectTrigger", "Retries"), "authoring.policies"),
    **dict.fromkeys(("choice", "grid", "integers", "log_uniform", "random_search", "uniform"), "sweeps"),
    **dict.fromkeys(("Mlflow", "Wandb"), "authoring.tracking"),
    "RegisterModel": "authoring.registration",
    "best": "authoring.best_trial",
    "CronPipeline": "authoring.cron",
    "Pipeline": "authoring.pipeline",
    "PluginTemplate": "authoring.plugins",
    "load_pipeline": "authoring.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_BY_NAME[name]}"), name)
