"""The plugin of a cluster, put together: one API server, one ledger, a core for each namespace.

The service of sidecar mode and the shared agent are two ways into the same
thing, and both build it here.
"""

from dataclasses import dataclass

from tiphys.kube import KubeApi, cluster_name
from tiphys.kube.resources import LEDGER_NAME
from tiphys.records import utc_now
from tiphys.store import TenantStores
from tiphys_plugin.cluster.kubernetes_cluster import KubernetesCluster
from tiphys_plugin.nodes.evacuate import Evacuation
from tiphys_plugin.nodes.metrics import NodesCollector
from tiphys_plugin.nodes.node_watch import ClusterInventory
from tiphys_plugin.nodes.straggler_watch import Straggling
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.runtime.settings import Settings
from tiphys_plugin.server.tenants import Tenants


@dataclass(frozen=True)
class Installation:
    """What one release of the chart serves."""

    store: str
    """URL of the store; ``{namespace}`` in it keeps tenants apart."""
    namespaces: tuple[str, ...] | None
    """None: all of the cluster."""
    ledger: str = LEDGER_NAME
    """Name of the `GPULedger`."""
    release_namespace: str = ""
    """Where ledger and Leases live; empty: the namespace of this pod."""


def build(api: KubeApi, installation: Installation, settings: Settings | None = None) -> Tenants:
    """Build the core of each namespace, and record the leases of live attempts that the ledger does not know.

    Raises:
        UsageError: the store's URL, or the choice of namespaces, is wrong.
        StoreError: the API server does not answer, or does not let this account see what it needs.
    """
    stores = TenantStores(installation.store, installation.namespaces)
    cluster = KubernetesCluster(api, installation.namespaces, cluster_name(api))
    nodes = ClusterInventory(api)
    namespace = installation.release_namespace or api.namespace
    ledger = KubernetesLedger(api, namespace, installation.ledger, rules=nodes.rules)
    tenants = Tenants(stores, cluster, ledger, settings)
    tenants.registry.register(NodesCollector(lambda: nodes.seen))
    tenants.background.enter_context(nodes)
    tenants.background.enter_context(Evacuation(ledger, cluster, stores.serves, nodes))
    tenants.background.enter_context(Straggling(ledger, cluster, stores, nodes, utc_now))
    tenants.recover()
    return tenants
