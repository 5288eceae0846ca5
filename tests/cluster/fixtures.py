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
from cluster.client import SECONDS, AuditLog, Cluster, Json, Store
from cluster.harness.settings import Settings
from support.checks.chart import CHART

from tiphys.kube import KubeApi, connect_to_cluster
from tiphys.store import Store as RunStore
from tiphys.store import open_store
from tiphys.store.credentials import CredentialsHolder, bucket_policy

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


class StoreUser(Protocol):
    def __call__(self, holder: CredentialsHolder, url: str = ...) -> Store:
        """The store, with the key of a new user, who may do what the policy for the store ``url`` says."""


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
    cluster.kubectl("wait", "--for=create", "serviceaccount/default", "--namespace", name, f"--timeout={SECONDS}s")
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
    """An empty bucket on a server that pods and tests both reach, with the key of its administrator."""
    if not cluster.s3_url:
        pytest.skip("TIPHYS_TEST_S3 names no S3 server that the pods of this cluster reach")
    store = Store(f"test-{uuid.uuid4().hex[:12]}", cluster.s3_url, cluster.access_key, cluster.secret_key)
    store.client().create_bucket(Bucket=store.bucket)
    return store


@pytest.fixture
def store_user(cluster: Cluster, cluster_store: Store) -> StoreUser:
    """Users of the bucket. A server that cannot be given users has one, who may do everything."""
    statements: list[Json] = []

    def create(holder: CredentialsHolder, url: str = cluster_store.url) -> Store:
        if not cluster.own:
            return cluster_store
        user = f"{cluster_store.bucket}-{len(statements)}"
        secret = cluster.harness("s3-user", user).strip()
        policy = bucket_policy(url, holder, [user])
        statements.extend(policy["Statement"])
        text = json.dumps({**policy, "Statement": statements})
        cluster_store.client().put_bucket_policy(Bucket=cluster_store.bucket, Policy=text)
        return replace(cluster_store, access_key=user, secret_key=secret)

    return create


@pytest.fixture
def services_store(store_user: StoreUser) -> Store:
    """The store, with the key of plugin and controller."""
    return store_user(CredentialsHolder.SERVICES)


@pytest.fixture
def program_store(store_user: StoreUser) -> Store:
    """The store, with the key of training programs."""
    return store_user(CredentialsHolder.PROGRAM)


@pytest.fixture
def run_store(services_store: Store, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    """The same, opened by this process, which has the key of the services from now on."""
    for name, value in services_store.environment.items():
        monkeypatch.setenv(name, value)
    return open_store(services_store.url)


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
    "program_store",
    "run_store",
    "second_node",
    "services_store",
    "store_user",
]
