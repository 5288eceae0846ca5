"""Nodes of paper: where only scheduling matters, one process (kwok) says what a hundred kubelets would.

A pod that is bound to a fake node is said to run at once, and goes when it is deleted; nothing is executed. The nodes
carry a taint, so that only pods which tolerate it ever get there. kwok is started by the first group of fake nodes and
ended with the last.
"""

import json
import signal
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from . import processes
from .binaries import build_one
from .errors import HarnessError
from .fake_pods import STAGES
from .gpus import RESOURCE
from .identities import kubeconfig
from .kubectl import kubectl
from .rbac import grant
from .settings import Settings

NAME = "kwok"
USER = "system:kwok"
GROUP = "tiphys.test/fake-nodes"
"""Label that says to which group a node belongs."""
MARK = "kwok.x-k8s.io/node"
"""Annotation by which kwok knows its nodes, and key of the taint."""
MODEL = "nvidia.com/gpu.product"
_PODS = "198.18.0.1/15"  # addresses for benchmarks (RFC 2544): fake pods have no network
_RULES = [
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [""], "resources": ["nodes/status", "pods/status"], "verbs": ["patch", "update"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["delete", "get", "list", "patch", "update", "watch"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch", "update"]},
    {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "verbs": ["create", "get", "list", "patch", "update", "watch"],
    },
]


@dataclass(frozen=True)
class Group:
    """Nodes that are alike: `<name>-1`, `<name>-2`, …, such as those of one rack or NVLink domain."""

    name: str
    count: int
    gpus: int = 0
    model: str = ""
    """Value of the label `nvidia.com/gpu.product`."""
    labels: dict[str, str] = field(default_factory=dict)
    taints: tuple[str, ...] = ()
    """Besides the one that all fake nodes have, as `key=value:effect`."""

    @property
    def nodes(self) -> list[str]:
        return [f"{self.name}-{index}" for index in range(1, self.count + 1)]


def add(settings: Settings, group: Group) -> None:
    """Add nodes; returns when all are ready and have their GPUs."""
    manifests = [manifest(group, name) for name in group.nodes]
    if not processes.runs(settings, NAME):
        start_kwok(settings)
    items = {"apiVersion": "v1", "kind": "List", "items": manifests}
    kubectl(settings, "create", "--validate=false", "-f", "-", text=json.dumps(items))
    processes.wait_for(settings, NAME, f"{group.name} is ready", lambda: _all_ready(settings, group))


def remove(settings: Settings, name: str) -> None:
    """Delete the nodes of a group and all pods on them."""
    _delete_pods(settings, _nodes(settings, f"{GROUP}={name}"))
    # One request: kubectl would send one for each, five in a second.
    kubectl(settings, "delete", f"--raw=/api/v1/nodes?labelSelector={GROUP}%3D{name}")
    if not _nodes(settings, GROUP):
        processes.stop(settings, NAME, signal.SIGKILL)  # it takes its time otherwise, and has nothing to save


def start_kwok(settings: Settings) -> None:
    """Start kwok, for the first group or after a test has ended it."""
    program, account = build_one(settings, NAME), kubeconfig(settings, USER)
    if not account.exists():
        raise HarnessError(f"{settings.name} was started without an account for {NAME}: end it and start it again")
    grant(settings, USER, _RULES)
    config = settings.folder / "kwok.json"  # by default that of somebody's home
    header = {"apiVersion": "config.kwok.x-k8s.io/v1alpha1", "kind": "KwokConfiguration"}
    config.write_text("\n---\n".join(map(json.dumps, (header, *STAGES))))
    options = [
        f"--kubeconfig={account}",
        f"--config={config}",
        f"--manage-nodes-with-annotation-selector={MARK}=fake",
        f"--cidr={_PODS}",
        f"--node-ip={settings.node(1).address}",
        "--v=WARN",
        # Renewed four times as often: a node is given up after 50 seconds, and the machine may be busy.
        "--node-lease-duration-seconds=80",
    ]
    processes.start(settings, settings.node(1), NAME, [str(program), *options])


def manifest(group: Group, name: str) -> dict[str, object]:
    """A node as its kubelet would register it.

    Raises:
        HarnessError: a taint is not of the form `key=value:effect`.
    """
    amounts = {"cpu": "128", "memory": "1Ti", "pods": "110", "ephemeral-storage": "1Ti"}
    amounts |= {RESOURCE: str(group.gpus)} if group.gpus else {}
    labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    labels |= {GROUP: group.name, **({MODEL: group.model} if group.model else {}), **group.labels}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels, "annotations": {MARK: "fake"}},
        "spec": {"taints": [taint(f"{MARK}=fake:NoSchedule"), *map(taint, group.taints)]},
        "status": {"capacity": amounts, "allocatable": amounts},
    }


def taint(text: str) -> dict[str, str]:
    """`key=value:effect` as an object.

    Raises:
        HarnessError: it has another form.
    """
    left, colon, effect = text.rpartition(":")
    key, _, value = left.partition("=")
    if not (colon and key and effect in ("NoSchedule", "PreferNoSchedule", "NoExecute")):
        raise HarnessError(f"taint {text}: write key=value:NoSchedule, PreferNoSchedule or NoExecute")
    return {"key": key, "value": value, "effect": effect}


def _all_ready(settings: Settings, group: Group) -> bool:
    """Also for the scheduler, which goes by a taint that is taken away a moment later."""
    found = json.loads(kubectl(settings, "get", "nodes", f"--selector={GROUP}={group.name}", "-o", "json"))["items"]
    wanted = {each["key"] for each in map(taint, group.taints)} | {MARK}
    return len(found) == group.count and all(_ready(node, wanted) for node in found)


def _ready(node: Any, taints: set[str]) -> bool:
    conditions = {each["type"]: each["status"] for each in node["status"].get("conditions", ())}
    return conditions.get("Ready") == "True" and {each["key"] for each in node["spec"]["taints"]} == taints


def _nodes(settings: Settings, selector: str) -> set[str]:
    return set(kubectl(settings, "get", "nodes", f"--selector={selector}", "-o", "name").replace("node/", "").split())


def _delete_pods(settings: Settings, nodes: set[str]) -> None:
    """By force: a pod outlives its node by a minute, and there is nothing that could still run."""
    by_namespace = defaultdict(list)
    for pod in json.loads(kubectl(settings, "get", "pods", "--all-namespaces", "-o", "json"))["items"]:
        if pod["spec"].get("nodeName") in nodes:
            by_namespace[pod["metadata"]["namespace"]].append(pod["metadata"]["name"])
    force = ("--force", "--grace-period=0", "--wait=false", "--ignore-not-found")
    for namespace, names in by_namespace.items():
        kubectl(settings, "delete", "pods", f"--namespace={namespace}", *force, *names)
