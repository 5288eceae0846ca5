"""The Workflows that are compared: each with Tiphys, and its twin that Argo runs alone.

A twin has the same tasks, images, programs and outputs, and a retryStrategy where Tiphys compiles one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hera.workflows import Artifact, Parameter
from hera.workflows.models import ValueFrom

from hera_pipelines import Pipeline, Retries, Step, Train
from tiphys.protocol.compiled_workflow import Manifest

EMPTY_PLUGIN = "bench-empty"
LIMIT = 10
"""Tasks of a fan-out that run at the same time."""
ACCOUNT = "tiphys-workflow"
EXECUTOR = "tiphys-executor"
_PATH = "/tmp/value"
_WRITE = f"echo '{{{{inputs.parameters.value}}}}' > {_PATH}"
_MODEL = "/tmp/model"
_TRAIN = f"echo model > {_MODEL}"
_EXIT_ONCE = 'test "$TIPHYS_ATTEMPT" != 1 || exit 75; '
_BACKOFF = "1ms"
"""The shortest that there is: what is left is what an attempt costs."""
_PLAIN_EXIT_ONCE = "test '{{retries}}' != 0 || exit 75; "


@dataclass(frozen=True)
class Twins:
    """Makes both forms of each Workflow."""

    image: str
    store: str

    def line(self, steps: int) -> dict[str, Manifest]:
        """``steps`` steps in a row; each writes a parameter that the next one takes.

        The form ``empty`` is the plain one with a plugin node before each pod, which does nothing.
        """
        with self._pipeline("bench-line") as pipeline:
            value: Any = "0"
            for name in _names(steps):
                value = self._step(name)(value)
        return {
            "plain": _workflow("line", [_dag(_line(steps)), *map(self._container, _names(steps))]),
            "tiphys": pipeline.compile(),
            "empty": _workflow(
                "empty",
                [
                    _dag(_gated_line(steps)),
                    {"name": "gate", "plugin": {EMPTY_PLUGIN: {}}},
                    *map(self._container, _names(steps)),
                ],
            ),
        }

    def train(self, exits: bool) -> dict[str, Manifest]:
        """One training; with ``exits`` its first attempt ends with exit code 75, and the next one follows at once."""
        with self._pipeline("bench-train") as pipeline:
            command = ["sh", "-c", (_EXIT_ONCE if exits else "") + _TRAIN]
            model = Artifact(name="model", path=_MODEL)
            Train(name="train", command=command, outputs=model, retries=Retries(backoff=_BACKOFF), **self._options)()
        outputs = {"artifacts": [{"name": "model", "path": _MODEL}]}
        plain = ["sh", "-c", (_PLAIN_EXIT_ONCE if exits else "") + _TRAIN]
        container = {"name": "train", "container": self._program(plain), "outputs": outputs, **_PLAIN_RETRY}
        return {
            "plain": _workflow("train", [_dag([{"name": "train", "template": "train"}]), container]),
            "tiphys": pipeline.compile(),
        }

    def fan(self, tasks: int) -> dict[str, Manifest]:
        """As many tasks of items that are known before, `LIMIT` at a time."""
        items = [str(number) for number in range(tasks)]
        with self._pipeline("bench-fan") as pipeline:
            self._step("task")("{{item}}", with_items=items, parallel=LIMIT)
        task = {**_task("task", "task", "{{item}}"), "withItems": items}
        return {
            "plain": _workflow("fan", [_dag([task], parallelism=LIMIT), self._container("task")]),
            "tiphys": pipeline.compile(),
        }

    def items(self, count: int) -> dict[str, Manifest]:
        """As many tasks of items that a first task prints, `LIMIT` at a time."""
        listing = f"echo '{json.dumps(list(range(count)), separators=(',', ':'))}' > {_PATH}"
        with self._pipeline("bench-items") as pipeline:
            listed = Step(name="list", command=["sh", "-c", listing], outputs=_value(), **self._options)()
            self._step("task")("{{item}}", with_param=listed.get_parameter("value"), parallel=LIMIT)
        task = {
            **_task("task", "task", "{{item}}", depends="list"),
            "withParam": "{{tasks.list.outputs.parameters.value}}",
        }
        program = self._program(["sh", "-c", listing])
        first = {"name": "list", "container": program, "outputs": _PLAIN_OUTPUTS, **_PLAIN_RETRY}
        tasks = [{"name": "list", "template": "list"}, task]
        return {
            "plain": _workflow("items", [_dag(tasks, parallelism=LIMIT), first, self._container("task")]),
            "tiphys": pipeline.compile(),
        }

    @property
    def _options(self) -> dict[str, Any]:
        return {"image": self.image, "image_pull_policy": "IfNotPresent"}

    def _pipeline(self, name: str) -> Pipeline:
        return Pipeline(name, store=self.store, service_account_name=ACCOUNT)

    def _step(self, name: str) -> Any:
        inputs = [Parameter(name="value")]
        return Step(name=name, command=["sh", "-c", _WRITE], inputs=inputs, outputs=_value(), **self._options)

    def _container(self, name: str) -> Manifest:
        inputs = {"parameters": [{"name": "value"}]}
        program = self._program(["sh", "-c", _WRITE])
        return {"name": name, "inputs": inputs, "outputs": _PLAIN_OUTPUTS, "container": program, **_PLAIN_RETRY}

    def _program(self, command: Sequence[str]) -> Manifest:
        return {"image": self.image, "imagePullPolicy": "IfNotPresent", "command": list(command)}


_PLAIN_RETRY = {"retryStrategy": {"limit": "1"}}
_PLAIN_OUTPUTS = {"parameters": [{"name": "value", "valueFrom": {"path": _PATH}}]}


def _value() -> list[Parameter]:
    return [Parameter(name="value", value_from=ValueFrom(path=_PATH))]


def _names(steps: int) -> list[str]:
    return [f"s{number}" for number in range(steps)]


def _line(steps: int) -> list[Manifest]:
    names = _names(steps)
    return [
        _task(names[0], names[0], "0"),
        *(
            _task(name, name, f"{{{{tasks.{before}.outputs.parameters.value}}}}", depends=before)
            for before, name in pairwise(names)
        ),
    ]


def _gated_line(steps: int) -> list[Manifest]:
    tasks = []
    for task in _line(steps):
        gate: Manifest = {"name": f"{task['name']}-gate", "template": "gate"}
        if "depends" in task:
            gate["depends"] = task["depends"]
        depends = " && ".join(filter(None, [task.get("depends"), gate["name"]]))
        tasks += [gate, {**task, "depends": depends}]
    return tasks


def _task(name: str, template: str, value: str, depends: str = "") -> Manifest:
    arguments = {"parameters": [{"name": "value", "value": value}]}
    return {"name": name, "template": template, "arguments": arguments, **({"depends": depends} if depends else {})}


def _dag(tasks: Sequence[Manifest], parallelism: int | None = None) -> Manifest:
    limit = {} if parallelism is None else {"parallelism": parallelism}
    return {"name": "main", "dag": {"tasks": list(tasks)}, **limit}


def _workflow(name: str, templates: Sequence[Manifest]) -> Manifest:
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"generateName": f"bench-plain-{name}-"},
        "spec": {
            "entrypoint": "main",
            "serviceAccountName": ACCOUNT,
            "automountServiceAccountToken": False,
            "executor": {"serviceAccountName": EXECUTOR},
            "templates": list(templates),
        },
    }
