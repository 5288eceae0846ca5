"""The controller on a Kubernetes cluster: the only part of it that needs the Kubernetes client."""

from tiphys_controller.kubernetes.kubernetes_submitter import KubernetesSubmitter

__all__ = ["KubernetesSubmitter"]
