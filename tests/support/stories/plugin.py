"""A plugin with everything real but the cluster's time: builders of compiled workflows, bodies and pods."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tiphys_plugin import DirectoryCluster, PluginCore, PluginSettings, PodStatus, Queues, SqliteLedger

from support.builders.lineage import START_TIMES
from tiphys.protocol.execute_api import ExecuteReply
from tiphys.protocol.operations import (
    ADMIT_OUTPUTS,
    ELASTIC_OUTPUTS,
    GANG_OUTPUTS,
    MEMORY_OUTPUTS,
)
from tiphys.protocol.step_spec import (
    ATTEMPT_LABEL,
    PIPELINE_ANNOTATION,
    RUN_LABEL,
    STEP_ANNOTATION,
    STEP_LABEL,
    STORE_ANNOTATION,
    CheckpointPolicy,
    GpuRequest,
    StepKind,
    StepSpec,
)
from tiphys.records import CheckpointManifest, Shard, SubmissionClaim, SubmissionKind
from tiphys.store import DirectoryStore, LineageLayout, RunLayout, Store, claim_record

QUICK = PluginSettings(
    requeue_min_seconds=0.01,
    requeue_max_seconds=0.1,
    pod_end_timeout_seconds=60.0,
    verify_inline_seconds=5.0,
    speed=1e9,  # no back-off
)


def prep(**changes: Any) -> StepSpec:
    """A `Step` with a gate, one artifact and one parameter."""
    return StepSpec(
        **{
            "name": "prep",
            "kind": StepKind.STEP,
            "gate": True,
            "template": "t-prep",
            "parameters": ("rows",),
            "artifacts": ("data",),
            **changes,
        }
    )


def fit(**changes: Any) -> StepSpec:
    """A `Train` step with checkpoints in the run's store and one artifact."""
    given = {
        "name": "fit",
        "kind": StepKind.TRAIN,
        "template": "t-fit",
        "artifacts": ("model",),
        "checkpoints": CheckpointPolicy(),
        **changes,
    }
    return StepSpec(**given)


def gpus(count: int, **changes: Any) -> GpuRequest:
    return GpuRequest(**{"gpus": count, "gpu_type": "A100", "queue": "research", **changes})


def workflow(
    specs: list[StepSpec], name: str = "digits-abc12", uid: str = "uid-1", parameters: dict[str, str] | None = None
) -> dict[str, Any]:
    """A live Workflow object as far as the plugin reads it."""
    templates: list[dict[str, Any]] = [
        {"name": "main", "dag": {"tasks": [{"name": spec.name, "template": spec.name} for spec in specs]}}
    ]
    for spec in specs:
        annotations = {STEP_ANNOTATION: spec.to_bytes().decode()}
        templates.append({"name": spec.name, "metadata": {"annotations": annotations}, "dag": {"tasks": []}})
    values = [{"name": key, "value": value} for key, value in (parameters or {"lr": "0.1"}).items()]
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {
            "name": name,
            "namespace": "ml",
            "uid": uid,
            "resourceVersion": "7",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "managedFields": [{}],
            "labels": {"team": "vision", "workflows.argoproj.io/phase": "Running"},
            "annotations": {PIPELINE_ANNOTATION: "digits", STORE_ANNOTATION: "s3://ml-runs/tiphys"},
        },
        "spec": {"entrypoint": "main", "templates": templates, "arguments": {"parameters": values}},
        "status": {"phase": "Running"},
    }


class Clock:
    """A time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


_opened: list[SqliteLedger] = []


def close_worlds() -> None:
    """Close the ledger of every world of this test; `conftest` calls it after each."""
    while _opened:
        _opened.pop().close()


@dataclass
class World:
    """Storage, cluster, ledger and one plugin over them."""

    root: Path
    store: Store
    cluster: DirectoryCluster
    ledger: SqliteLedger
    core: PluginCore
    clock: Clock
    restart: Callable[[], PluginCore] = field(repr=False)

    def submit(self, *specs: StepSpec, name: str = "digits-abc12", uid: str = "uid-1") -> "Flow":
        self.cluster.write_workflow(workflow(list(specs), name, uid))
        return Flow(self, name, uid, specs=specs)


def world(
    root: Path, queues: Queues | None = None, settings: PluginSettings = QUICK, store: Store | None = None
) -> World:
    clock = Clock()
    store = store or DirectoryStore(root / "store")
    cluster = DirectoryCluster(root / "cluster")
    ledger = SqliteLedger(root / "ledger.db", queues, clock=clock)
    _opened.append(ledger)

    def core() -> PluginCore:
        return PluginCore(store, cluster, ledger, clock=clock, settings=settings)

    return World(root, store, cluster, ledger, core(), clock, core)


@dataclass
class Flow:
    """One workflow, as the bodies compiled into it speak."""

    world: World
    name: str
    uid: str
    run: str = ""
    submission: str = ""
    namespace: str = "ml"
    specs: tuple[StepSpec, ...] = ()

    def admit_node(self, step: str, retry: int | None, item: str = "") -> str:
        return self._node(step, retry, ".admit", item)

    def document(self, body: dict[str, Any], artifacts: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """The request that Argo's agent would post."""
        return {
            "workflow": {"metadata": {"name": self.name, "namespace": self.namespace, "uid": self.uid}},
            "template": {
                "name": "any",
                "inputs": {"artifacts": artifacts or []},
                "outputs": self._declared_outputs(),
                "plugin": {"tiphys": {"run": self.run, "submission": self.submission, "uid": self.uid, **body}},
            },
        }

    def body(self, op: str, step: str, retry: int | None = None, item: str = "", **fields: Any) -> dict[str, Any]:
        """``retry`` None for a `Step`, the number of the try for a `Train`."""
        node = self._node(step, retry, f".{op}", item)
        value = item.partition(":")[2] if item else ""
        return {"op": op, "step": step, "node": node, "item": value, **fields}

    def call(self, body: dict[str, Any], artifacts: list[dict[str, Any]] | None = None) -> ExecuteReply:
        return self.world.core.execute_document(self.document(body, artifacts))

    def admit(self, step: str, retry: int | None = None, item: str = "", **fields: Any) -> ExecuteReply:
        artifacts = fields.pop("artifacts", None)
        return self.call(self.body("admit", step, retry, item, **fields), artifacts)

    def conclude(
        self,
        step: str,
        retry: int | None = None,
        item: str = "",
        status: str = "Succeeded",
        exit_code: str = "0",
        **fields: Any,
    ) -> ExecuteReply:
        """``retry`` the number of the try of a `Train`, None for a `Step`."""
        return self.call(self.body("conclude", step, retry, item, status=status, exit_code=exit_code, **fields))

    def end_try(self, step: str, retry: int = 0, status: str = "Failed", exit_code: str = "1") -> ExecuteReply:
        """The conclude of a try of a `Train` that failed."""
        return self.conclude(step, retry, status=status, exit_code=exit_code)

    def finalize(self, status: str = "Succeeded", failures: str = '"null"') -> ExecuteReply:
        node = f"{self.name}.onExit.finalize"
        return self.call({"op": "finalize", "node": node, "status": status, "failures": failures})

    def sealed(self) -> dict[str, Any]:
        """The record of the end of the submission."""
        found = records(self.world.store, f"control/runs/{self.run or self.name}/submissions/")
        return next(record for record in found if "status" in record)

    def pod(self, step: str, attempt: int, retry: int | None = 0, phase: str = "Running", **fields: Any) -> str:
        """Make or change the pod of an attempt; its name. ``tries`` is the container's own retry."""
        tries = fields.pop("tries", 0)
        resources = {"nvidia.com/gpu": fields.pop("gpus", 0), **fields.pop("resources", {})}
        suffix = f".run({tries})" if retry is None else f"({retry}).run"
        name = f"{self.name}-{step}-{attempt}-{tries}"
        pod = PodStatus(
            name=name,
            namespace="ml",
            workflow_uid=self.uid,
            node=f"{self.name}.{step}{suffix}",
            labels={RUN_LABEL: self.run or self.name, STEP_LABEL: step, ATTEMPT_LABEL: str(attempt)},
            phase=phase,
            resources={name: number for name, number in resources.items() if number},
            **fields,
        )
        self.world.cluster.write_pod(pod)
        return name

    def write_output(self, reply: ExecuteReply, path: str, data: bytes) -> str:
        """Upload as Argo would, below the prefix that admit answered; the key."""
        key = f"{outputs(reply)['outputs']}/{path}"
        self.world.store.create(self.world.store.from_artifact_key(key) or key, data)
        return key

    def _node(self, step: str, retry: int | None, place: str, item: str) -> str:
        shown = f"({item})" if item else ""
        attempts = f"({retry})" if retry is not None else ""
        return f"{self.name}.{step}{shown}{attempts}{place}"

    def _declared_outputs(self) -> dict[str, Any]:
        """All outputs that the templates of any step of the workflow may declare."""
        specs = self.specs or (prep(), fit())
        values = [name for spec in specs for name in spec.output_parameters]
        names = [*ADMIT_OUTPUTS, *GANG_OUTPUTS, *ELASTIC_OUTPUTS, *MEMORY_OUTPUTS.values()]
        names += values
        artifacts = [name for spec in specs for name in spec.artifacts]
        return {
            "parameters": [{"name": name} for name in names],
            "artifacts": [{"name": name} for name in artifacts],
        }


def resumed(here: World, *specs: StepSpec, run: str = "digits-abc12", submission: int = 2) -> Flow:
    """The next submission of a run, as the controller makes it."""
    name = f"{run}-{submission}"
    wanted = SubmissionClaim(
        run=run, submission=submission, kind=SubmissionKind.RESUME, workflow_name=name, namespace="ml"
    )
    claim_record(here.store, RunLayout(run).submission(submission), wanted)
    flow = here.submit(*specs, name=name, uid=f"uid-{submission}")
    flow.run, flow.submission = run, str(submission)
    return flow


def outputs(reply: ExecuteReply) -> dict[str, str]:
    """Output parameters of a reply, by name."""
    assert reply.node is not None and reply.node.outputs is not None, reply
    return {parameter.name: parameter.value for parameter in reply.node.outputs.parameters}


def artifacts(reply: ExecuteReply) -> dict[str, str]:
    """Keys of a reply's output artifacts, by name."""
    assert reply.node is not None and reply.node.outputs is not None, reply
    return {artifact.name: artifact.s3.key for artifact in reply.node.outputs.artifacts}


def said(reply: ExecuteReply) -> str:
    assert reply.node is not None, reply
    return reply.node.message


def phase(reply: ExecuteReply) -> str:
    assert reply.node is not None, reply
    return reply.node.phase


def commit(store: Store, lineage: str, attempt: int, step: int, data: bytes = b"weights") -> str:
    """Commit a checkpoint as the training program would; the key of its shard."""
    layout = LineageLayout(lineage)
    run, _, name = lineage.partition("/")
    key = f"{layout.shards(attempt, step)}state.safetensors"
    store.create(key, data)
    shard = Shard(key=key, size=len(data), sha256="0" * 64)
    manifest = CheckpointManifest(
        lineage=lineage, run=run, step=name, attempt=attempt, global_step=step, shards=(shard,), began=START_TIMES
    )
    claim_record(store, layout.manifest(attempt, step), manifest.with_seal())
    return key


def keys(store: Store, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def records(store: Store, prefix: str) -> list[dict[str, Any]]:
    """Every stored JSON record below ``prefix``."""
    return [json.loads(store.read(key)) for key in keys(store, prefix) if key.endswith(".json")]
