"""Builds the plugin of a cluster: one API server, one ledger, one core per namespace, and the node tasks.

The service behind the sidecars and the shared agent are two entry points to the
same plugin, so both build it here.
"""

from dataclasses import dataclass
from enum import StrEnum

from tiphys.kube import KubeApi, identify_cluster
from tiphys.kube.resources import DEFAULT_LEDGER_NAME
from tiphys.records import utc_now
from tiphys.store import TenantStores
from tiphys_plugin.cluster.kubernetes_cluster import KubernetesCluster
from tiphys_plugin.eviction.image_pulls import ImagePullSweep
from tiphys_plugin.nodes.evacuate import NodeEvacuation
from tiphys_plugin.nodes.metrics import NodesCollector
from tiphys_plugin.nodes.node_watch import ClusterInventory
from tiphys_plugin.nodes.straggler_watch import StragglerDetection
from tiphys_plugin.operations.pending_sweep import PendingRequestSweep, StoppedLeaseSweep
from tiphys_plugin.quota.kueue.backend import KueueAdmission
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.runtime.settings import IMAGE_PULL_TIMEOUT_SECONDS, PluginSettings
from tiphys_plugin.server.kueue_upkeep import KueueUpkeep
from tiphys_plugin.server.ledger_recovery import LedgerRecovery
from tiphys_plugin.server.lost_nodes import LostNodeSweep
from tiphys_plugin.server.tenants import Tenants


class LedgerKind(StrEnum):
    """The authority that grants GPUs in an installation."""

    TIPHYS = "tiphys"
    """The queues of a `GPULedger`."""
    KUEUE = "kueue"
    """The LocalQueues of Kueue."""


@dataclass(frozen=True)
class DeploymentSettings:
    """Settings of one release of the chart."""

    store_url: str
    """URL of the store; ``{namespace}`` in it is replaced by the namespace of each tenant."""
    namespaces: tuple[str, ...] | None
    """Served namespaces; None for all of the cluster."""
    ledger_kind: LedgerKind = LedgerKind.TIPHYS
    ledger_name: str = DEFAULT_LEDGER_NAME
    release_namespace: str = ""
    """Namespace of the GPULedger and the Lease objects; empty for the namespace of this pod."""
    image_pull_timeout_seconds: float = IMAGE_PULL_TIMEOUT_SECONDS
    """How long the image of an attempt with GPUs may fail to be pulled before the attempt is ended."""


def build_tenants(api: KubeApi, deployment: DeploymentSettings, settings: PluginSettings | None = None) -> Tenants:
    """Build the plugin, start its background tasks, and record the leases of live attempts that the ledger lacks.

    Raises:
        UsageError: the store's URL, or the choice of namespaces, is wrong.
        StoreFormatError: another version of Tiphys wrote a store.
        StoreError: the API server does not answer, or this account lacks a permission.
    """
    stores = TenantStores(deployment.store_url, deployment.namespaces)
    stores.check_formats()
    cluster = KubernetesCluster(api, deployment.namespaces, identify_cluster(api))
    nodes = ClusterInventory(api)
    namespace = deployment.release_namespace or api.namespace
    ledger: KubernetesLedger | KueueAdmission
    if deployment.ledger_kind is LedgerKind.KUEUE:
        ledger = KueueAdmission(api, deployment.namespaces)
    else:
        ledger = KubernetesLedger(api, namespace, deployment.ledger_name, rules=nodes.resolve_rules)
    tenants = Tenants(stores, cluster, ledger, settings)
    tenants.registry.register(api.unreadable)
    tenants.registry.register(NodesCollector(lambda: nodes.observed_nodes))
    tenants.background.enter_context(nodes)
    tenants.background.enter_context(NodeEvacuation(ledger, cluster, stores, nodes))
    tenants.background.enter_context(LostNodeSweep(api, cluster, tenants, nodes))
    tenants.background.enter_context(
        ImagePullSweep(ledger, cluster, stores, timeout_seconds=deployment.image_pull_timeout_seconds)
    )
    tenants.background.enter_context(PendingRequestSweep(ledger, cluster, stores))
    tenants.background.enter_context(StoppedLeaseSweep(ledger, cluster, stores))
    tenants.background.enter_context(StragglerDetection(ledger, cluster, stores, nodes, utc_now))
    if isinstance(ledger, KueueAdmission):
        tenants.background.enter_context(KueueUpkeep(ledger, tenants))
    else:
        tenants.background.enter_context(LedgerRecovery(ledger, tenants))
    return tenants
