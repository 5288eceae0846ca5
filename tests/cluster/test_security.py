"""Who may do what, on the installed chart: what it grants is what it needs, and a tenant sees nobody else's runs.

| what | must hold |
|---|---|
| rights of plugin and controller | each one is used, and none is missing |
| the nodes of the cluster | where the service may see them, it gives GPUs on them |
| a caller of another namespace | can neither admit nor conclude for a run, nor read what is stored about it |
| an account that is not the plugin's | gets nothing from the service |
| processes | no root, no capabilities, seccomp, a root file system that they cannot write |
| credentials of the store | in Secrets and nowhere else |
"""

import contextlib
import itertools
import json
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cluster.client import SECONDS, AuditLog, Cluster, Json, Store
from cluster.fixtures import FakeNodes
from cluster.rights import Right, as_account, granted, refused, unused, used
from cluster.test_install import Release, release
from support.builders.argo_objects import NARRATED
from support.builders.ledger import ask as ask_for
from support.fakes.task_sets import task_set
from support.stories.plugin import Flow, fit, gpus, workflow
from tiphys_plugin.quota.lease import Admitted, Growth, Lease, LedgerState, PreemptionNotice
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.ledger.ledger_object import LedgerObject
from tiphys_plugin.sidecar.forwarding import EXECUTE_PATH

from tiphys.errors import ConflictError
from tiphys.kube import KubeApi, Object, connect_to_cluster
from tiphys.kube.resources import (
    GPU_LEDGERS,
    JOBS,
    LEASES,
    NODE_LEASE_NAMESPACE,
    NODES,
    PODS,
    WORKFLOW_TASK_SETS,
    WORKFLOWS,
)
from tiphys.kube.whole_ledger import WholeLedgerReader
from tiphys.protocol.auto_resume_policy import AUTO_RESUME_ANNOTATION, AutoResumePolicy
from tiphys.protocol.gang import (
    GANG_LABEL,
    MEMBER_GATE,
    NODE_ANNOTATION,
    WORKFLOW_UID_LABEL,
    GangSpec,
    gang_name,
)
from tiphys.protocol.step_spec import ATTEMPT_LABEL, PIPELINE_ANNOTATION, RUN_LABEL, STEP_LABEL, STORE_ANNOTATION
from tiphys.protocol.workflow_nodes import NODE_NAME_ANNOTATION
from tiphys.records import Cause, utc_now

__all__ = ["release"]

QUEUES = {"queues": [{"name": "research", "gpus": {"A100": 8}}]}
RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
ASK = """
import json, os, pathlib, time, urllib.error, urllib.request
token = pathlib.Path("/var/run/tiphys/token").read_text()
headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
deadline = time.monotonic() + float(os.environ["SECONDS"])
def ask(call):
    request = urllib.request.Request(os.environ["URL"], json.dumps(call).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 503, f"{type(error).__name__}: {error}"
for call in json.loads(os.environ["CALLS"]):
    status, answer = ask(call)
    while status == 503 and time.monotonic() < deadline:
        time.sleep(1)
        status, answer = ask(call)
    print(json.dumps([status, answer]), flush=True)
"""
LOOK = """
import json, os, pathlib
status = dict(line.split(":", 1) for line in pathlib.Path("/proc/1/status").read_text().splitlines())
found = {name: status[name].strip() for name in ("Uid", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")}
try:
    pathlib.Path("/written").write_text("")
    found["written"] = True
except OSError as error:
    found["written"] = error.strerror
print(json.dumps(found))
"""


@pytest.fixture
def lost_node(api: KubeApi) -> Iterator[str]:
    """Name of a node without a kubelet, whose Lease nobody renews."""
    name = f"lost-{uuid.uuid4().hex[:8]}"
    api.create(NODES, None, {"metadata": {"name": name}})
    lease = {"metadata": {"name": name}, "spec": {"renewTime": "2026-01-01T00:00:00.000000Z"}}
    api.create(LEASES, NODE_LEASE_NAMESPACE, lease)
    yield name
    api.delete(LEASES, NODE_LEASE_NAMESPACE, name)
    api.delete(NODES, None, name)


@pytest.fixture
def api(cluster: Cluster) -> Iterator[KubeApi]:
    connected = connect_to_cluster(cluster.kubeconfig)
    yield connected
    connected.close()


class Tenant:
    """One workflow of a tenant with a step that wants a GPU, and with ``gangs`` one of several pods.

    What Argo would do about it is done by hand.
    """

    def __init__(
        self, api: KubeApi, cluster_store: Store, namespace: str, name: str = "digits", *, gangs: bool = False
    ) -> None:
        self.api = api
        self.namespace = namespace
        self.name = name
        spread = [fit(name="spread", gang=GangSpec(members=2))] if gangs else []
        spread += [fit(name="wide", gang=GangSpec(members=2, min_members=1))] if gangs else []
        self.steps = ("fit", "spread") if gangs else ("fit",)
        body = workflow([fit(gpu=gpus(1)), *spread], name)
        store = f"s3://{cluster_store.bucket}/{namespace}/tiphys"
        # Whatever its step fails by, so that the controller has something to do.
        asked = AutoResumePolicy(causes=tuple(Cause)).model_dump_json()
        added = {**NARRATED, STORE_ANNOTATION: store, AUTO_RESUME_ANNOTATION: asked}
        annotations = {**body["metadata"]["annotations"], **added}
        metadata = {"name": name, "labels": {PIPELINE_ANNOTATION: "digits"}, "annotations": annotations}
        self.uid: str = api.create(WORKFLOWS, namespace, {**body, "metadata": metadata})["metadata"]["uid"]
        self._flow = Flow(None, name, self.uid)  # type: ignore[arg-type]  # only its words are needed

    def call(self, op: str, step: str = "fit") -> Object:
        """What Argo's agent asks about a step."""
        outcome = {} if op == "admit" else {"status": "Failed", "exit_code": "1"}
        document: Object = self._flow.document(self._flow.body(op, step, 0, **outcome))
        document["workflow"]["metadata"]["namespace"] = self.namespace
        return document

    def open_task_set(self) -> None:
        admits = [self.call("admit", step) for step in self.steps]
        tasks = {f"{self.name}-{number}": {"name": "admit", **one["template"]} for number, one in enumerate(admits)}
        made = task_set(tasks, self.name, self.namespace, self.uid)
        self.api.create(WORKFLOW_TASK_SETS, self.namespace, made)

    def is_admitted(self) -> bool:
        """Whether all steps have their answer."""
        found = self.api.get(WORKFLOW_TASK_SETS, self.namespace, self.name) or {}
        return len((found.get("status") or {}).get("nodes") or {}) == len(self.steps)

    def conclude_by_task_set(self) -> None:
        task = {f"{self.name}-2": {"name": "conclude", **self.call("conclude", self.steps[-1])["template"]}}
        self.api.patch(WORKFLOW_TASK_SETS, self.namespace, self.name, {"spec": {"tasks": task}})

    def make_job(self, name: str) -> None:
        """What makes the pods of a training on several nodes, and waits; no pod of it is made."""
        labels = {GANG_LABEL: name, WORKFLOW_UID_LABEL: self.uid}
        pod = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "none"}]}
        spec = {"suspend": True, "template": {"spec": pod}}
        self.api.create(JOBS, self.namespace, {"metadata": {"name": name, "labels": labels}, "spec": spec})

    def stop(self) -> None:
        self.api.patch(WORKFLOWS, self.namespace, self.name, {"spec": {"shutdown": "Stop"}})

    def fail(self) -> None:
        self.api.patch(WORKFLOWS, self.namespace, self.name, {"status": {"phase": "Failed"}})

    def touch_task_set(self, times: int) -> None:
        """Write to it all the time, as Argo's controller does while others answer."""
        for index in range(times):
            body = {"metadata": {"annotations": {"touched": str(index)}}}
            self.api.patch(WORKFLOW_TASK_SETS, self.namespace, self.name, body)

    def grow(self) -> Lease:
        """An elastic gang of one pod behind a gate, whose lease has been granted another one."""
        instance = f"{self.name}.wide"
        step = {
            "step": "wide",
            "namespace": self.namespace,
            "run": self.name,
            "instance": instance,
            "workflow": self.name,
        }
        held = ask_for(2, self.uid, members=2, min_members=1, max_members=2, **step)
        name = gang_name(self.name, "wide", 1)
        labels = {
            RUN_LABEL: self.name,
            ATTEMPT_LABEL: "1",
            STEP_LABEL: "wide",
            GANG_LABEL: name,
            WORKFLOW_UID_LABEL: self.uid,
        }
        spec = {
            "restartPolicy": "Never",
            "schedulerName": "nobody",
            "schedulingGates": [{"name": MEMBER_GATE}],
            "containers": [{"name": "main", "image": "none", "securityContext": RESTRICTED}],
        }
        job = {
            **dict.fromkeys(("completions", "parallelism"), 1),
            "completionMode": "Indexed",
            "backoffLimitPerIndex": 0,
            "maxFailedIndexes": 0,
            "podReplacementPolicy": "Failed",
            "template": {
                "metadata": {"labels": labels, "annotations": {NODE_ANNOTATION: f"{instance}.run"}},
                "spec": spec,
            },
        }
        self.api.create(JOBS, self.namespace, {"metadata": {"name": name, "labels": labels}, "spec": job})
        now = utc_now()
        growth = Growth(at=now, made=2, usage_from=now)
        return Lease("wide", held, "A100", now, now, nodes=("node-1", "node-2"), growth=growth)

    def be_asked_to_leave(self, home: str, *others: Lease) -> None:
        """A pod of an attempt that holds GPUs, and has just been asked to leave for another; ``others`` hold GPUs."""
        reference = {"apiVersion": WORKFLOWS.api_version, "kind": "Workflow", "name": self.name, "uid": self.uid}
        held = ask_for(1, self.uid, "asked", namespace=self.namespace, run=self.name, instance=f"{self.name}.asked")
        metadata = {
            "name": f"{self.name}-asked",
            "labels": {RUN_LABEL: self.name, ATTEMPT_LABEL: "1"},
            "annotations": {NODE_NAME_ANNOTATION: f"{self.name}.asked.run"},
            "ownerReferences": [reference],
        }
        container = {"name": "main", "image": "none", "securityContext": RESTRICTED}
        self.api.create(
            PODS, self.namespace, {"metadata": metadata, "spec": {"schedulerName": "nobody", "containers": [container]}}
        )
        now = utc_now()
        leaving = Lease("asked", held, "A100", now, now, preemption=PreemptionNotice("other", "fit", now, now))
        write_ledger(self.api, home, leaving, *others)

    def run_on(self, node: str) -> None:
        """A pod of the first attempt of ``fit`` there, whether it is admitted or not."""
        reference = {"apiVersion": WORKFLOWS.api_version, "kind": "Workflow", "name": self.name, "uid": self.uid}
        metadata = {
            "name": f"{self.name}-lost",
            "labels": {RUN_LABEL: self.name, STEP_LABEL: "fit", ATTEMPT_LABEL: "1"},
            "annotations": {NODE_NAME_ANNOTATION: f"{self.name}.fit(0).run"},
            "ownerReferences": [reference],
        }
        container = {"name": "main", "image": "none", "securityContext": RESTRICTED}
        body = {"metadata": metadata, "spec": {"nodeName": node, "containers": [container]}}
        self.api.create(PODS, self.namespace, body)

    def lose_agent_pod(self) -> None:
        """A pod of Argo's agent that has failed."""
        reference = {"apiVersion": WORKFLOWS.api_version, "kind": "Workflow", "name": self.name, "uid": self.uid}
        labels = {"workflows.argoproj.io/component": "agent"}
        metadata = {"name": f"{self.name}-agent", "labels": labels, "ownerReferences": [reference]}
        container = {"name": "main", "image": "none", "securityContext": RESTRICTED}
        spec = {"schedulerName": "nobody", "containers": [container]}
        self.api.create(PODS, self.namespace, {"metadata": metadata, "spec": spec})
        status = {"status": {"phase": "Failed", "reason": "Evicted"}}
        self.api.patch(PODS, self.namespace, f"{self.name}-agent", status, subresource="status")


def write_ledger(api: KubeApi, home: str, *leases: Lease) -> None:
    """Put these leases in the place of all, between two writes of the services."""
    ledger = LedgerObject(api, home, "default")
    while True:
        with contextlib.suppress(ConflictError):
            ledger.write(ledger.read(), LedgerState(leases))
            return


def grow_ledger(release: Release, audit: AuditLog, grants: Mapping[str, set[Right]], folder: Path) -> None:
    """With the accounts of the services, write and read as much as makes records of the log, and deletes them."""
    records = {who: {one for one in grants[who] if one.resource == "gpuledgerrecords"} for who in grants}
    plugin, controller = (
        connect_to_cluster(as_account(release.cluster, release.home, f"{release.name}-{part}", folder))
        for part in ("plugin", "controller")
    )
    with contextlib.closing(plugin), contextlib.closing(controller):
        writer = KubernetesLedger(plugin, release.home)
        follower = KubernetesLedger(plugin, release.home)
        reader = WholeLedgerReader(controller, release.home, "default")
        for number in itertools.count():
            # Long names fill a record soon.
            granted = writer.request(ask_for(1, f"{number}-{'x' * 240}", node=str(number), instance=str(number)))
            if isinstance(granted, Admitted):
                writer.release(granted.lease)
            if number % 20:
                continue
            follower.snapshot()
            if records[f"{release.name}-controller"]:
                reader.read()
            left = {who: unused(records[who], used(audit, release.home, who)) for who in records}
            assert number < 2000, left
            if not any(left.values()):
                return


def ask(release: Release, image: str, namespace: str, account: str, calls: list[Object]) -> list[Any]:
    """Status and body of each answer that a pod under this account gets; it repeats a 503, as Argo does."""
    # The API server may still know a deleted pod of the same name, and then refuses the token of the new one.
    name = f"asks-as-{account}-{uuid.uuid4().hex[:8]}"
    url = f"http://{release.name}-plugin.{release.home}.svc:7243{EXECUTE_PATH}"
    given = {"URL": url, "CALLS": json.dumps(calls), "SECONDS": str(SECONDS / 2)}
    env = [{"name": variable, "value": value} for variable, value in given.items()]
    container = {"name": "main", "image": image, "command": ["python", "-c", ASK], "env": env}
    mount = {"name": "token", "mountPath": "/var/run/tiphys", "readOnly": True}
    token = {"serviceAccountToken": {"audience": "tiphys", "path": "token"}}
    pod: Json = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"workflows.argoproj.io/component": "agent"}},
        "spec": {
            "serviceAccountName": account,
            "automountServiceAccountToken": False,
            "restartPolicy": "Never",
            "containers": [{**container, "securityContext": RESTRICTED, "volumeMounts": [mount]}],
            "volumes": [{"name": "token", "projected": {"sources": [token]}}],
        },
    }
    release.cluster.apply(pod, namespace=namespace)
    ended = release.cluster.finished_pod(name, namespace)
    text = release.cluster.kubectl("logs", name, "--namespace", namespace)
    release.cluster.kubectl("delete", "pod", name, "--namespace", namespace, "--wait=true")
    assert ended["status"]["phase"] == "Succeeded", text
    return [json.loads(line) for line in text.splitlines()]


def declare_quota(release: Release, api: KubeApi) -> None:
    """The ledger is made by the service; the administrator says what is in it."""
    release.cluster.wait("there is a ledger", lambda: api.get(GPU_LEDGERS, release.home, "default"))
    api.patch(GPU_LEDGERS, release.home, "default", {"spec": QUEUES})


def look_at_nodes(release: Release, api: KubeApi, audit: AuditLog) -> None:
    """Have the service go by the nodes of the cluster, for a while."""
    release.cluster.wait("there is a ledger", lambda: api.get(GPU_LEDGERS, release.home, "default"))
    api.patch(GPU_LEDGERS, release.home, "default", {"spec": {**QUEUES, "cluster_nodes": {}}})
    watches = {Right("watch", "", plural, "") for plural in ("nodes", "pods")}
    account = f"{release.name}-plugin"
    release.cluster.wait("the service sees them", lambda: watches <= used(audit, release.home, account))
    api.patch(GPU_LEDGERS, release.home, "default", {"spec": {"cluster_nodes": None}})


GANGS = "gangs.job=true"
EVERYTHING = (GANGS, "nodes.observe=true")
LEAST = ("descriptions.enabled=false", "autoResume.enabled=false", "janitor.enabled=false")


@pytest.mark.parametrize(
    ("mode", "settings"),
    [("sidecar", ()), ("sidecar", EVERYTHING), ("agent", LEAST), ("agent", (GANGS,))],
    ids=["sidecar", "sidecar-with-everything", "agent-with-the-least", "agent-with-gangs"],
)
def test_every_right_is_used_and_none_is_missing(
    release: Release,
    api: KubeApi,
    audit: AuditLog,
    images: dict[str, str],
    cluster_store: Store,
    lost_node: str,
    tmp_path: Path,
    mode: str,
    settings: tuple[str, ...],
) -> None:
    release.apply("install", f"mode={mode}", *settings)
    gangs = GANGS in settings
    if settings == EVERYTHING:
        look_at_nodes(release, api, audit)
    declare_quota(release, api)
    namespace = release.tenants[0]
    accounts = (f"{release.name}-plugin", f"{release.name}-controller")
    places = {release.home, namespace, NODE_LEASE_NAMESPACE, ""}
    grants = {
        who: {one for one in granted(release.cluster, release.home, who) if one.namespace in places} for who in accounts
    }
    assert all(grants.values())
    grow_ledger(release, audit, grants, tmp_path)

    def left() -> list[str]:
        over = {who: unused(grants[who], used(audit, release.home, who)) for who in accounts}
        return [f"{who} never does {' '.join(one)}" for who in accounts for one in sorted(over[who])]

    deadline = time.monotonic() + 3 * SECONDS  # a lost node is noticed after a minute, and each round waits for pods
    for number in itertools.count():
        tenant = Tenant(api, cluster_store, namespace, f"digits-{number}", gangs=gangs)
        if number == 0:
            tenant.lose_agent_pod()
            others = [Tenant(api, cluster_store, namespace, "growing", gangs=True).grow()] if gangs else []
            tenant.be_asked_to_leave(release.home, *others)
        if number % 4 == 0:  # the pods of the others end at once
            tenant.run_on(lost_node)
        if gangs:
            tenant.make_job(gang_name(tenant.name, "spread", 1))
        if mode == "sidecar":
            calls = [tenant.call("admit"), tenant.call("conclude")]
            calls += [tenant.call(op, "spread") for op in ("admit", "conclude") if gangs]
            answers = ask(release, images["tiphys"], namespace, "tiphys-executor-plugin", calls)
            assert [status for status, _ in answers] == [200] * len(calls), answers
        else:
            tenant.open_task_set()
            tenant.touch_task_set(times=200)
            release.cluster.wait("the agent admits", tenant.is_admitted)
            tenant.conclude_by_task_set()
        if gangs:
            tenant.make_job(f"left-by-{tenant.name}")
        # A run that was stopped is left alone, one that has failed goes on by itself.
        (tenant.fail if number % 2 else tenant.stop)()
        if not left() or time.monotonic() > deadline:
            break
    assert not left()
    assert not any(refused(audit, release.home, who) for who in accounts)


def test_the_installed_service_gives_gpus_on_nodes_that_there_are(
    release: Release, api: KubeApi, images: dict[str, str], cluster_store: Store, fake_nodes: FakeNodes
) -> None:
    namespace = release.tenants[0]
    [there] = fake_nodes("there", 1, gpus=8, model="A100", labels={"tiphys.test/pool": namespace})
    release.apply("install", "nodes.observe=true")
    release.cluster.wait("there is a ledger", lambda: api.get(GPU_LEDGERS, release.home, "default"))
    observed = {"selector": {"tiphys.test/pool": namespace}}
    api.patch(GPU_LEDGERS, release.home, "default", {"spec": {**QUEUES, "cluster_nodes": observed}})
    tenant = Tenant(api, cluster_store, namespace)
    calls = [tenant.call("admit")]

    def admitted() -> Object | None:
        [(status, answer)] = ask(release, images["tiphys"], namespace, "tiphys-executor-plugin", calls)
        assert status == 200, answer
        return None if answer["node"]["phase"] == "Pending" else answer

    answer = release.cluster.wait("the service has listed the nodes, and answers", admitted)
    assert given(answer)["run"] == "true", answer
    selector = json.loads(given(answer)["pod-patch"])["nodeSelector"]
    assert selector["kubernetes.io/hostname"] == there
    [lease] = (WholeLedgerReader(api, release.home, "default").read() or {})["status"]["leases"]
    assert lease["nodes"] == [there]


def test_a_tenant_reaches_nothing_of_another(
    release: Release, api: KubeApi, images: dict[str, str], cluster_store: Store
) -> None:
    release.apply("install")
    declare_quota(release, api)
    ours, theirs = release.tenants
    tenant = Tenant(api, cluster_store, ours)
    calls = [tenant.call(op) for op in ("admit", "conclude")]
    pretended = tenant.call("admit")
    pretended["workflow"]["metadata"]["namespace"] = theirs
    for namespace, account in ((theirs, "tiphys-executor-plugin"), (theirs, "tiphys-workflow"), (ours, "default")):
        answers = ask(release, images["tiphys"], namespace, account, calls)
        assert [status for status, _ in answers] == [403] * len(calls), answers
    [(status, answer)] = ask(release, images["tiphys"], theirs, "tiphys-executor-plugin", [pretended])
    assert (status, answer["node"]["phase"]) == (200, "Failed"), "their namespace has no such workflow"
    assert stored(cluster_store, ours) == []
    ledger = api.get(GPU_LEDGERS, release.home, "default") or {}
    assert not (ledger.get("status") or {}).get("leases")

    [(status, answer)] = ask(release, images["tiphys"], ours, "tiphys-executor-plugin", calls[:1])
    assert (status, given(answer)["run"]) == (200, "true")
    assert stored(cluster_store, ours)
    assert stored(cluster_store, theirs) == []
    for account in ("tiphys-executor-plugin", "tiphys-workflow"):
        who = f"--as=system:serviceaccount:{theirs}:{account}"
        for what in ("get workflows.argoproj.io", "list workflowtasksets.argoproj.io", "list pods", "get secrets"):
            may = release.cluster.kubectl("auth", "can-i", *what.split(), "-n", ours, who, check=False)
            assert may.strip() == "no", f"{account} of {theirs} may {what} in {ours}"


def test_processes_can_do_no_more_than_they_must_and_tell_no_secret(release: Release, cluster_store: Store) -> None:
    release.apply("install")
    names = release.cluster.kubectl("get", "pods", "-n", release.home, "-o", "name").split()
    assert len(names) == 3
    for name in names:
        found = json.loads(release.cluster.kubectl("exec", name, "-n", release.home, "--", "python", "-c", LOOK))
        assert "0" not in found["Uid"].split()
        assert int(found["CapEff"], 16) == int(found["CapBnd"], 16) == 0
        assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
        assert found["written"] == "Read-only file system"
        assert cluster_store.secret_key not in release.cluster.kubectl("logs", name, "-n", release.home)
    for namespace in (release.home, *release.tenants):
        written = release.cluster.kubectl("get", "deploy,pods,cm,events,gpul", "-n", namespace, "-o", "json")
        assert cluster_store.secret_key not in written


def given(answer: Object) -> dict[str, str]:
    """The output parameters of an admission."""
    return {one["name"]: one["value"] for one in answer["node"]["outputs"]["parameters"]}


def stored(store: Store, namespace: str) -> list[str]:
    """Keys of a tenant."""
    found = store.client().list_objects_v2(Bucket=store.bucket, Prefix=f"{namespace}/")
    return [one["Key"] for one in found.get("Contents", []) if "/runs/" in one["Key"]]
