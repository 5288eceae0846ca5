"""Two clusters must be able to run side by side: every name, address and path is made from two settings here."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import HarnessError

NODES = 4  # identities are made for so many when the cluster starts


@dataclass(frozen=True)
class Node:
    """One node: `index` counts from 1, and the first one carries the control plane."""

    index: int
    name: str
    address: str
    pods: str
    """Subnet of its pods."""
    folder: Path
    cgroup: str


@dataclass(frozen=True)
class Settings:
    name: str
    net: str
    """The first two numbers of the subnet, such as `10.237`."""
    cache: Path

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> "Settings":
        """From TIPHYS_CLUSTER_NAME, TIPHYS_CLUSTER_NET and TIPHYS_CLUSTER_CACHE."""
        name = environ.get("TIPHYS_CLUSTER_NAME", "dev")
        net = environ.get("TIPHYS_CLUSTER_NET", "10.237")
        cache = environ.get("TIPHYS_CLUSTER_CACHE", "~/.cache/tiphys-cluster")
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?", name):
            raise HarnessError(f"TIPHYS_CLUSTER_NAME={name}: use up to 20 of a-z, 0-9 and -")
        if not re.fullmatch(r"\d{1,3}\.\d{1,3}", net):
            raise HarnessError(f"TIPHYS_CLUSTER_NET={net}: give the first two numbers of a private /16, such as 10.237")
        return cls(name, net, Path(cache).expanduser().absolute())

    @property
    def bin(self) -> Path:
        return self.cache / "bin"

    @property
    def folder(self) -> Path:
        """All state of this cluster; `down` deletes it."""
        return self.cache / "clusters" / self.name

    @property
    def logs(self) -> Path:
        return self.folder / "log"

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def audit_log(self) -> Path:
        """JSON lines, one per request that the API server has answered."""
        return self.folder / "audit.log"

    @property
    def s3_url(self) -> str:
        return f"http://{self.net}.0.2:7070"

    @property
    def api_url(self) -> str:
        return f"https://{self.net}.0.2:6443"

    @property
    def host_address(self) -> str:
        return f"{self.net}.0.1"

    @property
    def services(self) -> str:
        return f"{self.net}.64.0/18"

    @property
    def dns_address(self) -> str:
        return f"{self.net}.0.2"

    @property
    def all_pods(self) -> str:
        return f"{self.net}.128.0/17"

    @property
    def interface(self) -> str:
        """The one interface on the host; Linux allows 15 characters."""
        return "tiphys" + hashlib.sha256(self.name.encode()).hexdigest()[:8]

    def node(self, index: int) -> Node:
        return Node(
            index=index,
            name=f"node-{index}",
            address=f"{self.net}.0.{index + 1}",
            pods=f"{self.net}.{127 + index}.0/24",
            folder=self.folder / f"node-{index}",
            cgroup=f"/tiphys-{self.name}-{index}",
        )

    def nodes(self) -> list[Node]:
        """Those that were started and not taken away."""
        return [node for node in map(self.node, range(1, NODES + 1)) if node.folder.exists()]
