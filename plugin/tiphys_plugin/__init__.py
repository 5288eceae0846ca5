"""The service that answers Argo's plugin steps: admission, checkpoint lineage, GPU quotas.

Names are imported when they are first used (PEP 562), because the sidecar lives
in this package too, and every agent pod would pay for what only the service needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiphys_plugin.cluster import Cluster, DirectoryCluster, PodStatus
    from tiphys_plugin.core import PluginCore
    from tiphys_plugin.ledger import AdmissionBackend
    from tiphys_plugin.ledger.memory import MemoryLedger
    from tiphys_plugin.ledger.sqlite import SqliteLedger
    from tiphys_plugin.queues import Queues, load_queues
    from tiphys_plugin.server import PluginServer
    from tiphys_plugin.settings import LOCAL, Settings

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
    "cluster": ("Cluster", "DirectoryCluster", "PodStatus"),
    "core": ("PluginCore",),
    "ledger": ("AdmissionBackend",),
    "ledger.memory": ("MemoryLedger",),
    "ledger.sqlite": ("SqliteLedger",),
    "queues": ("Queues", "load_queues"),
    "server": ("PluginServer",),
    "settings": ("LOCAL", "Settings"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"tiphys_plugin.{module}"), name)
    raise AttributeError(f"module 'tiphys_plugin' has no attribute {name!r}")
