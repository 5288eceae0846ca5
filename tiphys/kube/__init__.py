"""The Kubernetes API as Tiphys uses it: objects as they are on the wire, watches, and one leader at a time.

The plugin and the controller both need it and never import each other, so it
lies below them. Nothing else in `tiphys` imports it: training images have no
Kubernetes client.
"""

from tiphys.kube.api import KubeApi, Listing, Object, Patch
from tiphys.kube.kubeconfig import cluster_name, connect
from tiphys.kube.leader_election import LeaderLease
from tiphys.kube.resources import Resource
from tiphys.kube.watch import Change, ChangeType, Synced, changes

__all__ = [
    "Change",
    "ChangeType",
    "KubeApi",
    "LeaderLease",
    "Listing",
    "Object",
    "Patch",
    "Resource",
    "Synced",
    "changes",
    "cluster_name",
    "connect",
]
