"""Reads the tasks of a compiled pipeline of Kubeflow, and refuses by name those that have no counterpart.

Source: kubeflow/pipelines, ``api/v2alpha1/pipeline_spec.proto`` and ``backend/src/v2/compiler/argocompiler``.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest, split_tags

PLACEHOLDER = "{{$"
VALUE = re.compile(r"\.(inputs|outputs)\.(parameters|artifacts)\[['\"]([^'\"]+)['\"]\](?:\.(\w+))?")
_MAX_NAME = 50
_LOOP = "a loop (ParallelFor), which is not translated; write it with hera_pipelines: with_items= or with_param="
_CONDITION = "a condition (If, Elif, Else), which is not translated; write it with hera_pipelines: when="
_EXIT_HANDLER = "an exit handler (ExitHandler), which is not translated; write it with hera_pipelines: on_exit="
_NESTED = "a pipeline of its own, which is not translated; call its components in this pipeline"
_GROUPS = {"for-loop-": _LOOP, "condition-": _CONDITION, "exit-handler-": _EXIT_HANDLER}
"""What a task is whose component is a DAG, by the beginning of the name that the SDK gives it."""
_UNSUPPORTED_TASK_FIELDS = {"parameterIterator": _LOOP, "artifactIterator": _LOOP, "iteratorPolicy": _LOOP}
_DRIVER_IMAGES = "argostub/"
"""Images that no registry has: Kubeflow's driver does what they stand for (``backend/src/v2/driver/k8s.go``)."""


def refuse_platform_settings(platforms: Manifest | None) -> None:
    """Check that the settings for Kubernetes, in the document after the pipeline, change nothing.

    Raises:
        UsageError: there is one; the message names it.
    """
    kubernetes = ((platforms or {}).get("platforms") or {}).get("kubernetes") or {}
    for label, settings in ((kubernetes.get("deploymentSpec") or {}).get("executors") or {}).items():
        if settings:
            raise UsageError(
                f"executor {label!r} has settings of kfp-kubernetes ({', '.join(sorted(settings))}), which are not "
                "translated; remove them, and write them into the template"
            )
    if configured := kubernetes.get("pipelineConfig"):
        raise UsageError(
            f"its PipelineConfig has {', '.join(sorted(configured))}, which is not translated; remove it, and write "
            "what you need of it into the Workflow"
        )


@dataclass(frozen=True)
class KubeflowTask:
    """A task of the root DAG with its component and executor."""

    key: str
    name: str
    document: Manifest
    component: Manifest
    container: Manifest

    @classmethod
    def read(cls, key: str, name: str, task: Manifest, pipeline: Manifest) -> "KubeflowTask":
        """Read one task; raises `UsageError` where it has no counterpart."""
        component = pipeline["components"][task["componentRef"]["name"]]
        if group := _kind_of_group(key, task, is_dag="dag" in component):
            raise UsageError(f"task {key!r} is {group}")
        executor = pipeline["deploymentSpec"]["executors"][component["executorLabel"]]
        if "container" not in executor:
            kinds = ", ".join(sorted(executor))
            raise UsageError(f"task {key!r} is run by {kinds} and not by a container; hand its data on as a parameter")
        container = executor["container"]
        if str(container["image"]).startswith(_DRIVER_IMAGES):
            raise UsageError(
                f"task {key!r} is {container['image']}, which Kubeflow's driver does in the place of a container; use "
                "an existing claim, or volumeClaimTemplates of the Workflow"
            )
        inputs = definitions(component, "inputDefinitions")
        if status := next((key for key, it in inputs.items() if it.get("parameterType") == "TASK_FINAL_STATUS"), None):
            raise UsageError(
                f"task {key!r}: its input {status!r} is the status of another task (PipelineTaskFinalStatus), which is "
                "not translated; write an exit handler with hera_pipelines: on_exit="
            )
        return cls(key, name, task, component, container)

    @property
    def is_python(self) -> bool:
        """Whether it is a Python function, which takes ``executor_input``."""
        return any("{{$}}" in text for text in self._program())

    def _program(self) -> list[str]:
        return [*(self.container.get("command") or []), *(self.container.get("args") or [])]

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its container."""
        return {variable["name"]: variable.get("value", "") for variable in self.container.get("env") or []}

    @property
    def given(self) -> Mapping[str, Manifest]:
        """Where its parameters come from."""
        found: Mapping[str, Manifest] = (self.document.get("inputs") or {}).get("parameters") or {}
        return found

    def channels(self) -> list[str]:
        """Values of the pipeline that its container uses, and that are no inputs of its component."""
        texts = [self.container["image"], *self._program(), *self.environment.values()]
        tags = [tag for text in texts if isinstance(text, str) for _, tag in split_tags(text, PLACEHOLDER) if tag]
        found = {
            value[3] for value in map(VALUE.fullmatch, tags) if value and value.group(1, 2) == ("inputs", "parameters")
        }
        return sorted(found - self.inputs("parameters").keys())

    def inputs(self, kind: str) -> dict[str, Manifest]:
        """Its inputs of a kind, ``parameters`` or ``artifacts``, as its component defines them."""
        return definitions(self.component, "inputDefinitions", kind)

    def outputs(self, kind: str) -> dict[str, Manifest]:
        """As `inputs`, of its outputs."""
        return definitions(self.component, "outputDefinitions", kind)

    def retry_strategy(self) -> Manifest | None:
        """Argo's strategy for ``set_retry``, as Kubeflow's own compiler writes it; None without retries.

        Raises:
            UsageError: Argo takes no such back-off.
        """
        policy = self.document.get("retryPolicy") or {}
        if not policy.get("maxRetryCount"):
            return None
        strategy: Manifest = {"limit": str(int(policy["maxRetryCount"]))}
        if (duration := policy.get("backoffDuration", "0s")) != "0s":
            factor = policy.get("backoffFactor", 2)
            if factor % 1:
                raise UsageError(f"task {self.key!r}: its backoff_factor is {factor}; Argo takes a whole number")
            longest = policy.get("backoffMaxDuration", "3600s")
            strategy["backoff"] = {"duration": duration, "factor": f"{factor:g}", "maxDuration": longest}
        return strategy


def _kind_of_group(key: str, task: Manifest, *, is_dag: bool) -> str | None:
    """What a task is that is no container, and what to do; None for one that may be a container."""
    trigger = task.get("triggerPolicy") or {}
    if field := next((field for field in _UNSUPPORTED_TASK_FIELDS if task.get(field)), None):
        return _UNSUPPORTED_TASK_FIELDS[field]
    if trigger.get("condition"):
        return _CONDITION
    if is_dag:
        return next((kind for start, kind in _GROUPS.items() if key.startswith(start)), _NESTED)
    if trigger:
        return (
            "to run also after failures (the task of an ExitHandler, or ignore_upstream_failure), which is not "
            "translated; write it with hera_pipelines: on_exit= or depends="
        )
    return None


def read_tasks(document: Manifest) -> Iterator[KubeflowTask]:
    """The tasks of a pipeline, under names that can name results.

    Raises:
        UsageError: one has no counterpart; the message names it.
    """
    taken: set[str] = set()
    for key, task in document["root"]["dag"]["tasks"].items():
        name = re.sub(r"[^-a-z0-9]+", "-", key.lower()).strip("-") or "task"
        numbered = (f"{name[: _MAX_NAME - 5]}-{number}" for number in itertools.count(2))
        short = next(text for text in itertools.chain([name[:_MAX_NAME].strip("-")], numbered) if text not in taken)
        taken.add(short)
        yield KubeflowTask.read(key, short, task, document)


def definitions(owner: Manifest, side: str, kind: str = "parameters") -> dict[str, Manifest]:
    """The ``inputDefinitions`` or ``outputDefinitions`` of a component, of one kind."""
    found: dict[str, Manifest] = (owner.get(side) or {}).get(kind) or {}
    return found
