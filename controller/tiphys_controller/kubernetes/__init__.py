"""The controller on a Kubernetes cluster: the only part that calls the Kubernetes API."""

from tiphys_controller.kubernetes.kubernetes_submitter import KubernetesSubmitter

__all__ = ["KubernetesSubmitter"]
