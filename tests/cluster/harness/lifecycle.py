"""Up and down: a healthy cluster is used again, what a dead one has left is cleared away first."""

import json
import os
import platform
import shutil
import tarfile
from pathlib import Path

from . import archive, control_plane, dns, fake_nodes, identities, namespaces, node, processes
from .binaries import build_missing
from .errors import HarnessError
from .kubectl import answers, kubectl
from .machine import PATIENCE_SECONDS, install_packages, load_kernel_modules, require_root, run, say, wait_until
from .settings import NODES, Node, Settings


def build(settings: Settings) -> None:
    """Everything that takes long and is kept: Debian packages and binaries."""
    require_root()
    if platform.machine() != "x86_64":
        raise HarnessError(f"this machine is {platform.machine()}; the cluster is made for x86_64: set KUBECONFIG")
    install_packages()
    build_missing(settings)


def up(settings: Settings) -> None:
    """Start the cluster, or find that it runs."""
    if healthy(settings):
        say(f"{settings.name} runs already")
        return
    build(settings)
    down(settings)
    _refuse_taken_subnet(settings)
    load_kernel_modules()
    say(f"starting {settings.name} on {settings.net}.0.0/16")
    identities.create(settings)
    first = settings.node(1)
    namespaces.create(first)
    namespaces.connect_to_host(settings, first)
    control_plane.start(settings)
    dns.start(settings)
    _start_node(settings, first)
    # Pods are refused in a namespace whose service account does not exist yet.
    account = ("serviceaccount/default", "--namespace=default")
    kubectl(settings, "wait", "--for=create", *account, f"--timeout={PATIENCE_SECONDS}s")
    say(f"{settings.name} is ready")


def down(settings: Settings) -> None:
    """End the cluster and delete its state; the binaries stay. Does nothing where there is no cluster."""
    if not settings.folder.exists():
        return
    require_root()
    say(f"ending {settings.name}")
    for each in reversed(settings.nodes()):
        _end_node(each)
    wait_until(f"{settings.interface} is gone", lambda: settings.interface not in run("ip", "-brief", "link"))
    shutil.rmtree(settings.folder)


def healthy(settings: Settings) -> bool:
    """Whether every daemon of every node runs and the API server answers."""
    daemons = [*control_plane.commands(settings), dns.NAME]
    daemons += [f"{daemon}-{each.index}" for each in settings.nodes() for daemon in node.DAEMONS]
    return all(processes.runs(settings, name) for name in daemons) and answers(settings, "/readyz")


def import_image(settings: Settings, image: Path) -> None:
    """Make an image known to all nodes, those to come included."""
    for each in settings.nodes():
        node.import_image(settings, each, image)
    with _imported(settings).open("a") as file:
        file.write(f"{image.resolve()}\n")


def add_node(settings: Settings) -> Node:
    """Start one more node, with kubelet, container runtime and network of its own."""
    taken = {each.index for each in settings.nodes()}
    free = [index for index in range(1, NODES + 1) if index not in taken]
    if 1 not in taken or not free:
        raise HarnessError(f"{settings.name} has {len(taken)} nodes; it must run and can have up to {NODES}")
    new = settings.node(free[0])
    namespaces.create(new)
    namespaces.connect_to_first(settings, new)
    _start_node(settings, new)
    known = _imported(settings).read_text().splitlines() if _imported(settings).exists() else []
    for image in filter(Path.exists, map(Path, dict.fromkeys(known))):
        node.import_image(settings, new, image)
    return new


def lose_node(settings: Settings, index: int) -> None:
    """Take the power from a node: its processes end at once and nobody is told. Kubernetes has to find out."""
    lost = settings.node(index)
    if index == 1 or not lost.folder.exists():
        raise HarnessError(f"{lost.name} carries the control plane or does not exist; it cannot be lost")
    _end_node(lost)
    for daemon in node.DAEMONS:
        processes.stop(settings, f"{daemon}-{index}")
    shutil.rmtree(lost.folder)


def remove_node(settings: Settings, index: int) -> None:
    """End a node that may be lost already, and delete it from Kubernetes, too."""
    if settings.node(index).folder.exists():
        lose_node(settings, index)
    kubectl(settings, "delete", "node", settings.node(index).name, "--ignore-not-found")


def restart(settings: Settings, name: str) -> None:
    """Start a daemon again that was stopped (or stop it first), under its name in the folder of logs."""
    processes.stop(settings, name)
    daemon, _, index = name.rpartition("-")
    if name in control_plane.commands(settings):
        control_plane.start_one(settings, name)
    elif name == dns.NAME:
        dns.start(settings)
    elif name == fake_nodes.NAME:
        fake_nodes.start_kwok(settings)
    elif daemon in node.DAEMONS and index.isdigit():
        node.start_one(settings, settings.node(int(index)), daemon)
    else:
        known = [*control_plane.commands(settings), dns.NAME, fake_nodes.NAME]
        known += [f"{each}-1" for each in node.DAEMONS]
        raise HarnessError(f"there is no daemon {name}; there are {', '.join(known)}")


def _start_node(settings: Settings, new: Node) -> None:
    node.start(settings, new)
    layer, image = new.folder / "pause-layer.tar", new.folder / "pause.tar"
    with tarfile.open(layer, "w") as tar:
        tar.add(os.path.realpath(settings.bin / "pause"), arcname="pause")
    archive.write(image, node.PAUSE, [layer], {"Entrypoint": ["/pause"], "User": "65532:65532"})
    node.import_image(settings, new, image)


def _imported(settings: Settings) -> Path:
    return settings.folder / "imported"


def _end_node(each: Node) -> None:
    namespaces.destroy(each)
    node.delete_cgroups(each)


def _refuse_taken_subnet(settings: Settings) -> None:
    for interface in json.loads(run("ip", "-json", "address")):
        for address in interface.get("addr_info", ()):
            if address.get("local", "").startswith(f"{settings.net}."):
                raise HarnessError(
                    f"{interface['ifname']} has {address['local']}: set TIPHYS_CLUSTER_NET to a /16 that is free"
                )
