"""What tests on a cluster are given: the cluster, a namespace, a store, images, the audit log.

Nothing here runs unless TIPHYS_CLUSTER is set: a KUBECONFIG in somebody's shell may lead to a cluster that people
work on. `start` starts the project's own cluster where there is no other, `use` only takes one that is there.
"""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest
from cluster import argo_kinds
from cluster.client import AuditLog, Cluster, Json, Store
from cluster.harness.settings import Settings
from support.chart import CHART

from tiphys.kube import KubeApi, connect_to_cluster
from tiphys.store import Store as RunStore
from tiphys.store import open_store

TESTS = Path(__file__).parents[1]
_HOW = "set TIPHYS_CLUSTER=start (or run `make test-cluster`) to run the tests that need a Kubernetes cluster"
FAKE = {"key": "kwok.x-k8s.io/node", "operator": "Exists", "effect": "NoSchedule"}
"""Toleration of a pod that may go to fake nodes."""


class FakeNodes(Protocol):
    def __call__(
        self,
        group: str,
        count: int,
        *,
        gpus: int = 0,
        model: str = "",
        labels: Mapping[str, str] | None = None,
        taints: Sequence[str] = (),
    ) -> list[str]:
        """Add `<group>-1` to `<group>-<count>`, ready with so many GPUs each; their names.

        `model` is the label `nvidia.com/gpu.product`; labels such as those of rack, block and NVLink domain are the
        same for all nodes of a group; a taint is `key=value:effect`.
        """


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster of KUBECONFIG, or else the project's own."""
    mode = os.environ.get("TIPHYS_CLUSTER")
    if mode not in ("start", "use"):
        pytest.skip(_HOW)
    if os.environ.get("KUBECONFIG"):
        return _of(dict(os.environ))
    done = run_module("cluster.harness", "up" if mode == "start" else "env", check=mode == "start")
    if done.returncode:
        pytest.skip("TIPHYS_CLUSTER=use, and there is neither KUBECONFIG nor a running `make cluster`")
    lines = (line.removeprefix("export ") for line in done.stdout.splitlines())
    return _of({name: value.strip("'") for name, _, value in (line.partition("=") for line in lines)})


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A fresh namespace that goes with the test."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    cluster.kubectl("create", "namespace", name)
    # A pod that comes before the account of its namespace is refused.
    cluster.kubectl("wait", "--for=create", "serviceaccount/default", "--namespace", name, "--timeout=120s")
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def kinds(cluster: Cluster) -> None:
    """Argo's kinds and our own, which the API server serves."""
    argo_kinds.ensure(cluster)
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "--validate=false", "-f", str(CHART / "crds"))
    cluster.established(*(f"{file.stem}s.tiphys.dev" for file in sorted((CHART / "crds").glob("*.yaml"))))


@pytest.fixture
def api(cluster: Cluster, kinds: None, namespace: str) -> Iterator[KubeApi]:
    """A client in the test's namespace, with the rights of an administrator."""
    connected = connect_to_cluster(cluster.kubeconfig)
    connected.namespace = namespace
    yield connected
    connected.close()


@pytest.fixture
def cluster_store(cluster: Cluster) -> Store:
    """An empty bucket on a server that pods and tests both reach."""
    if not cluster.s3_url:
        pytest.skip("TIPHYS_TEST_S3 names no S3 server that the pods of this cluster reach")
    store = Store(f"test-{uuid.uuid4().hex[:12]}", cluster.s3_url, cluster.access_key, cluster.secret_key)
    store.client().create_bucket(Bucket=store.bucket)
    return store


@pytest.fixture
def run_store(cluster_store: Store, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    """The same, opened by this process, which has its credentials from now on."""
    for name, value in cluster_store.environment.items():
        monkeypatch.setenv(name, value)
    return open_store(cluster_store.url)


@pytest.fixture
def tenants(cluster: Cluster, cluster_store: Store) -> Callable[..., list[Store]]:
    """`tenants("a", "b")`: the store under each prefix of one bucket, each with a key that opens no other prefix."""
    if not cluster.own:
        pytest.skip("only the S3 server of `make cluster` can be given users")

    def create(*prefixes: str) -> list[Store]:
        stores = []
        for prefix in prefixes:
            user = f"{cluster_store.bucket}-{prefix}"
            secret = cluster.harness("s3-user", user).strip()
            stores.append(replace(cluster_store, prefix=prefix, access_key=user, secret_key=secret))
        policy = {"Version": "2012-10-17", "Statement": [rule for store in stores for rule in _only_its_prefix(store)]}
        cluster_store.client().put_bucket_policy(Bucket=cluster_store.bucket, Policy=json.dumps(policy))
        return stores

    return create


def _only_its_prefix(store: Store) -> list[Json]:
    """The rights that a tenant needs, and no more."""
    bucket, own = f"arn:aws:s3:::{store.bucket}", f"{store.prefix}/*"
    who = {"Effect": "Allow", "Principal": {"AWS": [store.access_key]}}
    objects = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    return [
        {**who, "Action": objects, "Resource": f"{bucket}/{own}"},
        {**who, "Action": ["s3:ListBucket"], "Resource": bucket, "Condition": {"StringLike": {"s3:prefix": [own]}}},
    ]


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> dict[str, str]:
    """References of the images `tiphys` and `tiphys-trainer`, known to the nodes."""
    named = {"tiphys": os.environ.get("TIPHYS_IMAGE", ""), "tiphys-trainer": os.environ.get("TIPHYS_TRAINER_IMAGE", "")}
    if all(named.values()):
        return named
    if not cluster.own:
        pytest.skip("TIPHYS_IMAGE and TIPHYS_TRAINER_IMAGE name no images for this cluster")
    built = [line.split(maxsplit=1) for line in run_module("cluster.images").stdout.splitlines()]
    for _, archive in built:
        cluster.harness("import", archive)
    return {reference.split("/")[1].split(":")[0]: reference for reference, _ in built}


@pytest.fixture
def audit(cluster: Cluster) -> AuditLog:
    """What the API server has been asked since the test began."""
    if not cluster.audit_log:
        pytest.skip("TIPHYS_TEST_AUDIT_LOG names no audit log of this cluster")
    return AuditLog(cluster.audit_log, cluster.audit_log.stat().st_size)


@pytest.fixture
def second_node(cluster: Cluster) -> Iterator[str]:
    """Name of a further node, with a kubelet of its own, that the test may drain or lose."""
    if not cluster.own:
        pytest.skip("only `make cluster` can be given a further node")
    name = cluster.harness("add-node").strip()
    yield name
    cluster.harness("remove-node", name.removeprefix("node-"))


@pytest.fixture
def gpus(cluster: Cluster) -> Iterator[Callable[[str, int], None]]:
    """Have a node advertise GPUs; after the test it has none again."""
    given = []

    def advertise(node: str, count: int) -> None:
        given.append(node)
        cluster.advertise_gpus(node, count)

    yield advertise
    for node in given:
        cluster.advertise_gpus(node, 0)


@pytest.fixture
def fake_nodes(cluster: Cluster) -> Iterator[FakeNodes]:
    """Nodes for the scheduler alone, gone after the test; only pods that tolerate `FAKE` get there."""
    if not cluster.own:
        pytest.skip("only `make cluster` can be given fake nodes")
    groups: list[str] = []

    def add(
        group: str,
        count: int,
        *,
        gpus: int = 0,
        model: str = "",
        labels: Mapping[str, str] | None = None,
        taints: Sequence[str] = (),
    ) -> list[str]:
        groups.append(group)
        options = [f"--gpus={gpus}", f"--model={model}", *(f"--taint={taint}" for taint in taints)]
        options += [f"--label={key}={value}" for key, value in (labels or {}).items()]
        cluster.harness("add-fake-nodes", group, str(count), *options)
        return [f"{group}-{index}" for index in range(1, count + 1)]

    yield add
    for group in groups:
        cluster.harness("remove-fake-nodes", group)


def run_module(module: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a part of the harness as a command; what it says of its progress goes to standard error."""
    environ = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    assert not check or done.returncode == 0, f"{module} {' '.join(arguments)} failed; it says why above"
    return done


def _of(environ: dict[str, str]) -> Cluster:
    settings = Settings.read()
    kubeconfig = Path(environ["KUBECONFIG"])
    audit_log = environ.get("TIPHYS_TEST_AUDIT_LOG")
    return Cluster(
        kubeconfig=kubeconfig,
        own=kubeconfig == settings.kubeconfig,
        program="kubectl" if kubeconfig != settings.kubeconfig else str(settings.bin / "kubectl"),
        s3_url=environ.get("TIPHYS_TEST_S3", ""),
        access_key=environ.get("AWS_ACCESS_KEY_ID", ""),
        secret_key=environ.get("AWS_SECRET_ACCESS_KEY", ""),
        audit_log=Path(audit_log) if audit_log else None,
        run_harness=lambda *arguments: run_module("cluster.harness", *arguments).stdout,
    )


__all__ = [
    "api",
    "audit",
    "cluster",
    "cluster_store",
    "fake_nodes",
    "gpus",
    "images",
    "kinds",
    "namespace",
    "run_store",
    "second_node",
    "tenants",
]
