"""Workflows through an argo-server, for whoever is let to that and not to the API server behind it."""

from tiphys_controller.argo_server.connection import ArgoServer, argo_server
from tiphys_controller.argo_server.submitter import ArgoServerSubmitter

__all__ = ["ArgoServer", "ArgoServerSubmitter", "argo_server"]
