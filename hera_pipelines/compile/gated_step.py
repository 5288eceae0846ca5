"""One gated step on its way through compile: the author's task, program and settings together."""

import math
from dataclasses import dataclass
from typing import Any

from hera_pipelines.compile import references as names
from hera_pipelines.compile.settings import StepSettings
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.fan_out import is_fan_out
from tiphys.protocol.operations import MEMORY_OUTPUTS
from tiphys.protocol.step_spec import STEP_ANNOTATION, GpuRequest, Kind, NodeKind, StepSpec
from tiphys.records import digest

DEFAULT_GRACE_SECONDS = 30.0
"""What Kubernetes gives a pod that asks for nothing."""

_PROGRAM_FIELDS = ("image", "command", "args", "env", "envFrom", "workingDir", "source")


@dataclass(frozen=True)
class GatedStep:
    """A task of the entry DAG whose template carries the annotation ``tiphys.dev/step``."""

    name: str
    task: Manifest
    program: Manifest
    """The author's template."""
    settings: StepSettings

    @property
    def names(self) -> names.StepNames:
        return names.StepNames(self.name)

    @property
    def trains(self) -> bool:
        return self.settings.kind is Kind.TRAIN

    @property
    def fan_out(self) -> bool:
        return is_fan_out(self.task)

    @property
    def input_parameters(self) -> list[Manifest]:
        return listed(self.program, "inputs", "parameters")

    @property
    def input_artifacts(self) -> list[Manifest]:
        return listed(self.program, "inputs", "artifacts")

    @property
    def output_parameters(self) -> list[Manifest]:
        return listed(self.program, "outputs", "parameters")

    @property
    def output_artifacts(self) -> list[Manifest]:
        return listed(self.program, "outputs", "artifacts")

    @property
    def grace_seconds(self) -> int:
        """Whole seconds, because that is what a pod can have."""
        declared = self.settings.grace_seconds
        return math.ceil(DEFAULT_GRACE_SECONDS if declared is None else declared)

    @property
    def admitted_memory(self) -> dict[str, str]:
        """Memory of each of several pods by the name of admit's answer, as declared; empty where it may not grow."""
        if self.settings.gang is None or self.settings.retry.memory_ceiling_bytes is None:
            return {}
        resources = program_container(self.program).get("resources") or {}
        memory = {name: (resources.get(side) or {}).get("memory") for side, name in MEMORY_OUTPUTS.items()}
        return {name: str(amount) for name, amount in memory.items() if amount is not None}

    @property
    def leaves_spot(self) -> bool:
        """Whether admit says, for several pods, if they run on spot nodes."""
        return self.settings.gang is not None and self.settings.retry.on_demand_after is not None

    def spec(self) -> StepSpec:
        """The policy that plugin and controller follow."""
        checkpoints = self.settings.checkpoints
        if checkpoints is not None and self.settings.volume is not None:
            checkpoints = checkpoints.model_copy(update={"store": f"file://{self.settings.volume.mount_path}"})
        return StepSpec(
            name=self.name,
            kind=self.settings.kind,
            parameters=tuple(p["name"] for p in self.output_parameters),
            artifacts=tuple(a["name"] for a in self.output_artifacts),
            template=program_digest(self.program),
            cache=self.settings.cache,
            share=self.settings.share,
            retry=self.settings.retry,
            gpu=self._gpu(),
            checkpoints=checkpoints,
            grace_seconds=self.grace_seconds,
            fan_out=self.fan_out,
            gang=self.settings.gang,
            spot=self._left_spot(),
        )

    def _left_spot(self) -> tuple[NodeKind, ...]:
        """The spot nodes that attempts may have to stay off; none where they never do."""
        kinds = () if self.settings.retry.on_demand_after is None else self.settings.spot
        return tuple(NodeKind(label=kind.label, value=kind.value) for kind in kinds)

    def _gpu(self) -> GpuRequest | None:
        """The GPUs, with the time after which Argo ends the pod, and what it may use, where the author says so."""
        gpu = self.settings.gpu
        if gpu is None:
            return None
        deadline = self.settings.deadline_seconds or self.program.get("activeDeadlineSeconds")
        known = {"seconds": deadline + self.grace_seconds} if isinstance(deadline, int) else {}
        kinds = len(self.settings.spot)
        return gpu.model_copy(update={**known, **({"spot": "only" if kinds == 1 else "allowed"} if kinds else {})})


def find_gated(entry: Manifest, templates: list[Manifest]) -> list[GatedStep]:
    """The gated steps of the entry DAG, in the order written."""
    programs = {t["name"]: t for t in templates if settings_text(t) is not None}
    return [
        GatedStep(task["name"], task, programs[task["template"]], _settings(programs[task["template"]]))
        for task in entry["dag"].get("tasks") or []
        if task.get("template") in programs
    ]


def settings_text(template: Manifest) -> str | None:
    """The author's settings, as annotated; None for a template that Tiphys leaves alone."""
    text: str | None = ((template.get("metadata") or {}).get("annotations") or {}).get(STEP_ANNOTATION)
    return text


def program_container(template: Manifest) -> Manifest:
    """The main container of a container or script template.

    Raises:
        UsageError: the template is of another type.
    """
    for kind in ("container", "script"):
        if (found := template.get(kind)) is not None:
            container: Manifest = found
            return container
    raise UsageError(
        f"step {template['name']!r}: only container and script templates can be gated; "
        "move what it does into a container, or leave it a plain task"
    )


def program_digest(template: Manifest) -> str:
    """Hash of what decides the outputs: the program and what it declares to write, not its resources or labels."""
    container = program_container(template)
    return digest(
        {
            "program": {field: container[field] for field in _PROGRAM_FIELDS if field in container},
            "parameters": [p["name"] for p in listed(template, "outputs", "parameters")],
            "artifacts": [a["name"] for a in listed(template, "outputs", "artifacts")],
        }
    )


def listed(template: Manifest, side: str, kind: str) -> list[Any]:
    """``parameters`` or ``artifacts`` of the ``inputs``, ``outputs`` or ``arguments`` of a template or task."""
    found: list[Any] = (template.get(side) or {}).get(kind) or []
    return found


def _settings(template: Manifest) -> StepSettings:
    text = settings_text(template)
    return StepSettings.from_annotation(template["name"], text or "")
