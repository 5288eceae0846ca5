"""`AuthoredStep`: the author's task, template and settings of one step, from which compile makes its templates."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from hera_pipelines.compile import references
from hera_pipelines.compile.settings import DataSource, StepSettings
from tiphys.errors import TiphysError, UsageError
from tiphys.protocol.compiled_workflow import Manifest, is_fan_out, program_source
from tiphys.protocol.operations import MEMORY_OUTPUTS
from tiphys.protocol.step_spec import STEP_ANNOTATION, GpuRequest, NodeLabelValue, StepKind, StepSpec
from tiphys.records import DataVersion, json_digest
from tiphys.records.data_version import check_data_bytes
from tiphys.records.tracking import MlflowTracking

DEFAULT_GRACE_SECONDS = 30.0
"""Kubernetes' default of ``terminationGracePeriodSeconds``."""

_FILE_SUFFIX = re.compile(r"(?<=.)(\.tar)?\.[A-Za-z][A-Za-z0-9]{0,9}$")
_PROGRAM_FIELDS = ("image", "command", "args", "env", "envFrom", "workingDir", "source")


@dataclass(frozen=True)
class AuthoredStep:
    """A task of the entry DAG whose template carries the annotation ``tiphys.dev/step``."""

    name: str
    task: Manifest
    program: Manifest
    """The author's template."""
    settings: StepSettings
    has_result: bool = False
    """Whether another task reads its standard output, as ``outputs.result``."""
    data: tuple[DataVersion, ...] = ()
    """Versions of the data of its settings."""

    @property
    def template_names(self) -> references.TemplateNames:
        return references.TemplateNames(self.name)

    @property
    def is_training(self) -> bool:
        return self.settings.kind is StepKind.TRAIN

    @property
    def is_gated(self) -> bool:
        return self.settings.is_gated

    @property
    def uses_store(self) -> bool:
        """Whether programs of Tiphys in its pod read and write the store for MLflow."""
        return isinstance(self.settings.tracking, MlflowTracking) or self.settings.registration is not None

    @property
    def fan_out(self) -> bool:
        return is_fan_out(self.task)

    @property
    def input_parameters(self) -> list[Manifest]:
        return list_declared(self.program, "inputs", "parameters")

    @property
    def input_artifacts(self) -> list[Manifest]:
        return list_declared(self.program, "inputs", "artifacts")

    @property
    def output_parameters(self) -> list[Manifest]:
        return list_declared(self.program, "outputs", "parameters")

    @property
    def output_artifacts(self) -> list[Manifest]:
        return list_declared(self.program, "outputs", "artifacts")

    @property
    def grace_seconds(self) -> int:
        """Grace period in whole seconds, since the field of the pod is an integer."""
        declared = self.settings.grace_seconds
        return math.ceil(DEFAULT_GRACE_SECONDS if declared is None else declared)

    @property
    def admitted_memory(self) -> dict[str, str]:
        """Declared memory of each gang member, by the output of admit that may raise it; empty where it is fixed."""
        if self.settings.gang is None or self.settings.retry.memory_ceiling_bytes is None:
            return {}
        resources = program_container(self.program).get("resources") or {}
        memory = {name: (resources.get(side) or {}).get("memory") for side, name in MEMORY_OUTPUTS.items()}
        return {name: str(amount) for name, amount in memory.items() if amount is not None}

    @property
    def may_leave_spot(self) -> bool:
        """Whether admit may move the members of a gang off spot nodes."""
        return self.settings.gang is not None and self.settings.retry.on_demand_after is not None

    def spec(self) -> StepSpec:
        """The `StepSpec` that plugin and controller read."""
        checkpoints = self.settings.checkpoints
        if checkpoints is not None and self.settings.volume is not None:
            checkpoints = checkpoints.model_copy(update={"store": f"file://{self.settings.volume.mount_path}"})
        return StepSpec(
            name=self.name,
            kind=self.settings.kind,
            gate=self.is_gated and not self.is_training,
            parameters=tuple(p["name"] for p in self.output_parameters),
            artifacts=tuple(a["name"] for a in self.output_artifacts),
            suffixes={a["name"]: suffix for a in self.output_artifacts if (suffix := _file_suffix(a["path"]))},
            template=program_digest(self.program),
            cache=self.settings.cache,
            share=self.settings.share,
            retry=self.settings.retry,
            gpu=self._gpu_request(),
            checkpoints=checkpoints,
            grace_seconds=self.grace_seconds,
            fan_out=self.fan_out,
            gang=self.settings.gang,
            spot=self._avoidable_spot_nodes(),
            has_result=self.has_result and self.is_gated,
            data=self.data,
            tracker=self.settings.tracking.kind if self.settings.tracking else "",
            registration=self.settings.registration,
        )

    def _avoidable_spot_nodes(self) -> tuple[NodeLabelValue, ...]:
        """The spot nodes that attempts may have to avoid; empty where the policy never keeps attempts off them."""
        kinds = () if self.settings.retry.on_demand_after is None else self.settings.spot
        return tuple(NodeLabelValue(label=kind.label, value=kind.value) for kind in kinds)

    def _gpu_request(self) -> GpuRequest | None:
        """The author's `GpuRequest`, with the longest time that a pod can run, and the use of spot nodes."""
        gpu = self.settings.gpu
        if gpu is None:
            return None
        deadline = self.settings.deadline_seconds or self.program.get("activeDeadlineSeconds")
        duration = {"seconds": deadline + self.grace_seconds} if isinstance(deadline, int) else {}
        kinds = len(self.settings.spot)
        spot = {"spot": "only" if kinds == 1 else "allowed"} if kinds else {}
        return gpu.model_copy(update={**duration, **spot})


def _file_suffix(path: str) -> str:
    """Suffix of the last part of ``path``; empty where it is none that a file type has, as in ``/tmp/v1.2 (final)``."""
    found = _FILE_SUFFIX.search(PurePosixPath(path).name)
    return found[0] if found else ""


def find_steps(entry: Manifest, templates: list[Manifest]) -> list[AuthoredStep]:
    """Return the steps of the entry DAG, in the order of its tasks."""
    printing = {task for task, _ in references.fields_used(entry, [references.RESULT_FIELD])}
    programs = {t["name"]: t for t in templates if settings_annotation(t) is not None}
    return [
        AuthoredStep(
            task["name"],
            task,
            programs[task["template"]],
            _parse_settings(programs[task["template"]]),
            has_result=task["name"] in printing,
        )
        for task in entry["dag"].get("tasks") or []
        if task.get("template") in programs
    ]


def read_data_versions(steps: list[AuthoredStep], read: Callable[[DataSource], DataVersion]) -> list[AuthoredStep]:
    """Return ``steps`` with the versions of their data. Each source is read once, whichever steps name it.

    Raises:
        UsageError: the source does not exist, a step names the same data twice, or its versions are too long together.
        StoreError: its server does not answer, or refuses.
    """
    versions: dict[DataSource, DataVersion] = {}

    def with_data(step: AuthoredStep) -> AuthoredStep:
        try:
            for source in step.settings.data:
                if source not in versions:
                    versions[source] = read(source)
            data = tuple(versions[source] for source in step.settings.data)
            check_data_bytes(data)
        except TiphysError as error:
            raise type(error)(f"step {step.name!r}: {error}") from error
        names = Counter(source.name for source in data)
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise UsageError(f"step {step.name!r}: its data {twice!r} is given twice; keep one")
        return replace(step, data=data)

    return [with_data(step) for step in steps]


def settings_annotation(template: Manifest) -> str | None:
    """The author's settings as JSON; None for a template that is not a step of Tiphys."""
    text: str | None = ((template.get("metadata") or {}).get("annotations") or {}).get(STEP_ANNOTATION)
    return text


def program_container(template: Manifest) -> Manifest:
    """The main container of a container or script template.

    Raises:
        UsageError: the template is of another type.
    """
    for kind in ("container", "script"):
        container: Manifest | None = template.get(kind)
        if container is not None:
            return container
    raise UsageError(
        f"step {template['name']!r}: only container and script templates can be steps of Tiphys; "
        "run its program in a container, or leave it a plain task"
    )


def program_digest(template: Manifest) -> str:
    """Hash of the program and its declared outputs, which decide the results; resources and labels do not."""
    program = {field: text for field, text in program_container(template).items() if field in _PROGRAM_FIELDS}
    if "source" in program:
        program["source"] = program_source(program["source"])
    return json_digest(
        {
            "program": program,
            "parameters": [p["name"] for p in list_declared(template, "outputs", "parameters")],
            "artifacts": [a["name"] for a in list_declared(template, "outputs", "artifacts")],
        }
    )


def list_declared(template: Manifest, side: str, kind: str) -> list[Any]:
    """``parameters`` or ``artifacts`` of the ``inputs``, ``outputs`` or ``arguments`` of a template or task."""
    entries: list[Any] = (template.get(side) or {}).get(kind) or []
    return entries


def _parse_settings(template: Manifest) -> StepSettings:
    text = settings_annotation(template)
    return StepSettings.from_annotation(template["name"], text or "")
