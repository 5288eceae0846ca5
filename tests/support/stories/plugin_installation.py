"""The plugin of a whole cluster over an API server for tests: namespaces, their workflows, what callers ask."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiphys_plugin.server.tenants import Tenants
from tiphys_plugin.server.wiring import DeploymentSettings, LedgerKind, build_tenants

from support.builders.argo_pods import pod
from support.builders.ledger import queues, spec
from support.servers import kube_server
from support.servers.kube_server import KubeServer
from support.stories.plugin import QUICK, Flow, workflow
from tiphys.kube.resources import GPU_LEDGERS, PODS, WORKFLOWS
from tiphys.protocol.execute_api import ExecuteReply
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL, STORE_ANNOTATION, StepSpec
from tiphys.store import DirectoryStore, Store

RELEASE = "tiphys"
QUOTA = {"research": {"A100": 8}}


@dataclass
class Site:
    """Two namespaces, ``ml`` and ``vision``, and what serves them."""

    root: Path
    server: KubeServer
    namespaces: tuple[str, ...] | None = ("ml", "vision")
    ledger_kind: LedgerKind = LedgerKind.TIPHYS
    tenants: Tenants = field(init=False)

    def __post_init__(self) -> None:
        self.api = self.server.api(RELEASE)
        for namespace in ("ml", "vision"):
            self.server.add_namespace(namespace)
        self.make_ledger()
        self.start()

    def make_ledger(self) -> None:
        body = {"metadata": {"name": "default"}, "spec": spec(queues(**QUOTA))}
        self.api.create(GPU_LEDGERS, RELEASE, body)

    def lose_ledger(self) -> None:
        self.api.delete(GPU_LEDGERS, RELEASE, "default")
        self.make_ledger()

    @property
    def store_url(self) -> str:
        return f"file://{self.root}/stores/{{namespace}}"

    def start(self) -> Tenants:
        """The service, as if it had just been started; the one before is gone."""
        if hasattr(self, "tenants"):
            self.tenants.close()
        deployment = DeploymentSettings(
            self.store_url, self.namespaces, ledger_kind=self.ledger_kind, release_namespace=RELEASE
        )
        self.tenants = build_tenants(self.api, deployment, QUICK)
        return self.tenants

    def store(self, namespace: str) -> Store:
        return DirectoryStore(self.root / "stores" / namespace)

    def break_store(self, namespace: str) -> None:
        """Put a file where the folder of the store would be."""
        self.root.joinpath("stores").mkdir(parents=True, exist_ok=True)
        self.root.joinpath("stores", namespace).write_text("in the way")

    def mend_store(self, namespace: str) -> None:
        self.root.joinpath("stores", namespace).unlink()

    def submit(
        self, namespace: str, *specs: StepSpec, name: str = "digits-abc12", store: str | None = None
    ) -> "Submitted":
        body = workflow(list(specs), name)
        url = self.store_url.replace("{namespace}", namespace) if store is None else store
        body["metadata"] = {
            "name": name,
            "annotations": {**body["metadata"]["annotations"], STORE_ANNOTATION: url},
        }
        made = self.api.create(WORKFLOWS, namespace, body)
        return Submitted(self, namespace, name, made["metadata"]["uid"])


@dataclass
class Submitted:
    """One workflow, and the calls that are made about it."""

    site: Site
    namespace: str
    name: str
    uid: str

    def document(self, op: str, step: str, retry: int | None = None, **fields: Any) -> dict[str, Any]:
        flow = Flow(None, self.name, self.uid)  # type: ignore[arg-type]  # only its words are needed
        document = flow.document(flow.body(op, step, retry, **fields))
        document["workflow"]["metadata"]["namespace"] = self.namespace
        return document

    def call(self, op: str, step: str, retry: int | None = None, **fields: Any) -> ExecuteReply:
        return self.site.tenants.execute(self.namespace, self.document(op, step, retry, **fields))

    def run_pod(self, step: str, attempt: int = 1, gpus: int | str = 8, phase: str = "Running", host: str = "") -> None:
        """A pod of the attempt on node ``host``, which requests ``gpus`` GPUs."""
        labels = {ATTEMPT_LABEL: str(attempt), RUN_LABEL: self.name, STEP_LABEL: step}
        node = f"{self.name}.{step}({attempt - 1}).run"
        names = {"name": f"{self.name}-{step}-{attempt}", "namespace": self.namespace, "node": node}
        body = pod(**names, phase=phase, workflow=self.name, uid=self.uid, labels=labels)
        body["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
        body["spec"] |= {"nodeName": host} if host else {}
        self.site.api.create(PODS, self.namespace, body)


@contextmanager
def site(
    root: Path, namespaces: tuple[str, ...] | None = ("ml", "vision"), ledger_kind: LedgerKind = LedgerKind.TIPHYS
):
    with kube_server.serving() as server:
        here = Site(root, server, namespaces, ledger_kind)
        try:
            yield here
        finally:
            here.tenants.close()
