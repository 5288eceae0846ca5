"""Runs the Workflows of a test API server with the local engine, as Argo does on a cluster.

Programs, plugin and their records are real. The Workflow objects live in the API server: those that the controller
creates there are run, and one that it stops is stopped.
"""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from tiphys_plugin.cluster.interface import DirectoryCluster

from hera_pipelines.local.run_session import LocalSession
from support.servers.kube_server import KubeServer
from tiphys.kube import KubeApi, Object, identify_cluster
from tiphys.kube.resources import WORKFLOWS
from tiphys.store import Store


class _NamedCluster(DirectoryCluster):
    """The pods of a cluster, which has the name that the controller knows."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path)
        self._name = name

    @property
    def name(self) -> str:
        return self._name


class ArgoStandIn:
    """Runs each Workflow of ``namespace`` once, between ``__enter__`` and ``__exit__``, one after the other."""

    def __init__(self, server: KubeServer, namespace: str, store: Store, folder: Path) -> None:
        self._api: KubeApi = server.api(namespace)
        self._namespace = namespace
        self._session = LocalSession(store, folder / "argo", speed=20.0, code=folder, longest_grace_seconds=2.0)
        self._session._cluster = _NamedCluster(folder / "argo" / "cluster", identify_cluster(self._api))
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._running: dict[str, Future[Any]] = {}
        self._stopped: set[str] = set()
        self._loop = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._session.__enter__()
        self._loop.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._loop.join()
        for future in self._running.values():
            if not future.done():
                self._session.engine.stop()
                self._session.engine.stop()
        self._pool.shutdown()
        self._session.__exit__()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            for workflow in self._api.list(WORKFLOWS, self._namespace).items:
                name = workflow["metadata"]["name"]
                if name not in self._running:
                    self._running[name] = self._pool.submit(self._run, workflow)
                elif workflow["spec"].get("shutdown") and name not in self._stopped:
                    self._stopped.add(name)
                    self._session.engine.stop()

    def _run(self, workflow: Object) -> None:
        name = workflow["metadata"]["name"]
        document = {**workflow, "status": {"phase": "Pending"}}
        assert self._session._cluster.create_workflow(document)
        self._report(name, {"phase": "Running"})
        phase = self._session.engine.run(document)
        self._report(name, {"phase": str(phase)})

    def _report(self, name: str, status: Object) -> None:
        self._api.patch(WORKFLOWS, self._namespace, name, {"status": status})
