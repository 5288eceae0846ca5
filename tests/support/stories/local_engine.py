"""Small Workflows, and an engine to run them on, for tests of the local engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiphys_plugin import DirectoryCluster

from hera_pipelines.local.engine import LocalEngine
from hera_pipelines.local.nodes import NodeChange, NodePhase
from hera_pipelines.local.plugin_client import PluginEndpoint
from support.servers.scripted_plugin import ScriptedPlugin
from tiphys.store import DirectoryStore

Manifest = dict[str, Any]
NOBODY = PluginEndpoint("http://127.0.0.1:1", "none")
"""For workflows without plugin steps."""


def workflow(*templates: Manifest, name: str = "wf", entrypoint: str = "main", **spec: Any) -> Manifest:
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": name},
        "spec": {"entrypoint": entrypoint, "templates": list(templates), **spec},
    }


def dag(*tasks: Manifest, name: str = "main", **rest: Any) -> Manifest:
    return {"name": name, "dag": {"tasks": list(tasks)}, **rest}


def steps(*groups: list[Manifest], name: str = "main", **rest: Any) -> Manifest:
    return {"name": name, "steps": list(groups), **rest}


def call(name: str, template: str = "", parameters: Manifest | None = None, **rest: Any) -> Manifest:
    """A task or step."""
    arguments = {"parameters": [{"name": key, "value": value} for key, value in (parameters or {}).items()]}
    return {"name": name, "template": template or name, "arguments": arguments, **rest}


def shell(source: str, name: str, *inputs: str, env: Manifest | None = None, **rest: Any) -> Manifest:
    """A container template that runs ``source`` in a shell."""
    return {
        "name": name,
        "inputs": {"parameters": [{"name": parameter} for parameter in inputs]},
        "container": {
            "image": "python:3.12-slim",
            "command": ["sh", "-c"],
            "args": [source],
            "env": [{"name": key, "value": value} for key, value in (env or {}).items()],
        },
        **rest,
    }


def plugin(name: str, *outputs: str, inputs: tuple[str, ...] = (), **body: Any) -> Manifest:
    """A plugin template; ``outputs`` are supplied by the plugin."""
    supplied = [{"name": o, "valueFrom": {"default": "", "supplied": {}}} for o in outputs]
    return {
        "name": name,
        "inputs": {"parameters": [{"name": parameter} for parameter in inputs]},
        "outputs": {"parameters": supplied},
        "plugin": {"tiphys": body},
    }


class Bench:
    """An engine with a store and a cluster in folders, and all that it told."""

    def __init__(self, folder: Path, scripted: ScriptedPlugin | None = None, **options: Any) -> None:
        self.state = folder / "state"
        self.store = DirectoryStore(folder / "store")
        self.cluster = DirectoryCluster(folder / "cluster")
        self.changes: list[NodeChange] = []
        self.reactions: list[Callable[[NodeChange], None]] = []
        endpoint = scripted.endpoint if scripted else NOBODY
        options = {"speed": 100.0, **options}
        self.engine = LocalEngine(self.store, self.cluster, self.state, endpoint, observer=self._observe, **options)

    def run(self, manifest: Manifest) -> NodePhase:
        return self.engine.run(manifest)

    def _observe(self, change: NodeChange) -> None:
        self.changes.append(change)
        for reaction in self.reactions:
            reaction(change)

    def last(self, node: str) -> NodeChange:
        """What was told last of a node."""
        return next(change for change in reversed(self.changes) if change.node == node)

    def phases(self) -> dict[str, str]:
        """Final phase of every node."""
        return {change.node: str(change.phase) for change in self.changes}

    def logs(self, part: str) -> list[str]:
        """What the pods wrote whose name contains ``part``."""
        found = (path for path in (self.state / "logs").glob("*.log") if part in path.name)
        return sorted(path.read_text() for path in found)

    def status(self, name: str = "wf") -> Manifest:
        document = self.cluster.workflow("default", name)
        assert document is not None
        status: Manifest = document["status"]
        return status
