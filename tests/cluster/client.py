"""A cluster as a test sees it: kubectl, its objects as dictionaries, its S3 server, its audit log."""

import functools
import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]
SECONDS = 300  # a deadline, never a duration: the machine may be busy


@dataclass(frozen=True)
class Cluster:
    kubeconfig: Path
    own: bool
    """Whether it is the project's own: then it can be given images and nodes, and daemons can be ended."""
    program: str
    s3_url: str
    access_key: str
    secret_key: str = field(repr=False)
    audit_log: Path | None
    run_harness: Callable[..., str] = field(repr=False)

    def kubectl(self, *arguments: str, text: str = "", check: bool = True) -> str:
        """Run kubectl to its end; its standard output."""
        command = [self.program, f"--kubeconfig={self.kubeconfig}", *arguments]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, env=_environment())
        assert not check or done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def apply(self, *manifests: Json, namespace: str = "default") -> None:
        items = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        # The schemas that kubectl would check against are megabytes; the API server checks what it is given itself.
        self.kubectl("apply", "--validate=false", "--namespace", namespace, "-f", "-", text=json.dumps(items))

    def get(self, *what: str, namespace: str = "default") -> Json:
        """An object, or a list of them, such as `get("pod", "a")`."""
        found: Json = json.loads(self.kubectl("get", *what, "--namespace", namespace, "-o", "json"))
        return found

    def wait(self, what: str, holds: Callable[[], Any], seconds: float = SECONDS) -> Any:
        """Poll until `holds` gives something true; that."""
        deadline = time.monotonic() + seconds
        while not (value := holds()):
            assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain until {what}"
            time.sleep(0.5)
        return value

    def established(self, *kinds: str) -> None:
        """Wait until the API server serves these kinds; `kubectl wait` gives up on one that has no conditions yet."""

        def served(kind: str) -> bool:
            known = self.get("crd", kind).get("status", {}).get("conditions") or []
            return any(one["type"] == "Established" and one["status"] == "True" for one in known)

        for kind in kinds:
            self.wait(f"{kind} is served", functools.partial(served, kind))

    def finished_pod(self, name: str, namespace: str) -> Json:
        """The pod, once it has succeeded or failed."""

        def finished() -> Json | None:
            pod = self.get("pod", name, namespace=namespace)
            return pod if pod["status"].get("phase") in ("Succeeded", "Failed") else None

        pod: Json = self.wait(f"pod {name} has ended", finished)
        return pod

    def advertise_gpus(self, node: str, count: int) -> None:
        """Have a node say that it has GPUs: Kubernetes schedules them by number alone."""
        amount = {"nvidia.com/gpu": str(count)}
        patch = json.dumps({"status": {"capacity": amount, "allocatable": amount}})
        self.kubectl("patch", "node", node, "--subresource=status", "--type=merge", f"--patch={patch}")

    def harness(self, *arguments: str) -> str:
        """An action of the project's own cluster, such as `stop apiserver`; its output."""
        assert self.own, f"this cluster is not the project's own: it cannot {' '.join(arguments)}"
        return self.run_harness(*arguments)


@dataclass(frozen=True)
class Store:
    bucket: str
    endpoint: str
    access_key: str
    secret_key: str = field(repr=False)
    prefix: str = "tiphys"

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which a program, in a pod or here, gets at the store."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """A boto3 client that proxies and settings of a person's shell do not reach."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=Config(proxies={}, s3={"addressing_style": "path"}),
        )


@dataclass(frozen=True)
class AuditLog:
    """Records of the API server from a place in its log on; for the form see `audit.k8s.io/v1` Event."""

    path: Path
    start: int

    def of(self, user: str) -> list[Json]:
        """What this user, such as `system:serviceaccount:ns:name`, has asked for."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            lines = file.read().split(b"\n")[:-1]
        records = (json.loads(line) for line in lines)
        return [record for record in records if record["user"].get("username") == user]


def _environment() -> dict[str, str]:
    """Without the proxies and certificates of a person's shell."""
    return {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
