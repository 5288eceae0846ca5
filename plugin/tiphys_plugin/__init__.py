"""The service that answers Argo's plugin steps: admission, checkpoint lineage, GPU quotas.

Names are imported when they are first used (PEP 562), because the sidecar lives
in this package too, and every agent pod would pay for what only the service needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiphys_plugin.cluster.interface import Cluster, DirectoryCluster, PodStatus
    from tiphys_plugin.core import PluginCore
    from tiphys_plugin.quota.lease import AdmissionBackend
    from tiphys_plugin.quota.ledger.backend import MemoryLedger
    from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger
    from tiphys_plugin.quota.queues import Queues, load_queues
    from tiphys_plugin.runtime.settings import LOCAL, Settings
    from tiphys_plugin.server.app import PluginServer

__all__ = [
    "LOCAL",
    "AdmissionBackend",
    "Cluster",
    "DirectoryCluster",
    "MemoryLedger",
    "PluginCore",
    "PluginServer",
    "PodStatus",
    "Queues",
    "Settings",
    "SqliteLedger",
    "load_queues",
]

_HOMES = {
    "cluster.interface": ("Cluster", "DirectoryCluster", "PodStatus"),
    "core": ("PluginCore",),
    "quota.lease": ("AdmissionBackend",),
    "quota.ledger.backend": ("MemoryLedger",),
    "quota.ledger.sqlite_ledger": ("SqliteLedger",),
    "quota.queues": ("Queues", "load_queues"),
    "server.app": ("PluginServer",),
    "runtime.settings": ("LOCAL", "Settings"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"tiphys_plugin.{module}"), name)
    raise AttributeError(f"module 'tiphys_plugin' has no attribute {name!r}")
