"""A local session: the plugin, the GPU ledger and the engine in one state folder.

`tiphys run`, `resume` and `fork` use it, and the controller uses it as a
`Submitter`. A new session first marks workflows as failed whose engine was killed:
a killed engine cannot report its end, and without the mark its pods would seem to
run forever and hold their GPUs. Their processes ended with the engine (see
`init_process`).
"""

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import structlog
from tiphys_controller import LiveWorkflow
from tiphys_controller.submit.authored_facts import check_authored_name
from tiphys_plugin import LOCAL_SETTINGS, DirectoryCluster, PluginCore, PluginServer, SqliteLedger, load_queues

from hera_pipelines.local.engine import LocalEngine
from hera_pipelines.local.live_workflows import LocalWorkflows, hold_workflow_lock, last_alive_at
from hera_pipelines.local.nodes import NodeChange, NodePhase, format_rfc3339, ignore_change
from hera_pipelines.local.plugin_client import PluginEndpoint
from hera_pipelines.local.workflow_object import add_server_fields
from tiphys.errors import ConflictError, NotFoundError, SettingsError, StoreError, TiphysError, UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest, read_workflow_parameters
from tiphys.protocol.execute_api import WorkflowMetadata
from tiphys.protocol.step_spec import RUN_PARAMETER, SUBMISSION_PARAMETER
from tiphys.protocol.workflow_nodes import read_nodes
from tiphys.recording import WorkflowRecorder, bind_workflow
from tiphys.records import utc_now
from tiphys.store import Store

_RECORD_SECONDS, _RECORD_PAUSE_SECONDS = 0.5, 5.0
_log = structlog.get_logger()
_ENGINE_LOST_MESSAGE = "the engine of this workflow has ended without finishing it"


def mark_dead_workflows_failed(cluster: DirectoryCluster, state: Path) -> list[str]:
    """Mark running workflows without a live engine as failed and their pods as lost; return their names."""
    found = [workflow["metadata"]["name"] for workflow in cluster.workflows() if _is_running(workflow)]
    return [name for name in found if _mark_failed_under_lock(cluster, state, name)]


def _mark_failed_under_lock(cluster: DirectoryCluster, state: Path, name: str) -> bool:
    """Mark the workflow under its lock, if it still runs: its engine may be alive, or have finished it meanwhile."""
    try:
        with hold_workflow_lock(state, name):
            workflow = cluster.workflow("default", name)
            if workflow is None or not _is_running(workflow):
                return False
            _mark_failed(cluster, workflow, last_alive_at(state, name))
            return True
    except ConflictError:
        return False  # its engine, or another session that marks it, holds the lock


def _mark_failed(cluster: DirectoryCluster, workflow: Manifest, died_at: datetime) -> None:
    """Write the pods first, so that a finished workflow never has running pods."""
    for pod in cluster.workflow_pods(workflow["metadata"]["uid"]):
        if not pod.finished:
            failure = {"phase": "Failed", "reason": "NodeLost", "message": _ENGINE_LOST_MESSAGE, "trouble_at": died_at}
            cluster.write_pod(pod.model_copy(update=failure))
    status = {
        **workflow["status"],
        "phase": str(NodePhase.FAILED),
        "message": _ENGINE_LOST_MESSAGE,
        "finishedAt": format_rfc3339(died_at),
    }
    cluster.write_workflow({**workflow, "status": status})


def _is_running(workflow: Manifest) -> bool:
    return bool((workflow.get("status") or {}).get("phase") == NodePhase.RUNNING)


def check_loopback() -> None:
    """Check that programs of this machine reach each other.

    Raises:
        SettingsError: the loopback interface is down.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))  # looks up the route, and sends nothing
        except OSError as error:
            raise SettingsError(
                f"the local engine and its plugin talk over the loopback interface (127.0.0.1), which is down: "
                f"{error.strerror}; start it with `ip link set lo up`"
            ) from error


class LocalSession(LocalWorkflows):
    """Runs the plugin server between ``__enter__`` and ``__exit__``, and workflows with it.

    Several sessions may share one state folder at the same time; they then share
    its GPU quotas. Implements `tiphys_controller.Submitter`. Its start raises
    `SettingsError` if the loopback interface is down, and `UsageError` if the state folder cannot be created.

    Args:
        queues: Queue file; None sets no limits.
        plugin_port: Port of the plugin on loopback; 0 chooses a free port.
        speed: As of `LocalEngine`, like the arguments below.
    """

    def __init__(
        self,
        store: Store,
        state: Path,
        queues: Path | None = None,
        plugin_port: int = 0,
        speed: float = 1.0,
        observer: Callable[[NodeChange], None] = ignore_change,
        *,
        code: Path | None = None,
        longest_grace_seconds: float | None = None,
    ) -> None:
        super().__init__(state)
        self._store = store
        self._queues = queues
        self._port = plugin_port
        self._speed = speed
        self.observer = observer
        """Called for every change of a node."""
        self._code = code
        self._grace = longest_grace_seconds
        self._exit_stack = ExitStack()
        self._engine: LocalEngine | None = None

    def __enter__(self) -> "LocalSession":
        check_loopback()
        try:
            self._state.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot keep the engine's state in {self._state}: {error.strerror}; name another folder with --state"
            ) from error
        mark_dead_workflows_failed(self._cluster, self._state)
        # Closes what was opened if a later step raises.
        with ExitStack() as opening:
            queues = load_queues(self._queues) if self._queues else None
            ledger = SqliteLedger(self._state / "ledger.db", queues)
            opening.callback(ledger.close)
            core = PluginCore(self._store, self._cluster, ledger, settings=replace(LOCAL_SETTINGS, speed=self._speed))
            opening.callback(core.close)
            opening.enter_context(core.preemption_loop())
            token = secrets.token_urlsafe(32)
            server = opening.enter_context(PluginServer(core, token, port=self._port))
            self._engine = LocalEngine(
                self._store,
                self._cluster,
                self._state,
                PluginEndpoint(server.url, token),
                self._speed,
                lambda change: self.observer(change),
                code=self._code,
                longest_grace_seconds=self._grace,
            )
            self._exit_stack = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit_stack.close()
        self._engine = None

    @property
    def engine(self) -> LocalEngine:
        """The engine; raises `ConflictError` while the session is not open."""
        if self._engine is None:
            raise ConflictError("the local session is not open; use it as a context manager")
        return self._engine

    def create(self, manifest: Manifest) -> LiveWorkflow:
        """Check and register a Workflow; `run` runs it.

        Raises:
            ConflictError: a Workflow of that name exists.
            UsageError: it has a field that the local engine does not support.
        """
        self.engine.check(manifest)
        document = add_server_fields(manifest, utc_now())
        name = document["metadata"]["name"]
        if not self._cluster.create_workflow(document):
            raise ConflictError(f"a Workflow {name} exists in {self._state}; choose another name")
        return self._live_workflow(document)

    def run(self, name: str, on_running: Callable[[], object] = lambda: None) -> NodePhase:
        """Run a Workflow that `create` registered, to its end; see `LocalEngine.run`.

        Raises:
            NotFoundError: no Workflow of that name exists.
            ConflictError: another engine runs it, or it has ended.
            StoreError: the state folder cannot be written; all programs have ended.
        """
        engine = self.engine
        document = self._cluster.workflow("default", name)
        if document is None:
            raise NotFoundError(f"there is no Workflow {name} in {self._state}; create it first")
        if (phase := document["status"]["phase"]) != NodePhase.PENDING:
            raise ConflictError(f"Workflow {name} was started before and is {phase}; use `tiphys resume` for a new one")
        try:
            with self._record_steps(document):
                return engine.run(document, on_running)
        except OSError as error:
            raise StoreError(
                f"the engine cannot keep its state in {self._state}: {error.strerror or error}; "
                "it has stopped; free space or grant access there, and resume the run"
            ) from error

    @contextmanager
    def _record_steps(self, document: Manifest) -> Iterator[None]:
        """Record steps without a gate soon after they have ended, while the body runs; finalize records the last."""
        stopped = threading.Event()
        thread = threading.Thread(target=self._record_until, args=(document, stopped), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()

    def _record_until(self, document: Manifest, stopped: threading.Event) -> None:
        metadata, seen = document["metadata"], None
        recorder: WorkflowRecorder | None = None
        while not stopped.wait(_RECORD_SECONDS):
            try:
                recorder = recorder or self._open_recorder(document)
                workflow = self._cluster.workflow("default", metadata["name"]) if recorder.specs else None
                if workflow is not None and workflow != seen:
                    recorder.record(workflow, read_nodes(workflow))
                    seen = workflow
            except (TiphysError, OSError) as error:  # finalize meets the same error, and says so
                _log.warning("steps.unrecorded", workflow=metadata["name"], error=str(error))
                stopped.wait(_RECORD_PAUSE_SECONDS)

    def _open_recorder(self, document: Manifest) -> WorkflowRecorder:
        parameters = read_workflow_parameters(document)
        name = parameters.get(RUN_PARAMETER) or check_authored_name(CompiledPipeline.from_manifest(document), None)
        identity = WorkflowMetadata.model_validate(document["metadata"])
        binding = bind_workflow(self._store, self._cluster, identity, name, parameters.get(SUBMISSION_PARAMETER, ""))
        return WorkflowRecorder(self._store, binding)
