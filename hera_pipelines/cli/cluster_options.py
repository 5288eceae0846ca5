"""Which cluster a command talks to, chosen by the flags that kubectl has.

The Kubernetes client takes most of a second to import, so it is loaded only
once a command really connects.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tiphys.kube import KubeApi

ContextOption = Annotated[
    str | None,
    typer.Option(
        "--context", metavar="NAME", help="Context of the kubeconfig. Otherwise its current one.", show_default=False
    ),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "-n", "--namespace", metavar="NAME", help="Namespace. Otherwise that of the context.", show_default=False
    ),
]
KubeconfigOption = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig",
        metavar="FILE",
        help="Otherwise the variable KUBECONFIG, otherwise ~/.kube/config; in a pod its service account.",
        show_default=False,
    ),
]
ArgoServerOption = Annotated[
    str | None,
    typer.Option(
        "--argo-server",
        metavar="HOST:PORT",
        envvar="ARGO_SERVER",
        show_envvar=False,
        help="Workflows through this argo-server. Otherwise the variable ARGO_SERVER; ARGO_TOKEN and the others of "
        "Argo's own command are read, too. Without one, through the API server.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class Where:
    """The cluster that the options name."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None
    argo_server: str | None = None

    def connect(self) -> "KubeApi":
        """Connect to its API server; raises as `connect`."""
        return connect(self.kubeconfig, self.context, self.namespace)

    @property
    def words(self) -> tuple[str, ...]:
        """The options by which a later command, as a person types it, finds the cluster again."""
        given = os.environ.get("ARGO_SERVER") != self.argo_server
        options = (
            ("--argo-server", self.argo_server if given else None),
            ("--context", self.context),
            ("--kubeconfig", self.kubeconfig),
        )
        return tuple(word for option, value in options if value for word in (option, str(value)))


def connect(kubeconfig: Path | None, context: str | None, namespace: str | None) -> "KubeApi":
    """Connect to the cluster that the options name; ``namespace`` of the answer is what ``-n`` says, if anything.

    Raises:
        UsageError: there is no such cluster, or the kubeconfig is wrong.
    """
    from tiphys import kube

    api = kube.connect(kubeconfig, context)
    api.namespace = namespace or api.namespace
    return api
