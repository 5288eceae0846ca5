"""The inputs of compile beside the Workflow: settings of each step, and options of the pipeline.

`StepSettings` is JSON in the annotation ``tiphys.dev/step`` of the author's
template. So compile is a function from one document to another, and a template
written as YAML can have the same settings. In the compiled Workflow the
annotation holds the `StepSpec` instead.
"""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt, ValidationError

from tiphys.errors import UsageError, unknown_name_message
from tiphys.protocol.auto_resume_policy import AutoResumePolicy
from tiphys.protocol.drift_policy import DriftPolicy
from tiphys.protocol.gang import GangSpec
from tiphys.protocol.step_spec import MAX_DATA_VERSIONS, CheckpointPolicy, GpuRequest, RetryPolicy, StepKind
from tiphys.protocol.validation import describe_mistake
from tiphys.records import DataVersion, TriggerSpec
from tiphys.records.tracking import ModelRegistration, TrackingSettings

KindT = TypeVar("KindT")


def check_keywords(owner: str, keywords: Iterable[str], known: Collection[str]) -> None:
    """Raise `UsageError` for the first of ``keywords`` that is not ``known``; the message lists those that are."""
    for keyword in keywords:
        if keyword not in known:
            raise UsageError(unknown_name_message(owner, "keyword", keyword, known))


_OBJECTS = {
    "checkpoints": "Checkpoints(every='10m'), or None to keep none",
    "retries": "Retries(user_error=3), or a budget of another cause",
    "tracking": "Mlflow(…) or Wandb(…)",
    "auto_resume": "AutoResume(…)",
    "drift": "Drift(…)",
    "trigger": "ObjectTrigger(…)",
}
_HERA_LISTS = {
    "env": "{'NAME': 'value'}",
    "outputs": "[Artifact(name='model', path='/tmp/model')]",
}
"""Lists in which Hera ignores texts."""


def check_values(where: str, values: Mapping[str, Any]) -> None:
    """Refuse numbers and texts where an object is needed, as other tools take them; the message shows the object.

    Raises:
        UsageError: such as for ``checkpoints="10m"``.
    """
    for name, example in _OBJECTS.items():
        if isinstance(value := values.get(name), str | int | float | list | tuple | dict):
            raise UsageError(f"{where}: {name} cannot be {value!r}; write {name}={example}")
    for name in ("command", "args"):
        if isinstance(text := values.get(name), str):
            raise UsageError(f"{where}: {name} is one text; write the list {name}={text.split()}")
    for name, example in _HERA_LISTS.items():
        entries = values.get(name)
        for entry in [entries] if isinstance(entries, str) else entries if isinstance(entries, list | tuple) else []:
            if isinstance(entry, str):
                raise UsageError(f"{where}: Hera would ignore {entry!r} in {name}; write {name}={example}")


def refuse_unknown_keywords(kind: type[KindT]) -> type[KindT]:
    """Class decorator for the classes that authors call; see `check_keywords` and `check_values`."""
    known = inspect.signature(kind).parameters
    initialize = kind.__init__

    @functools.wraps(initialize)
    def check_and_initialize(self: KindT, *args: Any, **keywords: Any) -> None:
        check_keywords(f"{kind.__name__}(…)", keywords, known)
        check_values(f"{kind.__name__}(…)", keywords)
        initialize(self, *args, **keywords)

    kind.__init__ = check_and_initialize  # type: ignore[method-assign,assignment]
    return kind


class _Setting(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


@refuse_unknown_keywords
class SharedVolume(_Setting):
    """An existing PersistentVolumeClaim that every attempt mounts.

    ``access_mode`` is the mode of the claim. It must be ``ReadWriteMany``, so
    that attempts on any node can mount it.
    """

    claim: str
    mount_path: str = "/mnt/checkpoints"
    access_mode: str = "ReadWriteMany"


@refuse_unknown_keywords
class Spot(_Setting):
    """Spot nodes: their label, and whether they have a taint of the same key and value."""

    label: str
    value: str = "true"
    tainted: bool = True


@refuse_unknown_keywords
@dataclass(frozen=True)
class Dvc:
    """An output of DVC, whose hash compile reads from ``dvc.lock``. The data itself is not read.

    Attributes:
        path: The output as ``dvc.lock`` names it, ``data/train``; or the ``.dvc`` file of data that was added by hand,
            ``data/raw.dvc``.
        lock: The file ``dvc.lock``. A relative path counts from the folder in which the command runs.
    """

    path: str
    lock: str | Path = "dvc.lock"

    def __post_init__(self) -> None:
        object.__setattr__(self, "lock", str(self.lock))
        _check_data_name("Dvc", self.path)
        path = PurePosixPath(self.path)
        if path.is_absolute() or ".." in path.parts or path == PurePosixPath():
            raise UsageError(
                f"Dvc({self.path!r}): write the path of an output as dvc.lock has it, below the folder of that file, "
                "without '..'"
            )

    def __str__(self) -> str:
        return f"Dvc({self.path!r})"


@refuse_unknown_keywords
@dataclass(frozen=True)
class Lakefs:
    """A path of lakeFS at a branch, tag or commit, whose commit compile asks the server for.

    Address and credentials are those of ``lakectl``: its environment variables, or ``~/.lakectl.yaml``.

    Attributes:
        uri: ``lakefs://repository/ref/path``. A complete commit id as the ref is taken as it is, without a server.
    """

    uri: str

    def __post_init__(self) -> None:
        _check_data_name("Lakefs", self.uri)
        if not _LAKEFS_URI.fullmatch(self.uri):
            raise UsageError(
                f"{self} is no address of lakeFS: write lakefs://repository/ref or lakefs://repository/ref/path"
            )

    def __str__(self) -> str:
        return f"Lakefs({self.uri!r})"

    @property
    def parts(self) -> tuple[str, str, str]:
        """Repository, ref, and path without a slash at its begin; empty for the whole repository."""
        repository, ref, path = self.uri.removeprefix("lakefs://").split("/", 2) + [""] * (self.uri.count("/") < 4)
        return repository, ref, path


DataSource = Dvc | Lakefs
_LAKEFS_URI = re.compile(r"lakefs://[a-z0-9][a-z0-9-]{2,62}/\w[\w.~^@-]*(/.*)?", re.ASCII)
"""Repository and ref as lakeFS allows them (``api/swagger.yml``); a ref may go back, as in ``main~2``."""
_MAX_DATA_NAME = 1024


def _check_data_name(owner: str, name: str) -> None:
    problem = ""
    if not isinstance(name, str) or not name:
        problem = "it needs a text"
    elif len(name) > _MAX_DATA_NAME:
        problem = f"it is longer than {_MAX_DATA_NAME} characters"
    elif not name.isprintable() or "{{" in name:
        problem = "it has control characters, or '{{', which Argo would replace"
    if problem:
        raise UsageError(f"{owner}({str(name)[:80]!r}): {problem}")


class StepSettings(_Setting):
    """All settings of a step. `StepSpec` documents the fields that both have."""

    kind: StepKind
    gate: bool = Field(default=False, exclude_if=lambda gate: not gate)
    """Whether the plugin admits a step of the kind `StepKind.STEP` before it runs."""
    cache: bool = True
    share: bool = False
    retry: RetryPolicy = RetryPolicy()
    gpu: GpuRequest | None = None
    checkpoints: CheckpointPolicy | None = None
    volume: SharedVolume | None = None
    """Volume for checkpoints; None: the run store."""
    grace_seconds: NonNegativeFloat | None = None
    """Time between SIGTERM and SIGKILL; None: 30 s, the default of Kubernetes."""
    deadline_seconds: PositiveInt | None = None
    """activeDeadlineSeconds of the container; None: no deadline."""
    spot: tuple[Spot, ...] = ()
    """Kinds of spot nodes that the step may run on. One kind: only there. Several: the step tolerates their taints."""
    gang: GangSpec | None = Field(default=None, exclude_if=lambda gang: gang is None)
    """Several pods that train together; None: one pod."""
    data: tuple[DataSource, ...] = Field(default=(), max_length=MAX_DATA_VERSIONS, exclude_if=lambda data: not data)
    """Data that the step reads and no step makes. Compile replaces it by its versions."""
    tracking: TrackingSettings | None = Field(default=None, exclude_if=lambda tracking: tracking is None)
    """MLflow or Weights & Biases; None: the step is not tracked."""
    runtime_image: str | None = Field(default=None, exclude_if=lambda image: image is None)
    """Image from which an init container brings the launcher; None: the image of the step has tiphys."""
    registration: ModelRegistration | None = Field(default=None, exclude_if=lambda registration: registration is None)

    @property
    def is_gated(self) -> bool:
        """Whether the plugin admits it, because something is granted, or the run of a tracking service is chosen."""
        is_training = self.kind is StepKind.TRAIN
        return is_training or self.gate or self.tracking is not None or self.registration is not None

    @classmethod
    def from_annotation(cls, template: str, text: str) -> "StepSettings":
        """Parse ``text``, the annotation of the author's template called ``template``.

        Raises:
            UsageError: the annotation is not valid.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            mistake = describe_mistake(error, cls, "the document")
            raise UsageError(
                f"template {template!r}: its annotation tiphys.dev/step is not valid: {mistake}; "
                "let @step or @train write it"
            ) from error


def _refuse_data(source: DataSource) -> DataVersion:
    raise UsageError(f"{source} cannot be read here; compile the pipeline with `tiphys compile` or its own compile()")


@dataclass(frozen=True)
class CompileOptions:
    """Facts about the pipeline and the cluster that it will run in.

    Attributes:
        pipeline: Name of the pipeline; empty: the Workflow's name, or its
            generateName without the final ``-``.
        store: URL of the run store, such as ``s3://ml-runs/tiphys``; empty: the
            Workflow names none, and its steps may not keep checkpoints.
        run_name: Name of the run, made from workflow parameters, such as
            ``digits-lr{lr}``; empty: the value of the parameter ``tiphys-run``.
        queues: Queues that exist. A step that names another is refused. None
            skips the check.
        auto_resume: When the controller resumes runs automatically; None: never.
        drift: Which changes a resume or fork accepts; None: the default.
        read_data_version: Reads the version of data now; called once for each
            source, so that all steps of the Workflow have the same one.
        trigger: Which objects of a bucket start a run of the WorkflowTemplate; None: none.
        reuse: Whether a Workflow that is submitted as it is looks for shared results at its start.
    """

    pipeline: str = ""
    store: str = ""
    run_name: str = ""
    queues: frozenset[str] | None = None
    auto_resume: AutoResumePolicy | None = None
    drift: DriftPolicy | None = None
    read_data_version: Callable[[DataSource], DataVersion] = _refuse_data
    trigger: TriggerSpec | None = None
    reuse: bool = False
