"""What compile is told beside the Workflow itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiphys.protocol.auto_resume import AutoResumePolicy
from tiphys.protocol.drift import DriftPolicy


@dataclass(frozen=True)
class CompileOptions:
    """Facts about the pipeline and the place it will run in.

    Attributes:
        pipeline: Name of the pipeline; empty: the Workflow's name, or its
            generateName without the final ``-``.
        store: URL of the run store, such as ``s3://ml/tiphys``; empty: steps
            learn none, and checkpoints need a shared volume.
        run_name: Name of the run, made from workflow parameters, such as
            ``digits-lr{lr}``; empty: the parameter ``tiphys-run`` decides.
        queues: Queues that exist. A step that names another is refused. None
            skips the check.
        executor_plugin: The executor plugin that the Workflow brings along, as
            an ExecutorPlugin or its ConfigMap; None: Argo is set up with one.
        auto_resume: When its runs go on by themselves; None: never.
        drift: What may change when its runs go on; None: the default.
    """

    pipeline: str = ""
    store: str = ""
    run_name: str = ""
    queues: frozenset[str] | None = None
    executor_plugin: Mapping[str, Any] | None = None
    auto_resume: AutoResumePolicy | None = None
    drift: DriftPolicy | None = None
