"""Which cluster a command talks to, chosen by the flags that kubectl has.

The Kubernetes client takes most of a second to import, so it is loaded only
once a command really connects.
"""

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


def connect(kubeconfig: Path | None, context: str | None, namespace: str | None) -> "KubeApi":
    """Connect to the cluster that the options name; ``namespace`` of the answer is what ``-n`` says, if anything.

    Raises:
        UsageError: there is no such cluster, or the kubeconfig is wrong.
    """
    from tiphys import kube

    api = kube.connect(kubeconfig, context)
    api.namespace = namespace or api.namespace
    return api
