"""The service that answers Argo's plugin steps: admission, checkpoint lineage, GPU quotas."""

from tiphys_plugin.cluster import Cluster, DirectoryCluster, PodStatus
from tiphys_plugin.core import PluginCore
from tiphys_plugin.ledger import AdmissionBackend, SqliteLedger
from tiphys_plugin.queues import Queues, load_queues
from tiphys_plugin.server import PluginServer
from tiphys_plugin.settings import LOCAL, Settings

__all__ = [
    "LOCAL",
    "AdmissionBackend",
    "Cluster",
    "DirectoryCluster",
    "PluginCore",
    "PluginServer",
    "PodStatus",
    "Queues",
    "Settings",
    "SqliteLedger",
    "load_queues",
]
