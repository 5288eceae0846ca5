"""What runs on each node: container runtime, kubelet, kube-proxy, with all their files in the node's folder."""

import json
import os
from pathlib import Path

from . import namespaces, processes
from .identities import kubeconfig, pki
from .kubectl import kubectl
from .machine import CNI, PATIENCE_SECONDS, wait_until
from .settings import Node, Settings

PAUSE = "tiphys.test/pause:1"
DAEMONS = ("containerd", "kubelet", "proxy")
_CGROUPS = Path("/sys/fs/cgroup")


def start(settings: Settings, node: Node) -> None:
    """Start the daemons of a node whose namespaces and network exist; returns when pods can run on it."""
    _configure(settings, node)
    for daemon in DAEMONS:
        start_one(settings, node, daemon)
    ready = ("wait", f"node/{node.name}", f"--timeout={PATIENCE_SECONDS}s")
    processes.wait_for(settings, f"kubelet-{node.index}", f"{node.name} has registered", lambda: _known(settings, node))
    kubectl(settings, *ready, "--for=condition=Ready")


def start_one(settings: Settings, node: Node, daemon: str) -> None:
    """Start one daemon, of a new node or after a test has ended it."""
    command = {"containerd": _containerd, "kubelet": _kubelet, "proxy": _proxy}[daemon](settings, node)
    processes.start(settings, node, f"{daemon}-{node.index}", command)
    if daemon == "containerd":
        name, answers = f"containerd-{node.index}", (node.folder / "containerd.sock").is_socket
        processes.wait_for(settings, name, "containerd answers", answers)


def import_image(settings: Settings, node: Node, archive: Path) -> None:
    """Import an image archive (Docker's or OCI's form) for the pods of the node."""
    socket = f"--address={node.folder}/containerd.sock"
    namespaces.on(node, "ctr", socket, "--namespace=k8s.io", "images", "import", archive)


def delete_cgroups(node: Node) -> None:
    """Delete the control groups that pods leave once their processes are gone."""
    for root in _cgroup_roots(node):
        if root.exists():
            wait_until(f"{root} is empty", lambda root=root: _delete_tree(root), seconds=120)  # type: ignore[misc]


def _delete_tree(root: Path) -> bool:
    """Delete a tree of control groups from its leaves; whether that succeeded."""
    try:
        for folder, _, _ in os.walk(root, topdown=False):
            Path(folder).rmdir()
    except OSError:  # a group is busy until the kernel has buried its processes
        return False
    return True


def _known(settings: Settings, node: Node) -> bool:
    return node.name in kubectl(settings, "get", "nodes", "-o", "name")


def _configure(settings: Settings, node: Node) -> None:
    files = {
        "containerd.toml": _containerd_toml(node),
        "cni/10-bridge.conflist": json.dumps(_network(node)),
        "kubelet.json": json.dumps(_kubelet_config(settings, node)),
        "resolv.conf": f"nameserver {settings.dns_address}\n",
    }
    for name, content in files.items():
        path = node.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    for root in _cgroup_roots(node):
        root.mkdir(exist_ok=True)


def _cgroup_roots(node: Node) -> list[Path]:
    """Its control group: one in version 2, one in each hierarchy of version 1."""
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS / node.cgroup.lstrip("/")]
    return [hierarchy / node.cgroup.lstrip("/") for hierarchy in _CGROUPS.iterdir() if hierarchy.is_dir()]


def _containerd_toml(node: Node) -> str:
    return f"""\
version = 2
root = "{node.folder}/containerd/root"
state = "{node.folder}/containerd/state"
[grpc]
  address = "{node.folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true  # a virtual machine may lack the right to lower a score
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI}"
    conf_dir = "{node.folder}/cni"
"""


def _network(node: Node) -> dict[str, object]:
    addresses = {
        "type": "host-local",
        "dataDir": f"{node.folder}/cni-addresses",
        "ranges": [[{"subnet": node.pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "pods", "isGateway": True, "hairpinMode": True, "ipam": addresses}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}


def _kubelet_config(settings: Settings, node: Node) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki(settings)}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": node.cgroup,
        "clusterDNS": [settings.dns_address],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": f"unix://{node.folder}/containerd.sock",
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "failSwapOn": False,
        "imageGCHighThresholdPercent": 100,
        "resolvConf": f"{node.folder}/resolv.conf",
    }


def _containerd(settings: Settings, node: Node) -> list[str]:
    return ["containerd", f"--config={node.folder}/containerd.toml"]


def _kubelet(settings: Settings, node: Node) -> list[str]:
    return [
        f"{settings.bin}/kubelet",
        f"--config={node.folder}/kubelet.json",
        f"--kubeconfig={kubeconfig(settings, f'system:node:{node.name}')}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
        f"--root-dir={node.folder}/kubelet",
        f"--cert-dir={node.folder}/kubelet-pki",
    ]


def _proxy(settings: Settings, node: Node) -> list[str]:
    return [
        f"{settings.bin}/kube-proxy",
        f"--kubeconfig={kubeconfig(settings, 'system:kube-proxy')}",
        f"--hostname-override={node.name}",
        f"--cluster-cidr={settings.all_pods}",
        "--proxy-mode=iptables",
        # Limits of the whole machine are not ours to set.
        "--conntrack-max-per-core=0",
        "--conntrack-min=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
    ]
