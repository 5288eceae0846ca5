"""What the author of a step asked for, as it travels from decorator to compile.

It rides in the annotation ``tiphys.dev/step`` of the author's own template, so
that compile stays a function from one document to another and a template that
was written as YAML can ask for the same. In the compiled Workflow the
annotation's place is taken by the `StepSpec`.

What compile is told beside the Workflow itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt, ValidationError

from tiphys.errors import UsageError
from tiphys.protocol.auto_resume_policy import AutoResumePolicy
from tiphys.protocol.drift_policy import DriftPolicy
from tiphys.protocol.gang import Gang
from tiphys.protocol.step_spec import CheckpointPolicy, GpuRequest, Kind, RetryPolicy


class _Setting(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SharedVolume(_Setting):
    """An existing claim that every attempt mounts, wherever it runs.

    ``access_mode`` is the claim's own; only ``ReadWriteMany`` follows an
    attempt to another node.
    """

    claim: str
    mount_path: str = "/mnt/checkpoints"
    access_mode: str = "ReadWriteMany"


class Spot(_Setting):
    """Nodes that may be taken away: their label, and their taint if they bear one of the same key."""

    label: str
    value: str = "true"
    tainted: bool = True


class StepSettings(_Setting):
    """All that a step can ask for. `StepSpec` says what the shared fields mean."""

    kind: Kind
    cache: bool = True
    share: bool = False
    retry: RetryPolicy = RetryPolicy()
    gpu: GpuRequest | None = None
    checkpoints: CheckpointPolicy | None = None
    volume: SharedVolume | None = None
    """Where checkpoints lie; None: in the run store."""
    grace_seconds: NonNegativeFloat | None = None
    """Time between SIGTERM and SIGKILL; None: Kubernetes' 30 s."""
    deadline_seconds: PositiveInt | None = None
    """activeDeadlineSeconds of the container; None: no deadline."""
    spot: tuple[Spot, ...] = ()
    """Kinds of spot nodes it may run on. One: only on those. Several: their taints are tolerated."""
    gang: Gang | None = Field(default=None, exclude_if=lambda gang: gang is None)
    """Several pods that train together; None: one."""

    @classmethod
    def from_annotation(cls, template: str, text: str) -> "StepSettings":
        """Read the annotation of the author's template called ``template``."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the document"
            raise UsageError(
                f"template {template!r}: its annotation tiphys.dev/step is not valid at {where}: {first['msg']}; "
                "let @step or @train write it"
            ) from error


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
