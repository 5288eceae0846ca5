"""The chart on a cluster: from nothing to ready, through an upgrade, and gone again, in both modes.

| action | what must hold |
|---|---|
| install | every pod is ready under its own account, in namespaces that enforce the restricted standard |
| `helm test` | passes; fails with the reason while a tenant cannot be served |
| upgrade | from the values of each earlier version, and to the other mode |
| uninstall | nothing is left but what nobody must lose: the kind and the ledger |
"""

import copy
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from cluster import argo_kinds
from cluster.client import AuditLog, Cluster, Store
from cluster.fixtures import StoreUser
from support.checks.chart import CHART, ROOT, Refused, find_helm, helm, render

from tiphys.store.credentials import CredentialsHolder

if not find_helm():
    pytest.skip("there is no helm on PATH, nor in the cache of the test cluster", allow_module_level=True)

EARLIER_VALUES = sorted((ROOT / "tests" / "cluster" / "values").glob("*.yaml"))
PATIENCE = "--timeout=20m"
NAMED_BY_LABEL = "deploy,svc,sa,secret,cm,role,rolebinding,networkpolicy,pdb,clusterrole,clusterrolebinding"
FOREIGN = (
    "argoproj.io/v1alpha1",
    "cert-manager.io/v1",
    "monitoring.coreos.com/v1",
    "trainer.kubeflow.org/v1alpha1",
)


@dataclass(frozen=True)
class Release:
    """One release in a namespace of its own, for two tenants."""

    cluster: Cluster
    name: str
    home: str
    tenants: tuple[str, str]
    values: Path
    """What this cluster decides: namespaces, store and image."""

    def helm(self, action: str, *arguments: str | Path) -> str:
        """Run a helm command about this release; a failure shows what the pods say."""
        where = [f"--kubeconfig={self.cluster.kubeconfig}", "--namespace", self.home]
        try:
            return helm(action, self.name, *arguments, *where, timeout=3000)
        except Refused as error:
            raise AssertionError(f"helm {action}: {error}\n{self.story()}") from error

    def apply(self, action: str, *settings: str, file: Path | None = None) -> str:
        """Install or upgrade, and wait until all is ready; what this cluster decides wins over ``file``."""
        arguments: list[str | Path] = ["--values", file] if file else []
        arguments += ["--values", self.values]
        arguments += [part for setting in settings for part in ("--set", setting)]
        return self.helm(action, CHART, "--wait", PATIENCE, *arguments)

    def objects(self) -> set[str]:
        """Everything with this release's label."""
        label = f"--selector=app.kubernetes.io/instance={self.name}"
        return set(self.cluster.kubectl("get", NAMED_BY_LABEL, "--all-namespaces", label, "-o", "name").split())

    def may(self, account: str, verb: str, what: str, namespace: str) -> bool:
        """Whether an account of the release may do something, as the API server decides it."""
        who = f"--as=system:serviceaccount:{self.home}:{self.name}-{account}"
        return self.cluster.kubectl("auth", "can-i", verb, what, "-n", namespace, who, check=False).strip() == "yes"

    def refusals(self, began: int) -> list[str]:
        """What the accounts of the release asked for and may not do; ``began`` is a place in the audit log."""
        if not self.cluster.audit_log:
            return []
        users = [f"system:serviceaccount:{self.home}:{self.name}-{account}" for account in ("plugin", "controller")]
        asked = [one for user in users for one in AuditLog(self.cluster.audit_log, began).of(user)]
        return [f"{one['verb']} {one['requestURI']}" for one in asked if one["responseStatus"]["code"] == 403]

    def leader(self, lease: str) -> str:
        found = self.cluster.kubectl(
            "get", "lease", lease, "-n", self.home, "--ignore-not-found", "-o", "jsonpath={.spec.holderIdentity}"
        )
        return found.strip()

    def story(self) -> str:
        pods = self.cluster.kubectl("describe", "pods", "-n", self.home, check=False)
        each = "--selector=app.kubernetes.io/part-of=tiphys"
        logs = self.cluster.kubectl("logs", each, "-n", self.home, "--prefix", "--tail=40", check=False)
        return f"{pods}\n{logs}"


@pytest.fixture
def release(
    cluster: Cluster,
    namespace: str,
    images: dict[str, str],
    cluster_store: Store,
    store_user: StoreUser,
    tmp_path: Path,
) -> Iterator[Release]:
    """Three namespaces that refuse what is not restricted, each with its credentials; nothing installed yet."""
    argo_kinds.ensure(cluster)
    name = f"r{uuid.uuid4().hex[:8]}"
    tenants = (f"{namespace}-a", f"{namespace}-b")
    for tenant in tenants:
        cluster.kubectl("create", "namespace", tenant)
    url = f"s3://{cluster_store.bucket}/{{namespace}}/tiphys"
    users = {namespace: store_user(CredentialsHolder.SERVICES, url)}
    users |= {one: store_user(CredentialsHolder.PROGRAM, url.replace("{namespace}", one)) for one in tenants}
    for each, user in users.items():
        cluster.kubectl("label", "namespace", each, "pod-security.kubernetes.io/enforce=restricted")
        secret = {"name": "tiphys-control" if each == namespace else "tiphys-store"}
        credentials = {"kind": "Secret", "apiVersion": "v1", "metadata": secret}
        cluster.apply({**credentials, "stringData": user.environment}, namespace=each)
    repository, _, tag = images["tiphys"].rpartition(":")
    values = {
        "namespaces": list(tenants),
        "store": {"url": url},
        "image": {"repository": repository, "tag": tag},
    }
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    made = Release(cluster, name, namespace, tenants, file)
    yield made
    if made.objects():
        made.helm("uninstall", "--wait", PATIENCE)
    for tenant in tenants:
        cluster.kubectl("delete", "namespace", tenant, "--wait=false")


@pytest.mark.parametrize("mode", ["sidecar", "agent"])
def test_an_installation_becomes_ready_and_is_removed_again(release: Release, mode: str) -> None:
    began = release.cluster.audit_log.stat().st_size if release.cluster.audit_log else 0
    notes = release.apply("install", f"mode={mode}")
    assert "DEFAULT_REQUEUE_TIME" in notes
    release.helm("test", "--logs", PATIENCE)
    leases = ["tiphys-controller", *(["tiphys-agent"] if mode == "agent" else [])]
    for lease in leases:
        release.cluster.wait(f"somebody leads by {lease}", lambda lease=lease: release.leader(lease))  # type: ignore[misc]
    assert release.refusals(began) == []
    release.helm("uninstall", "--wait", PATIENCE)
    release.cluster.wait("everything is gone", lambda: not release.objects())
    assert "gpuledgers.tiphys.dev" in release.cluster.kubectl("get", "crd", "-o", "name")


def test_the_pages_of_each_tenant_are_served(release: Release, store_user: StoreUser) -> None:
    """By the API server, whose name its proxy hands on: the policy admits nobody else."""
    began = release.cluster.audit_log.stat().st_size if release.cluster.audit_log else 0
    server = release.cluster.kubectl("config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}")
    names = f"ui.allowedHosts={{{urlsplit(server).hostname}}}"
    release.apply("install", "ui.enabled=true", "nodes.observe=true", "ui.storeSecret=tiphys-control", names)
    ledgers = ("get", "gpuledgers.tiphys.dev", "-n", release.home, "-o", "name")
    release.cluster.wait("there is a ledger", lambda: release.cluster.kubectl(*ledgers))
    pods = f"/api/v1/namespaces/{release.home}/pods"

    def read(path: str) -> str:
        return release.cluster.kubectl("get", "--raw", path)

    for tenant in release.tenants:
        (pod,) = json.loads(read(f"{pods}?labelSelector=tiphys.dev/shows%3D{tenant}"))["items"]
        pages = f"{pods}/{pod['metadata']['name']}:8321/proxy"
        assert f"{tenant}/tiphys" in read(f"{pages}/")
        assert "no queues are declared" in read(f"{pages}/queues")
        assert "<h1>Nodes" in read(f"{pages}/nodes")
    account = f"system:serviceaccount:{release.home}:{release.name}-ui"
    if release.cluster.audit_log:
        asked = AuditLog(release.cluster.audit_log, began).of(account)
        assert [one["requestURI"] for one in asked if one["responseStatus"]["code"] == 403] == []
        assert {one["verb"] for one in asked} <= {"get", "list"}


def test_argo_finds_the_tokens_that_it_looks_for(release: Release) -> None:
    release.apply("install")
    for tenant in release.tenants:
        for account in ("tiphys-workflow", "tiphys-executor", "tiphys-executor-plugin"):
            name = f"{account}.service-account-token"

            def token(name: str = name, tenant: str = tenant) -> bool:
                found = release.cluster.get("secret", name, namespace=tenant)
                return {"token", "ca.crt", "namespace"} <= found.get("data", {}).keys()

            release.cluster.wait(f"{name} holds a token", token)


def test_no_account_reaches_further_than_its_namespaces(release: Release) -> None:
    release.apply("install")
    for tenant in release.tenants:
        assert release.may("plugin", "get", "workflows.argoproj.io", tenant)
        for account in ("plugin", "controller"):
            assert release.may(account, "delete", "pods", tenant)
    for account in ("plugin", "controller"):
        for namespace in ("default", "kube-system"):
            assert not release.may(account, "get", "workflows.argoproj.io", namespace)
            for verb in ("list", "delete"):
                assert not release.may(account, verb, "pods", namespace)
        for namespace in (release.home, *release.tenants):
            assert not release.may(account, "get", "secrets", namespace)
            assert not release.may(account, "create", "pods", namespace)


def test_helm_test_says_which_tenant_cannot_be_served(release: Release) -> None:
    release.apply("install", "store.url=s3://no-such-bucket-here/{namespace}/tiphys")
    with pytest.raises(AssertionError, match=release.name):
        release.helm("test", PATIENCE)


@pytest.mark.parametrize("file", EARLIER_VALUES, ids=lambda file: file.stem)
def test_an_upgrade_from_earlier_values_goes_on_with_the_same_release(release: Release, file: Path) -> None:
    release.apply("install", file=file)
    before = release.objects()
    release.apply("upgrade", "plugin.podAnnotations.note=changed", file=file)
    release.helm("test", PATIENCE)
    assert release.objects() == before


def test_an_upgrade_to_the_other_mode_leaves_nothing_of_the_first(release: Release) -> None:
    release.apply("install")
    release.apply("upgrade", "mode=agent")
    ours = {f"service/{release.name}-pods", "service/tiphys-members"}

    def only_ours() -> bool:
        return {one for one in release.objects() if "executor-plugin" in one or one.startswith("service/")} == ours

    release.cluster.wait("the sidecar and its service are gone", only_ours)
    assert not release.may("plugin", "create", "tokenreviews.authentication.k8s.io", release.home)
    release.helm("test", PATIENCE)


@pytest.mark.parametrize("form", ["tenants", "agent"])
def test_the_api_server_knows_every_field(cluster: Cluster, namespace: str, form: str) -> None:
    """All but the kinds of others, with everything that can be switched on; nothing is kept."""
    rendered = copy.deepcopy(render(file=CHART / "ci" / f"{form}-values.yaml"))
    known = [one for one in rendered if one["apiVersion"] not in FOREIGN]
    for one in known:
        if "namespace" in one["metadata"]:
            one["metadata"]["namespace"] = namespace
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": known})
    cluster.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", text=text)
