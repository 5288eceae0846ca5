"""Pipelines as preflight reads them, and a healthy cluster, both to bend."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tiphys_controller.doctor.check import Finding, passed
from tiphys_controller.doctor.checks_namespace import PERMISSIONS
from tiphys_controller.doctor.observed import (
    ClusterObservation,
    DeploymentSearch,
    NodeClock,
    PodReadiness,
    UnreadSecret,
    WorkflowNamespace,
)

from hera_pipelines.compile import CompileOptions, compile_workflow
from hera_pipelines.preflight import PreflightObservation, PreflightSubject, build_subject
from hera_pipelines.preflight.observation import ObservedRights, ReferencedObjects
from support.builders.authored_workflows import STORE, workflow
from support.builders.lineage import START_TIMES
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.records import CheckpointManifest, Shard
from tiphys.store import LineageLayout, Store
from tiphys.store.layout import lineage_name

ACCOUNTS = ("tiphys-workflow", "tiphys-executor", "tiphys-executor-plugin", "tiphys-gang")


def deployment(name: str, arguments: list[str], namespace: str = "tiphys", **labels: str) -> Manifest:
    named = {"app.kubernetes.io/name": "tiphys", "app.kubernetes.io/component": name, **labels}
    spec = {"template": {"spec": {"containers": [{"args": arguments}]}}}
    return {"metadata": {"name": f"tiphys-{name}", "namespace": namespace, "labels": named}, "spec": spec}


def plugin(*arguments: str) -> Manifest:
    served = [f"--store={STORE}", "--namespace=ml"]
    return deployment("plugin", ["tiphys_plugin", "serve", *served, *arguments])


ARGO = {
    "metadata": {"name": "workflow-controller", "namespace": "argo"},
    "spec": {
        "template": {
            "spec": {
                "containers": [
                    {
                        "image": "example.org/workflow-controller:v4.1.2",
                        "env": [{"name": "ARGO_EXECUTOR_PLUGINS", "value": "true"}],
                    }
                ]
            }
        }
    },
}
NAMESPACE = WorkflowNamespace(
    name="ml",
    exists=True,
    accounts=frozenset(ACCOUNTS),
    config_maps=frozenset({"tiphys-executor-plugin"}),
    secrets={name: UnreadSecret() for name in ("tiphys-store", *(f"{one}.service-account-token" for one in ACCOUNTS))},
    permissions={(account, right): True for account, rights in PERMISSIONS.items() for right in rights},
)
CLUSTER = ClusterObservation(
    server="https://cluster",
    version="v1.34.0",
    argo_kinds=frozenset({"workflows", "workflowtasksets", "workflowtaskresults", "workflowtemplates"}),
    tiphys_kinds=frozenset({"gpuledgers", "gpuledgerrecords"}),
    argo=DeploymentSearch((ARGO,)),
    argo_settings={},
    tiphys=DeploymentSearch((plugin(), deployment("controller", ["tiphys_controller"]))),
    pods=(PodReadiness("plugin", "tiphys", "p"), PodReadiness("controller", "tiphys", "c")),
    namespaces=(NAMESPACE,),
    clocks=(NodeClock("node-1", 0.0),),
)
HEALTHY = PreflightObservation(
    cluster=CLUSTER,
    may_submit=True,
    rights=ObservedRights(),
    objects=ReferencedObjects(),
    queues=None,
    plugin_version="",
    store=[passed("is refused"), passed("one won")],
    saves={},
)
"""What is seen where nothing is wrong. Queues are not declared."""


def subject_of(
    *templates: Manifest,
    file: Path = Path("digits.py"),
    account: str = "tiphys-workflow",
    namespace: str = "ml",
    **fields: Any,
) -> PreflightSubject:
    """A pipeline of these templates as the checks read it; ``fields`` are those of `authored_workflows.workflow`."""
    compiled = compile_workflow(workflow(*templates, **fields), CompileOptions(store=STORE))
    return build_subject(file, compiled, account, namespace)


def in_namespace(**changes: Any) -> PreflightObservation:
    """`HEALTHY` with another namespace."""
    return with_cluster(namespaces=(replace(NAMESPACE, **changes),))


def with_cluster(**changes: Any) -> PreflightObservation:
    return replace(HEALTHY, cluster=replace(CLUSTER, **changes))


def states(findings: list[Finding]) -> dict[str, str]:
    """The worst state by check."""
    order = ("ok", "unknown", "warning", "failed")
    found: dict[str, str] = {}
    for one in findings:
        found[one.check] = max(found.get(one.check, "ok"), one.state.value, key=order.index)
    return found


def write_save(store: Store, run: str, seconds: float, number: int = 1, step: str = "fit") -> None:
    """The manifest of a checkpoint whose save took so long: a quarter for the copy, the rest for the upload."""
    lineage = lineage_name(run, step)
    shard = Shard(key=f"{LineageLayout(lineage).shards(1, number)}0", size=1, sha256="0" * 64)
    manifest = CheckpointManifest(
        lineage=lineage,
        run=run,
        step=step,
        attempt=1,
        global_step=number,
        shards=(shard,),
        began=START_TIMES,
        stage_seconds=seconds / 4,
        upload_seconds=3 * seconds / 4,
    )
    store.create(LineageLayout(lineage).manifest(1, number), manifest.with_seal().to_bytes())
