"""The controller on a Kubernetes cluster: the only part of it that needs the Kubernetes client."""

from tiphys_controller.kubernetes.submitter import KubernetesSubmitter

__all__ = ["KubernetesSubmitter"]
