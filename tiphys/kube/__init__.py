"""Kubernetes client: objects as parsed JSON, watches, and leader election.

Plugin and controller both use this package and never import each other, so it is
part of `tiphys`. No other package of `tiphys` imports it: training images
contain no Kubernetes client.
"""

from tiphys.kube.api import KubeApi, Object, ObjectList, PatchType
from tiphys.kube.kubeconfig import connect_to_cluster, identify_cluster
from tiphys.kube.leader_election import LeaderElector, require_leadership
from tiphys.kube.resources import Resource
from tiphys.kube.watch import ListSnapshot, WatchEvent, WatchEventType, watch_objects

__all__ = [
    "KubeApi",
    "LeaderElector",
    "ListSnapshot",
    "Object",
    "ObjectList",
    "PatchType",
    "Resource",
    "WatchEvent",
    "WatchEventType",
    "connect_to_cluster",
    "identify_cluster",
    "require_leadership",
    "watch_objects",
]
