"""The annotations by which a template written as YAML says what Tiphys makes of it.

They are strings, because those of Kubernetes are. `read_settings` turns them into
the settings that `@step` and `@train` write.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from hera_pipelines.authoring.policies import DEFAULT_CHECKPOINTS, Checkpoints, Retries
from hera_pipelines.authoring.step_options import StepOptions, TrainOptions
from hera_pipelines.compile.gpu_resources import GpuResource, find_gpu_resources
from hera_pipelines.compile.settings import DataSource, Dvc, Lakefs, StepSettings
from tiphys.errors import UsageError, unknown_name_message
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import GPU_RESOURCE

_PREFIX = "tiphys.dev/"
ADOPT = f"{_PREFIX}adopt"
CHECKPOINT_FOLDER = f"{_PREFIX}checkpoint-folder"
"""Folder into which an unchanged program writes its checkpoints; `tiphys-exec` of its image commits them."""
CHECKPOINT_MARKER = f"{_PREFIX}checkpoint-marker"
RUNTIME_IMAGE = f"{_PREFIX}runtime-image"
"""Image of trainings from which an init container brings the launcher and `tiphys-exec`, for an image without."""
_GPUS, _GPU_TYPE, _QUEUE, _PRIORITY = (f"{_PREFIX}{name}" for name in ("gpus", "gpu-type", "queue", "priority"))
_GPU_SPEED, _GPU_RESOURCE = f"{_PREFIX}gpu-speed", f"{_PREFIX}gpu-resource"
_EVERY, _GRACE = f"{_PREFIX}checkpoint-every", f"{_PREFIX}grace"
_NO_CHECKPOINTS = "none"
"""What `_EVERY` says of a training that keeps no checkpoints."""
DATA = f"{_PREFIX}data"
"""Data that the program reads and no step makes: outputs of DVC and addresses of lakeFS, separated by commas."""
_GPU_MARKS = (_GPUS, _GPU_RESOURCE, _GPU_TYPE, _GPU_SPEED, _QUEUE, _PRIORITY)
_TRAIN_MARKS = (CHECKPOINT_FOLDER, CHECKPOINT_MARKER, RUNTIME_IMAGE, *_GPU_MARKS, _EVERY)
MARKS = (ADOPT, _GRACE, DATA, *_TRAIN_MARKS)


class AdoptedKind(StrEnum):
    """What becomes of a template."""

    STEP = "step"
    """Its result is recorded, and a resume takes it over."""
    TRAIN = "train"
    """It also has attempts, GPUs of a queue and checkpoints."""
    PLAIN = "plain"
    """Argo runs it as before."""


def inline_name(entry: str, task: str) -> str:
    """Name for the template written within a task, which has none; no template can be called so."""
    return f"{entry}/{task}"


def adopted_kind(template: Manifest) -> AdoptedKind | None:
    """What the annotation ``tiphys.dev/adopt`` says; None without it.

    Raises:
        UsageError: the annotation has another value.
    """
    text = _annotations(template).get(ADOPT)
    if text is None:
        return None
    try:
        return AdoptedKind(text)
    except ValueError:
        where = f"template {template.get('name')!r}: annotation {ADOPT}"
        raise UsageError(
            unknown_name_message(where, "value", str(text), [kind.value for kind in AdoptedKind])
        ) from None


def without_marks(template: Manifest) -> Manifest:
    """``template`` without the annotations of this module."""
    metadata = dict(template.get("metadata") or {})
    metadata["annotations"] = {name: text for name, text in _annotations(template).items() if name not in MARKS}
    kept = {field: value for field, value in metadata.items() if value}
    rest = {field: value for field, value in template.items() if field != "metadata"}
    return {**rest, "metadata": kept} if kept else rest


def requested_gpus(template: Manifest) -> int:
    """GPUs in the resources of the container that a lease can grant."""
    amount = _own_gpus(template).amount
    return int(amount) if amount.isascii() and amount.isdigit() else 0


def _own_gpus(template: Manifest) -> GpuResource:
    """The GPUs of the container; of several names the first, whose lease compile then compares with the others."""
    own = (gpus for gpus in find_gpu_resources(template) if not gpus.container)
    return next(own, GpuResource("", GPU_RESOURCE, "0"))


def read_settings(template: Manifest, kind: AdoptedKind) -> StepSettings:
    """The settings of a template that becomes a step.

    Raises:
        UsageError: an annotation is not valid, or is for a training and the template is none.
    """
    marks, name = _annotations(template), str(template.get("name"))
    where = f"template {name!r}"
    if kind is AdoptedKind.STEP:
        if foreign := next((name for name in _TRAIN_MARKS if name in marks), None):
            raise UsageError(f"{where}: annotation {foreign} is for a training; write {ADOPT}: train")
        return StepOptions(grace=marks.get(_GRACE), data=_read_data(marks)).step_settings(name)
    gpus = _read_number(marks, _GPUS, where, requested_gpus(template))
    types = [name.strip() for name in str(marks.get(_GPU_TYPE, "")).split(",") if name.strip()]
    return TrainOptions(
        gpus=gpus,
        gpu_resource=marks.get(_GPU_RESOURCE, _own_gpus(template).name),
        gpu_type=types or None,
        speed=_read_speed(marks, where),
        queue=marks.get(_QUEUE, "default"),
        priority=_read_number(marks, _PRIORITY, where, 0),
        checkpoints=_read_checkpoints(marks, where),
        runtime_image=marks.get(RUNTIME_IMAGE),
        grace=marks.get(_GRACE),
        retries=_translate_retries(template.get("retryStrategy"), where),
        data=_read_data(marks),
    ).step_settings(name)


def _read_data(marks: Mapping[str, Any]) -> tuple[DataSource, ...]:
    names = [name.strip() for name in str(marks.get(DATA, "")).split(",") if name.strip()]
    return tuple(Lakefs(name) if name.startswith("lakefs:") else Dvc(name) for name in names)


def _read_speed(marks: Mapping[str, Any], where: str) -> Mapping[str, float] | None:
    if _GPU_SPEED not in marks:
        return None
    try:
        pairs = [pair.split("=") for pair in str(marks[_GPU_SPEED]).split(",")]
        return {gpu_type.strip(): float(speed) for gpu_type, speed in pairs}
    except ValueError:
        raise UsageError(
            f"{where}: annotation {_GPU_SPEED} is {marks[_GPU_SPEED]!r}; write types and numbers, such as "
            "'H100=2.5,A100=1'"
        ) from None


def _read_checkpoints(marks: Mapping[str, Any], where: str) -> Checkpoints | None:
    every = marks.get(_EVERY, DEFAULT_CHECKPOINTS.every)
    if every != _NO_CHECKPOINTS:
        return Checkpoints(every=every)
    if CHECKPOINT_FOLDER in marks:
        raise UsageError(
            f"{where}: annotation {_EVERY} is {_NO_CHECKPOINTS!r}, and {CHECKPOINT_FOLDER} names a folder of "
            "checkpoints; drop one of them"
        )
    return None


def _translate_retries(strategy: Manifest | None, where: str) -> Retries | None:
    """Budgets in the place of Argo's ``retryStrategy``, which a training cannot have."""
    if strategy is None:
        return None
    limit = str(strategy.get("limit", ""))
    if not limit.isdigit() or strategy.get("expression"):
        raise UsageError(
            f"{where}: a retryStrategy without a fixed limit, or with an expression, has no counterpart for a "
            f"training; drop it, or write {ADOPT}: step"
        )
    return Retries(user_error=int(limit), unknown=int(limit))


def _read_number(marks: Mapping[str, Any], name: str, where: str, default: int) -> int:
    text = str(marks.get(name, default))
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{where}: annotation {name} is {text!r}; write a whole number in quotes, such as '1'")
    return int(text)


def _annotations(template: Manifest) -> Mapping[str, Any]:
    return (template.get("metadata") or {}).get("annotations") or {}
