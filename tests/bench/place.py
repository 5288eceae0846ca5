"""Where the benchmark happens: a namespace and a bucket of its own, on the cluster of KUBECONFIG or the project's."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.progress import say
from cluster import argo_kinds
from cluster.client import Cluster, Store
from cluster.fixtures import run_module
from cluster.harness.settings import Settings

from tiphys.kube import KubeApi, connect_to_cluster

ROOT = Path(__file__).parents[2]
KINDS = ROOT / "charts" / "tiphys" / "crds"


@dataclass(frozen=True)
class Place:
    cluster: Cluster
    api: KubeApi
    """Its namespace is that of the benchmark."""
    store: Store

    @property
    def namespace(self) -> str:
        return self.api.namespace


@contextmanager
def place() -> Iterator[Place]:
    """A namespace that goes with the benchmark; the cluster is started if there is none."""
    cluster = _cluster()
    argo_kinds.ensure(cluster)
    cluster.kubectl("apply", "--server-side", "-f", str(KINDS))
    for kind in ("gpuledgers", "gpuledgerrecords"):
        cluster.established(f"{kind}.tiphys.dev")
    name = f"bench-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("wait", "--for=create", "configmap/kube-root-ca.crt", "--namespace", name, "--timeout=120s")
    store = Store(name, cluster.s3_url, cluster.access_key, cluster.secret_key)
    store.client().create_bucket(Bucket=store.bucket)
    api = connect_to_cluster(cluster.kubeconfig)
    api.namespace = name
    say(f"namespace {name} on {api.server}")
    try:
        yield Place(cluster, api, store)
    finally:
        api.close()
        cluster.kubectl("delete", "namespace", name, "--wait=false")
        _empty(store)


def _empty(store: Store) -> None:
    client = store.client()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=store.bucket):
        if found := [{"Key": one["Key"]} for one in page.get("Contents", [])]:
            client.delete_objects(Bucket=store.bucket, Delete={"Objects": found})
    client.delete_bucket(Bucket=store.bucket)


def _cluster() -> Cluster:
    environ = dict(os.environ)
    if "KUBECONFIG" not in environ:
        lines = (line.removeprefix("export ") for line in run_module("cluster.harness", "up").stdout.splitlines())
        environ |= {name: value.strip("'") for name, _, value in (line.partition("=") for line in lines)}
    settings = Settings.read()
    kubeconfig = Path(environ["KUBECONFIG"])
    own = kubeconfig == settings.kubeconfig
    return Cluster(
        kubeconfig=kubeconfig,
        own=own,
        program=str(settings.bin / "kubectl") if own else "kubectl",
        s3_url=environ["TIPHYS_TEST_S3"],
        access_key=environ["AWS_ACCESS_KEY_ID"],
        secret_key=environ["AWS_SECRET_ACCESS_KEY"],
        audit_log=None,
        run_harness=lambda *arguments: run_module("cluster.harness", *arguments).stdout,
    )
