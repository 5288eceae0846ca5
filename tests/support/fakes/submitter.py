"""A cluster that creates Workflows and never runs them: tests end them by hand."""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiphys_controller import LiveWorkflow

from tiphys.errors import ConflictError


class FakeSubmitter:
    """Workflows as files in a folder, so that several processes see one cluster. Names are taken atomically.

    A manifest may bring its own ``metadata.uid``.
    """

    def __init__(self, folder: Path, cluster: str = "west") -> None:
        self.folder = folder
        self._cluster = cluster
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def cluster(self) -> str:
        return self._cluster

    def read(self, namespace: str, name: str) -> dict[str, Any] | None:
        """What `show` was given; None before, as if the object were gone."""
        path = self._path(namespace, name)
        shown: dict[str, Any] | None = json.loads(path.read_text()).get("object") if path.exists() else None
        return shown

    def show(self, workflow: dict[str, Any]) -> None:
        """The state of a Workflow that `read` answers with."""
        path = self._path(workflow["metadata"]["namespace"], workflow["metadata"]["name"])
        path.write_text(json.dumps(json.loads(path.read_text()) | {"object": workflow}))

    def find(self, namespace: str, name: str) -> LiveWorkflow | None:
        path = self._path(namespace, name)
        return LiveWorkflow(**json.loads(path.read_text())["live"]) if path.exists() else None

    def create(self, manifest: dict[str, Any]) -> LiveWorkflow:
        metadata = manifest["metadata"]
        uid = metadata.get("uid", f"uid-of-{metadata['name']}")
        live = LiveWorkflow(metadata["name"], metadata["namespace"], uid, "Running", True)
        document = json.dumps({"live": live._asdict(), "manifest": manifest})
        path = self._path(live.namespace, live.name)
        temporary = path.with_suffix(f".{secrets.token_hex(8)}")
        temporary.write_text(document)
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            raise ConflictError(f"a Workflow {live.name} exists") from None
        finally:
            temporary.unlink()
        return live

    def end(self, name: str, phase: str = "Failed", namespace: str = "default") -> None:
        """The Workflow is over."""
        path = self._path(namespace, name)
        document = json.loads(path.read_text())
        document["live"] |= {"phase": phase, "running": False}
        path.write_text(json.dumps(document))

    def delete(self, name: str, namespace: str = "default") -> None:
        """The Workflow object is gone, as after its time to live."""
        self._path(namespace, name).unlink()

    def manifest(self, name: str, namespace: str = "default") -> dict[str, Any]:
        """The Workflow as it was created."""
        found: dict[str, Any] = json.loads(self._path(namespace, name).read_text())["manifest"]
        return found

    def uid(self, name: str, namespace: str = "default") -> str:
        """Which object has the name."""
        found: str = json.loads(self._path(namespace, name).read_text())["live"]["uid"]
        return found

    def names(self) -> list[str]:
        """Workflows that exist."""
        return sorted(self._names())

    def _names(self) -> Iterator[str]:
        for path in self.folder.glob("*.json"):
            yield path.stem.partition("_")[2]

    def _path(self, namespace: str, name: str) -> Path:
        return self.folder / f"{namespace}_{name}.json"
