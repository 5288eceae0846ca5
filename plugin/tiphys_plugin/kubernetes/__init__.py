"""The cluster, seen through the API server."""

from tiphys_plugin.kubernetes.authentication import ReviewedTokens
from tiphys_plugin.kubernetes.cluster import KubernetesCluster
from tiphys_plugin.kubernetes.judging import pod_status

__all__ = ["KubernetesCluster", "ReviewedTokens", "pod_status"]
