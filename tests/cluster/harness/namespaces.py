"""A node of the cluster as Linux namespaces: what runs on it, its mounts and its interfaces live and die with one
process, the node's process 1. `SIGKILL` to that is the loss of a machine.
"""

import os
import signal
import subprocess
from pathlib import Path

from .errors import HarnessError
from .machine import run, wait_until
from .settings import Node, Settings

# Sockets, locks and links that programs put into fixed places of the machine stay inside the node.
_PREPARE = """
mount --make-rshared /
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/netns /run/lock
for own in /var/log /var/lib/cni; do mkdir -p "$1/fixed$own" "$own"; mount --bind "$1/fixed$own" "$own"; done
ip link set lo up
sysctl -qw net.ipv4.ip_forward=1
touch "$1/prepared"
trap '' CHLD  # the kernel reaps what is left to this process
exec sleep infinity
"""


def create(node: Node) -> None:
    """Open the namespaces, and wait until they are furnished."""
    node.folder.mkdir(parents=True)
    command = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
    log = node.folder / "namespaces.log"
    with log.open("ab") as output:
        holder = subprocess.Popen(
            [*command, "sh", "-euc", _PREPARE, "sh", str(node.folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _pid_file(node).write_text(f"{holder.pid} {start_time(holder.pid)}")
    prepared = node.folder / "prepared"
    wait_until(f"{node.name} is furnished", lambda: prepared.exists() or not recorded(_pid_file(node)))
    if not prepared.exists():
        raise HarnessError(f"the namespaces of {node.name} could not be made:\n{log.read_text()[-3000:]}")


def enter(node: Node, *command: str | Path) -> list[str]:
    """The command that runs `command` on the node."""
    return ["nsenter", f"--target={process_one(node)}", "--net", "--pid", "--mount", *(str(word) for word in command)]


def on(node: Node, *command: str | Path) -> str:
    """Run a command on the node to its end; its output."""
    return run(*enter(node, *command))


def process_one(node: Node) -> int:
    """Number of the node's process 1 as the host sees it; 0 if the node is dead."""
    return child_of(recorded(_pid_file(node)))


def destroy(node: Node) -> None:
    """End everything on the node at once, as if the machine had burnt; its folder stays."""
    holder = recorded(_pid_file(node))
    if not holder:
        return
    if inner := child_of(holder):
        os.kill(inner, signal.SIGKILL)
    # Process 1 is gone only after every other process of its namespace.
    wait_until(f"the processes of {node.name} have ended", lambda: not recorded(_pid_file(node)))


def connect_to_host(settings: Settings, node: Node) -> None:
    """Give the first node its bridge, on which the host has an address. There is no default route: nothing leaves."""
    one = process_one(node)
    # Without an address of its own it takes one of its ports', another whenever a node comes or goes.
    on(node, "ip", "link", "add", "nodes", "address", "02:00:00:00:00:01", "type", "bridge")
    on(node, "ip", "address", "add", f"{node.address}/24", "dev", "nodes")
    run("ip", "link", "add", settings.interface, "type", "veth", "peer", "name", "host", "netns", str(one))
    on(node, "ip", "link", "set", "host", "master", "nodes", "up")
    on(node, "ip", "link", "set", "nodes", "up")
    # Addresses of services are rewritten on their way out, and there must be a way out for that to happen.
    on(node, "ip", "route", "add", settings.services, "dev", "nodes")
    run("ip", "address", "add", f"{settings.host_address}/24", "dev", settings.interface)
    run("ip", "link", "set", settings.interface, "up")


def connect_to_first(settings: Settings, node: Node) -> None:
    """Plug a further node into the bridge of the first, and tell all of each other's pods."""
    first, port = settings.node(1), f"port-{node.index}"
    ends = (port, "netns", str(process_one(first))), ("nodes", "netns", str(process_one(node)))
    run("ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
    on(first, "ip", "link", "set", port, "master", "nodes", "up")
    on(node, "ip", "address", "add", f"{node.address}/24", "dev", "nodes")
    on(node, "ip", "link", "set", "nodes", "up")
    on(node, "ip", "route", "add", settings.services, "dev", "nodes")
    for other in settings.nodes():
        if other != node and process_one(other):
            on(other, "ip", "route", "replace", node.pods, "via", node.address)
            on(node, "ip", "route", "replace", other.pods, "via", other.address)


def recorded(file: Path) -> int:
    """The process that a file names, as `number start-time`; 0 if that one has ended."""
    if not file.exists():
        return 0
    number, started = file.read_text().split()
    return int(number) if start_time(int(number)) == started else 0


def start_time(pid: int) -> str:
    """What tells a process from a later one of the same number; empty if it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def child_of(pid: int) -> int:
    """The only child of `unshare` or `nsenter`, which wait for it outside of the namespaces; 0 if there is none."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(children[0]) if children else 0


def _pid_file(node: Node) -> Path:
    return node.folder / "pid"
