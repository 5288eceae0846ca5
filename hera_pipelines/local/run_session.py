"""A cluster in a folder: the plugin, the GPU ledger and the engine, wired together.

`tiphys run`, `tiphys resume` and `tiphys demo` work through it, and the
controller meets it as the place that Workflows are created in.

Says of workflows that have lost their engine that they are over.

An engine that was killed cannot say so itself, and until somebody does, its
pods look alive: the next attempt and their GPUs would wait for them for ever.
The kernel ended the processes with the engine (see `launch`).
"""

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tiphys_controller import LiveWorkflow
from tiphys_plugin import LOCAL, DirectoryCluster, PluginCore, PluginServer, SqliteLedger, load_queues

from hera_pipelines.local.engine import LocalEngine, ignore
from hera_pipelines.local.nodes import NodeChange, NodePhase
from hera_pipelines.local.plugin_client import PluginEndpoint
from hera_pipelines.local.shutdown import hold, is_held
from hera_pipelines.local.workflow_object import created
from tiphys.errors import ConflictError, NotFoundError, StoreError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.records import utc_now
from tiphys.store import Store

_MESSAGE = "the engine that ran this workflow is gone"


def bury_dead(cluster: DirectoryCluster, state: Path) -> list[str]:
    """Mark workflows without a live engine as failed, and their pods as lost; the names of those marked."""
    buried = []
    for workflow in cluster.workflows():
        name = workflow["metadata"]["name"]
        if _phase(workflow) == NodePhase.RUNNING and not is_held(state, name) and _bury_once(cluster, state, name):
            buried.append(name)
    return buried


def _bury_once(cluster: DirectoryCluster, state: Path, name: str) -> bool:
    """Under its lock, and by what it says then: its engine may have brought it to its end just now."""
    try:
        with hold(state, name):
            workflow = cluster.workflow("default", name)
            if workflow is None or _phase(workflow) != NodePhase.RUNNING:
                return False
            _bury(cluster, workflow)
            return True
    except ConflictError:
        return False  # somebody else buries it


def _bury(cluster: DirectoryCluster, workflow: Manifest) -> None:
    """Pods first: a workflow that is over must not have any that seem to live."""
    for pod in cluster.pods_of(workflow["metadata"]["uid"]):
        if not pod.finished:
            lost = {"phase": "Failed", "reason": "NodeLost", "message": _MESSAGE}
            cluster.write_pod(pod.model_copy(update=lost))
    status = {**workflow["status"], "phase": str(NodePhase.FAILED), "message": _MESSAGE}
    cluster.write_workflow({**workflow, "status": status})


def _phase(workflow: Manifest) -> str:
    return str((workflow.get("status") or {}).get("phase", ""))


class LocalSession:
    """Between ``__enter__`` and ``__exit__`` the plugin answers and workflows can run.

    Several sessions may share a state folder, at the same time too: they share
    its GPU quotas. It is a `tiphys_controller.Submitter`.

    Args:
        store: Where runs are kept.
        state: Folder for the cluster, the ledger, logs, attempts and volumes.
        queues: Queue file; None limits nothing.
        plugin_port: Port of the plugin on loopback; 0 takes a free one.
        speed: Back-offs and requeues are divided by it.
        observer: Told of every change of a node.
        code: Folder whose modules programs can import.
        longest_grace_seconds: Cuts the grace period of programs; None keeps it.
    """

    def __init__(
        self,
        store: Store,
        state: Path,
        queues: Path | None = None,
        plugin_port: int = 0,
        speed: float = 1.0,
        observer: Callable[[NodeChange], None] = ignore,
        *,
        code: Path | None = None,
        longest_grace_seconds: float | None = None,
    ) -> None:
        self._store = store
        self._state = state.absolute()
        self._queues = queues
        self._port = plugin_port
        self._speed = speed
        self._observer = observer
        self._code = code
        self._grace = longest_grace_seconds
        self._cluster = DirectoryCluster(self._state / "cluster")
        self._open = ExitStack()
        self._engine: LocalEngine | None = None

    def __enter__(self) -> "LocalSession":
        self._state.mkdir(parents=True, exist_ok=True)
        bury_dead(self._cluster, self._state)
        with ExitStack() as opening:
            queues = load_queues(self._queues) if self._queues else None
            ledger = SqliteLedger(self._state / "ledger.db", queues)
            opening.callback(ledger.close)
            core = PluginCore(self._store, self._cluster, ledger, settings=LOCAL)
            opening.callback(core.close)
            opening.enter_context(core.preemptions())
            token = secrets.token_urlsafe(32)
            server = opening.enter_context(PluginServer(core, token, port=self._port))
            self._engine = self._new_engine(PluginEndpoint(server.url, token))
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._engine = None

    @property
    def cluster(self) -> str:
        return self._cluster.name

    @property
    def engine(self) -> LocalEngine:
        """The engine; only while the session is open."""
        if self._engine is None:
            raise ConflictError("the local session is not open; use it as a context manager")
        return self._engine

    def find(self, namespace: str, name: str) -> LiveWorkflow | None:
        """The Workflow called ``name``; running only while a live engine works on it."""
        document = self._cluster.workflow(namespace, name)
        return self._live(document) if document is not None else None

    def create(self, manifest: Manifest) -> LiveWorkflow:
        """Check and register a Workflow; `run` runs it.

        Raises:
            ConflictError: a Workflow of that name exists.
            UsageError: it holds something that cannot be run here.
        """
        self.engine.check(manifest)
        document = created(manifest, utc_now())
        name = document["metadata"]["name"]
        if not self._cluster.create_workflow(document):
            raise ConflictError(f"a Workflow {name} exists in {self._state}; choose another name")
        return self._live(document)

    def run(self, name: str) -> NodePhase:
        """Run a Workflow that `create` registered, to its end.

        Raises:
            NotFoundError: there is none of that name.
            ConflictError: another engine runs it, or it has ended.
            StoreError: the state folder cannot be written any more; nothing runs on.
        """
        engine = self.engine
        document = self._cluster.workflow("default", name)
        if document is None:
            raise NotFoundError(f"there is no Workflow {name} in {self._state}; create it first")
        if (phase := document["status"]["phase"]) != NodePhase.PENDING:
            raise ConflictError(f"Workflow {name} was begun before and is {phase}; make another with `tiphys resume`")
        try:
            return engine.run(document)
        except OSError as error:
            raise StoreError(
                f"the engine cannot keep its state in {self._state}: {error.strerror or error}; "
                "it has stopped; make room or access there, and resume the run"
            ) from error

    def _new_engine(self, plugin: PluginEndpoint) -> LocalEngine:
        return LocalEngine(
            self._store,
            self._cluster,
            self._state,
            plugin,
            self._speed,
            self._observer,
            code=self._code,
            longest_grace_seconds=self._grace,
        )

    def _live(self, document: Manifest) -> LiveWorkflow:
        metadata = document["metadata"]
        phase = (document.get("status") or {}).get("phase", "Pending")
        running = phase == NodePhase.RUNNING and is_held(self._state, metadata["name"])
        return LiveWorkflow(metadata["name"], metadata["namespace"], metadata["uid"], phase, running)
