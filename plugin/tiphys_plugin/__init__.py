"""The service that answers Argo's plugin steps: admission, checkpoint lineage, GPU quotas.

Names are imported on first use (PEP 562). The sidecar is part of this package,
and every agent pod would otherwise load what only the service needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiphys_plugin.cluster.interface import Cluster, DirectoryCluster, PodStatus
    from tiphys_plugin.core import PluginCore
    from tiphys_plugin.quota.admission_backend import AdmissionBackend
    from tiphys_plugin.quota.ledger.backend import MemoryLedger
    from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger
    from tiphys_plugin.quota.queues import Queues, load_queues
    from tiphys_plugin.runtime.settings import LOCAL_SETTINGS, PluginSettings
    from tiphys_plugin.server.app import PluginServer

_HOMES = {
    "cluster.interface": ("Cluster", "DirectoryCluster", "PodStatus"),
    "core": ("PluginCore",),
    "quota.admission_backend": ("AdmissionBackend",),
    "quota.ledger.backend": ("MemoryLedger",),
    "quota.ledger.sqlite_ledger": ("SqliteLedger",),
    "quota.queues": ("Queues", "load_queues"),
    "server.app": ("PluginServer",),
    "runtime.settings": ("LOCAL_SETTINGS", "PluginSettings"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"tiphys_plugin.{module}"), name)
    raise AttributeError(f"module 'tiphys_plugin' has no attribute {name!r}")
