"""What differs between a Workflow and what adoption made of it, beyond what adoption may add.

Two comparisons, neither of which uses the product's own reader or its own check of meaning:

- `marked_differences`: the text before and after ``tiphys adopt``, as parsed documents. Only `MARK` may be new.
- `compiled_differences`: the author's templates and what Argo gets for them. Only the additions in `ADDED` may be new,
  and an input, output, hook or default may stand in the place that compile gives it.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import yaml

from hera_pipelines.authoring.adoption import Adoption
from tiphys.protocol.compiled_workflow import Manifest

MARK = "tiphys.dev/adopt"
ADDED = {
    "Workflow": ("executor", "automountServiceAccountToken", "parameters tiphys-run and tiphys-submission"),
    "program of a step": (
        "variables TIPHYS_… and CHECKPOINT_URI",
        "terminationMessagePolicy",
        "the annotation tiphys.dev/step, and labels tiphys.dev/… of a step with a gate",
        "inputs tiphys-…, and the default [] of an input that takes the outputs of all items",
        "outputs tiphys-… of a step with a gate, and keys for the author's artifacts, which have no archive",
        "retryStrategy, where the author has none",
        "the modes by which programs that are not root can read an input artifact",
    ),
}
"""All that a compiled Workflow has and the author's has not, beside templates of Tiphys' own."""
_OWN = "tiphys"
_VARIABLES = ("TIPHYS_", "CHECKPOINT_URI")
_LEAVES = ("container", "script")
_MOVED = ("entrypoint", "templates", "onExit", "podSpecPatch", "templateDefaults", "hooks", "arguments")
"""Fields of the Workflow that are compared apart from the others."""
_INPUT_MODES = {"mode": 0o755, "recurseMode": True}


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Paths at which two parsed parts differ, with both values; ``1``, ``1.0`` and ``true`` are three values."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            here = f"{path}.{key}" if path else str(key)
            if key not in after:
                yield f"{here}: {before[key]!r} is gone"
            elif key not in before:
                yield f"{here}: {after[key]!r} is new"
            else:
                yield from differences(before[key], after[key], here)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(pair[0], pair[1], f"{path}[{index}]")
    elif type(before) is not type(after) or before != after:
        yield f"{path}: {before!r} became {after!r}"


def marked_differences(before: str, after: str) -> list[str]:
    """What marks changed in a file, beyond annotations `MARK` of templates that had none."""
    documents = [list(yaml.load_all(text, Loader=yaml.SafeLoader)) for text in (before, after)]
    if len(documents[0]) != len(documents[1]):
        return ["the number of documents"]
    return [
        found for old, new in zip(*documents, strict=True) for found in differences(old, _without_new_marks(new, old))
    ]


def _without_new_marks(after: Any, before: Any) -> Any:
    """``after`` without each `MARK` that ``before`` does not have in the same place, and what was made to hold it."""
    if isinstance(after, list) and isinstance(before, list):
        return [_without_new_marks(new, old) for new, old in zip(after, before, strict=False)] + after[len(before) :]
    if not isinstance(after, dict) or not isinstance(before, dict):
        return after
    without = {key: _without_new_marks(value, before.get(key)) for key, value in after.items()}
    annotations = (without.get("metadata") or {}).get("annotations") or {}
    if "metadata" in without and isinstance(without["metadata"], dict) and annotations.get(MARK) in ("step", "train"):
        old_metadata = before.get("metadata")
        if MARK not in ((old_metadata or {}).get("annotations") or {}):
            left = {key: value for key, value in annotations.items() if key != MARK}
            if left or "annotations" in (old_metadata or {}):
                old = (old_metadata or {}).get("annotations")
                without["metadata"] = {**without["metadata"], "annotations": left or old}
            else:
                without["metadata"] = {
                    k: v for k, v in without["metadata"].items() if k != "annotations"
                } or old_metadata
                if "metadata" not in before and not without["metadata"]:
                    del without["metadata"]
    return without


def compiled_differences(adoption: Adoption, compiled: Manifest) -> list[str]:
    """What Argo would do otherwise with the author's templates, after compile.

    Args:
        adoption: What became of the author's Workflow.
        compiled: The Workflow that Argo gets.
    """
    comparison = _Comparison(adoption, compiled["spec"])
    return [f"{adoption.document.name}: {found}" for found in comparison.all_differences()]


class _Comparison:
    def __init__(self, adoption: Adoption, after: Manifest) -> None:
        self.before: Manifest = adoption.document.as_workflow()["spec"]
        self.after = after
        self.kinds = {one.template: one.kind.value for one in adoption.proposals}
        self.old = {template["name"]: template for template in self.before["templates"]}
        self.new = {template["name"]: template for template in after["templates"]}
        self.entry = self.old[self.before["entrypoint"]]
        self.tasks = self._tasks_of_entry()

    def all_differences(self) -> Iterator[str]:
        yield from self._workflow()
        yield from self._entry()
        for name, template in self.old.items():
            if self.kinds.get(name) == "plain" and name != self.entry["name"]:
                yield from self._plain(template)
        for task, template in self._steps():
            yield from self._step(task, template)

    def _tasks_of_entry(self) -> list[Manifest]:
        """The author's tasks, each with the tasks that it waits for."""
        if any(field in self.entry for field in _LEAVES):
            return [{"name": self.entry["name"], "template": self.entry["name"], "dependencies": []}]
        if "dag" in self.entry:
            return list(self.entry["dag"].get("tasks") or [])
        tasks: list[Manifest] = []
        before: list[str] = []
        for group in filter(None, (g if isinstance(g, list) else [g] for g in self.entry["steps"])):
            tasks += [{**step, "dependencies": before} for step in group]
            before = [step["name"] for step in group]
        return tasks

    def _steps(self) -> Iterator[tuple[str, Manifest]]:
        for task in self.tasks:
            if task.get("inline") and self.kinds.get(f"{self.entry['name']}/{task['name']}") != "plain":
                yield task["name"], task["inline"]
            elif self.kinds.get(task.get("template") or "") in ("step", "train"):
                yield task["name"], self.old[task["template"]]

    def _workflow(self) -> Iterator[str]:
        ignored = (*_MOVED, "executor", "automountServiceAccountToken")
        yield from differences(_without(self.before, ignored), _without(self.after, ignored), "spec")
        for field in ("executor", "automountServiceAccountToken"):
            if field in self.before:
                yield from differences(self.before[field], self.after.get(field), f"spec.{field}")
        yield from differences(_arguments(self.before), _arguments(self.after), "arguments")
        hooks = {k: v for k, v in (self.before.get("hooks") or {}).items() if k != "exit"}
        yield from differences(hooks, self.after.get("hooks") or {}, "hooks")
        handler = self.before.get("onExit") or (self.before.get("hooks") or {}).get("exit", {}).get("template")
        handlers = [task["template"] for task in self.new["tiphys-exit"]["dag"]["tasks"] if task["name"] == "handler"]
        if handlers != ([self._plain_name(handler)] if handler else []):
            yield f"onExit: {handler!r} became {handlers}"

    def _entry(self) -> Iterator[str]:
        entry = self.new[self.after["entrypoint"]]
        new_tasks = {task["name"]: task for task in entry["dag"]["tasks"]}
        if len(new_tasks) != len(self.tasks):
            yield f"entry point: {len(self.tasks)} tasks became {len(new_tasks)}"
            return
        if not any(field in self.entry for field in _LEAVES):
            fields = {k: v for k, v in self.entry.items() if k not in ("name", "steps", "dag")}
            after = {k: v for k, v in entry.items() if k not in ("name", "dag", "parallelism")}
            fields.pop("parallelism", None)  # compile may lower it
            if not fields.get("metadata"):
                fields.pop("metadata", None)
            yield from differences(self._canonical(fields), self._canonical(after), "entry point")
        for task in self.tasks:
            new = new_tasks.get(self._storable(task["name"]))
            if new is None:
                yield f"task {task['name']}: it is gone"
                continue
            ignored = ("name", "template", "inline", "dependencies", "arguments", "templateRef")
            where = f"task {task['name']}"
            fields = self._canonical(_without(task, ignored))
            yield from differences(fields, self._canonical(_without(new, ignored)), where)
            waits = sorted(self._storable(name) for name in task.get("dependencies") or [])
            yield from differences(waits, sorted(new.get("dependencies") or []), f"{where} waits")
            if not any(field in self.entry for field in _LEAVES):
                given, now = (self._canonical(self._named(_arguments(one), task["name"])) for one in (task, new))
                yield from differences(given, now, f"{where} arguments")
            if "templateRef" in task:
                yield from differences(task["templateRef"], new.get("templateRef"), where)

    def _plain(self, template: Manifest) -> Iterator[str]:
        new = self.new.get(self._plain_name(template["name"]))
        if new is None:
            yield f"template {template['name']}: it is gone"
            return
        moved = self._with_defaults(template)
        users = [task["name"] for task in self.tasks if task.get("template") == template["name"]]
        after = self._nameless(new)
        found = [
            list(differences(self._nameless(text), after, f"template {template['name']}"))
            for text in (moved, *(self._named(moved, user) for user in users))
        ]
        yield from min(found, key=len)  # the copy for a task has its name in the place of the variable

    def _step(self, task: str, template: Manifest) -> Iterator[str]:
        step = self._storable(task)
        where, entry = f"step {step}", self.new[self.after["entrypoint"]]
        called = next((one["template"] for one in entry["dag"]["tasks"] if one["name"] == step), "")
        wrapper = self.new.get(called, {})
        run = self.new.get(f"{step}-run") if "dag" in wrapper else wrapper
        if not run:
            yield f"{where}: it has no program"
            return
        before = self._with_defaults(template)
        leaf = next(field for field in _LEAVES if field in before)
        apart = ("name", "metadata", "inputs", "outputs", "retryStrategy", leaf)
        is_train = template.get("name") and self.kinds.get(template["name"]) == "train"
        ignored = (*apart, *(("podSpecPatch", "nodeSelector", "tolerations") if is_train else ()))
        yield from differences(_without(before, ignored), _without(run, ignored), where)
        yield from differences(_own_metadata(before), _own_metadata(run), f"{where} metadata")
        if before.get("retryStrategy") is not None and not is_train:
            yield from differences(before["retryStrategy"], run.get("retryStrategy"), f"{where} retryStrategy")
        yield from self._program(before[leaf], run.get(leaf) or {}, where, task=task, is_train=bool(is_train))
        yield from self._inputs(before, run, wrapper, where)
        if run is wrapper:
            yield from self._own_outputs(before, run, where)
        else:
            yield from self._outputs(before.get("outputs") or {}, run, wrapper, where)

    def _program(self, before: Manifest, after: Manifest, where: str, *, task: str, is_train: bool) -> Iterator[str]:
        old, new = dict(before), dict(after)
        own = [one for one in new.get("env") or [] if not one["name"].startswith(_VARIABLES)]
        yield from differences(list(old.pop("env", None) or []), own, f"{where} env")
        new.pop("env", None)
        if "terminationMessagePolicy" not in old:
            new.pop("terminationMessagePolicy", None)
        if is_train:  # the launcher stands before the program
            words = [*(old.pop("command", None) or []), *(old.pop("args", None) or [])]
            launched = [*(new.pop("command", None) or []), *(new.pop("args", None) or [])]
            if launched[len(launched) - len(words) :] != words:
                yield f"{where}: {words} became {launched}"
            new.pop("envFrom", None)
            old, new = _map_numbers(old), _map_numbers(new)  # compile writes amounts of GPUs as text
        yield from differences(self._named(old, task), self._named(new, task), where)

    def _inputs(self, before: Manifest, run: Manifest, wrapper: Manifest, where: str) -> Iterator[str]:
        inputs = before.get("inputs") or {}
        given = _by_name(wrapper, "inputs", "parameters")
        declared = _by_name(before, "inputs", "parameters")
        for name, parameter in given.items():
            if parameter.get("default") == "[]" and "default" not in declared.get(name, {}):
                given[name] = _without(parameter, ("default",))
        yield from differences(declared, given, f"{where} inputs")
        missing = given.keys() - _by_name(run, "inputs", "parameters").keys()
        if missing:
            yield f"{where}: its program lacks the inputs {sorted(missing)}"
        read, handed = _by_name(run, "inputs", "artifacts"), _by_name(wrapper, "inputs", "artifacts")
        for artifact in inputs.get("artifacts") or []:
            name = artifact["name"]
            both = {**handed.get(name, {}), **read.get(name, {})}
            for field in _INPUT_MODES:
                if field not in artifact and "mode" not in artifact:
                    both.pop(field, None)
            yield from differences(artifact, both, f"{where} input {name}")

    def _own_outputs(self, before: Manifest, run: Manifest, where: str) -> Iterator[str]:
        """What a step without a gate does otherwise with its outputs, than to put its artifacts in another place."""
        given, now = (_by_name(one, "outputs", "parameters") for one in (before, run))
        yield from differences(given, now, f"{where} output parameters")
        given, now = (
            {name: _without(one, ("archive", "s3")) for name, one in _by_name(template, "outputs", "artifacts").items()}
            for template in (before, run)
        )
        yield from differences(given, now, f"{where} output artifacts")

    def _outputs(self, outputs: Manifest, run: Manifest, wrapper: Manifest, where: str) -> Iterator[str]:
        names = [one["name"] for kind in ("parameters", "artifacts") for one in outputs.get(kind) or []]
        shown = [
            one["name"]
            for kind in ("parameters", "artifacts")
            for one in (wrapper.get("outputs") or {}).get(kind) or []
        ]
        if sorted(names) != sorted(name for name in shown if name != "result" or name in names):
            yield f"{where}: its outputs {names} became {shown}"
        paths = {one["path"] for one in (run.get("outputs") or {}).get("artifacts") or []}
        for parameter in outputs.get("parameters") or []:
            if parameter["valueFrom"].get("path") not in paths:
                yield f"{where}: output {parameter['name']} is not read from {parameter['valueFrom']}"
        for artifact in outputs.get("artifacts") or []:
            if artifact["path"] not in paths:
                yield f"{where}: output {artifact['name']} is not read from {artifact['path']}"

    def _with_defaults(self, template: Manifest) -> Manifest:
        """A template with the fields of the Workflow that compile writes into it."""
        defaults = self.before.get("templateDefaults") or {}
        kept = (self.after.get("templateDefaults") or {}).keys()
        merged = dict(template)
        if any(field in template for field in _LEAVES):
            merged = {**{field: value for field, value in defaults.items() if field not in kept}, **merged}
        has_pod = any(field in template for field in (*_LEAVES, "containerSet", "resource", "data"))
        if "podSpecPatch" in self.before and has_pod:
            merged.setdefault("podSpecPatch", self.before["podSpecPatch"])
        return merged

    def _nameless(self, template: Manifest) -> Manifest:
        """A plain template without its name, and without metadata that say nothing."""
        return _without(self._renamed(template), ("name",) if template.get("metadata") else ("name", "metadata"))

    def _plain_name(self, name: str) -> str:
        """A plain template with the name of a step has another one."""
        fresh = f"{name}-template"
        return fresh if fresh in self.new and fresh not in self.old else name

    def _storable(self, name: str) -> str:
        return re.sub(r"[^-a-z0-9]+", "-", name.lower()).strip("-")[:50]

    def _named(self, part: Any, task: str) -> Any:
        """A program with the name of its task in the place of the variable."""
        return _map_texts(part, lambda text: re.sub(r"\{\{\s*(steps|tasks)\.name\s*\}\}", task, text))

    def _canonical(self, part: Any) -> Any:
        """References as compile writes them: to small tasks, to a recorded result, to renamed templates."""
        names = {task["name"]: self._storable(task["name"]) for task in self.tasks}

        def rewrite(text: str) -> str:
            text = re.sub(r"\bsteps(?=[.\[])", "tasks", text) if "steps" in self.entry else text
            for old, new in names.items():
                text = re.sub(rf"(?<=tasks\.){re.escape(old)}(?=\.)", new, text)
                text = re.sub(rf"(?<=tasks\[['\"]){re.escape(old)}(?=['\"]\])", new, text)
            return text.replace(".outputs.parameters.result", ".outputs.result")

        depends = {"depends": lambda text: re.sub(r"[\w-]+", lambda found: names.get(found[0], found[0]), text)}
        return _map_keys(self._renamed(_map_texts(part, rewrite)), depends)

    def _renamed(self, part: Any) -> Any:
        renamed = {self._plain_name(name): name for name in self.old}
        return _map_keys(part, dict.fromkeys(("template", "onExit"), lambda name: renamed.get(name, name)))


def _without(part: Mapping[str, Any], names: Collection[str]) -> Manifest:
    """``part`` without these fields, and without those that are null, which Argo takes for absent."""
    return {field: value for field, value in part.items() if field not in names and value is not None}


def _own_metadata(template: Mapping[str, Any]) -> Manifest:
    metadata = template.get("metadata") or {}
    kept = {
        field: {key: value for key, value in (metadata.get(field) or {}).items() if not key.startswith(f"{_OWN}.dev/")}
        for field in ("labels", "annotations")
    }
    return {field: values for field, values in kept.items() if values}


def _arguments(owner: Mapping[str, Any]) -> Manifest:
    arguments = owner.get("arguments") or {}
    kept = {
        kind: [one for one in arguments.get(kind) or [] if not one["name"].startswith(f"{_OWN}-")]
        for kind in ("parameters", "artifacts")
    }
    return {kind: values for kind, values in kept.items() if values}


def _by_name(template: Mapping[str, Any], side: str, kind: str) -> dict[str, Manifest]:
    values = (template.get(side) or {}).get(kind) or []
    return {one["name"]: one for one in values if not one["name"].startswith(f"{_OWN}-")}


def _map_texts(part: Any, change: Any) -> Any:
    if isinstance(part, dict):
        return {key: _map_texts(value, change) for key, value in part.items()}
    if isinstance(part, list):
        return [_map_texts(value, change) for value in part]
    return change(part) if isinstance(part, str) else part


def _map_keys(part: Any, changes: Mapping[str, Any]) -> Any:
    if isinstance(part, list):
        return [_map_keys(value, changes) for value in part]
    if not isinstance(part, dict):
        return part
    return {
        key: changes[key](value) if key in changes and isinstance(value, str) else _map_keys(value, changes)
        for key, value in part.items()
    }


def _map_numbers(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: _map_numbers(value) for key, value in part.items()}
    return str(part) if type(part) is int else part
