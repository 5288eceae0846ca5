"""Which cluster a command talks to, chosen by the flags that kubectl has.

The Kubernetes client takes most of a second to import, so it is loaded only
once a command really connects.

Which store a command means, and why that one.

``-p name=value``: workflow parameters, given on the command line.

The pipeline in a file that a person names.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hera_pipelines.cli.screen import Screen
from tiphys.errors import UsageError
from tiphys.protocol import environment
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.store import Store, open_store

if TYPE_CHECKING:
    from hera_pipelines.authoring.loading import AnyPipeline
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


DEFAULT_STORE = Path(".tiphys/store")
DEFAULT_STATE = Path(".tiphys/state")
_OPTION, _PIPELINE, _DEFAULT = "--store", "the pipeline", "the default"

_WHERE = "s3://bucket/prefix, file:///dir or a path. Otherwise the variable TIPHYS_STORE, otherwise "
_HERE = ".tiphys/store in the working directory."
StoreOption = Annotated[str | None, typer.Option(_OPTION, metavar="URL", help=f"{_WHERE}{_HERE}", show_default=False)]
WritingStoreOption = Annotated[
    str | None,
    typer.Option(
        _OPTION, metavar="URL", help=f"{_WHERE}what the pipeline names, otherwise {_HERE}", show_default=False
    ),
]


def existing_store(screen: Screen, given: str | None) -> Store:
    """The store to read; `NotFoundError` if there is none at that place."""
    return open_store(_choose(screen, given, ""), must_exist=True)


def store_for_writing(screen: Screen, given: str | None, pipeline: str = "") -> Store:
    """The store to write; a directory is made if it is missing. ``pipeline`` is what the file asks for."""
    return open_store(_choose(screen, given, pipeline))


def must_be_named(given: str | None, pipeline: str = "") -> bool:
    """Whether a later command finds this store only by ``--store``."""
    _, source = _chosen(given, pipeline)
    return source in (_OPTION, _PIPELINE)


def is_named(given: str | None, pipeline: str = "") -> bool:
    """Whether anything names a store, so that it is not a folder of this working directory."""
    _, source = _chosen(given, pipeline)
    return source != _DEFAULT


def _choose(screen: Screen, given: str | None, pipeline: str) -> str:
    url, source = _chosen(given, pipeline)
    screen.note(f"store {url} (from {source})")
    return url


def _chosen(given: str | None, pipeline: str) -> tuple[str, str]:
    """URL of the store, and what said so."""
    choices = (
        (given, _OPTION),
        (os.environ.get(environment.STORE), environment.STORE),
        (pipeline, _PIPELINE),
        (str(Path.cwd() / DEFAULT_STORE), _DEFAULT),
    )
    return next((url, source) for url, source in choices if url)


ParameterOption = Annotated[
    list[str] | None,
    typer.Option("--parameter", "-p", metavar="NAME=VALUE", help="Value of a workflow parameter; may be repeated."),
]


def parse(given: Sequence[str]) -> dict[str, str]:
    """Names and values; `UsageError` for what is not ``name=value``."""
    values = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"parameter {text!r} is not NAME=VALUE; write, for example, -p lr=0.1")
        values[name] = value
    return values


def with_parameters(manifest: Manifest, values: Mapping[str, str]) -> Manifest:
    """``manifest`` (a Workflow or CronWorkflow) with these values in force; the others keep theirs.

    Raises:
        UsageError: the workflow has no such parameter.
    """
    filled = deepcopy(manifest)
    declared = _declared(filled)
    names = [parameter["name"] for parameter in declared]
    if unknown := sorted(set(values) - set(names)):
        raise UsageError(f"the pipeline has no parameter {unknown[0]!r}; it has: {', '.join(_own(names)) or 'none'}")
    for parameter in declared:
        if parameter["name"] in values:
            parameter["value"] = values[parameter["name"]]
    return filled


def require_values(manifest: Manifest) -> None:
    """Raise `UsageError` for a parameter that nobody gives a value: Argo would refuse it too, but later."""
    for parameter in _declared(manifest):
        if parameter.get("value") is None and not parameter.get("valueFrom"):
            raise UsageError(f"parameter {parameter['name']!r} has no value; give one with -p {parameter['name']}=…")


def _declared(manifest: Manifest) -> list[Manifest]:
    spec = manifest["spec"].get("workflowSpec", manifest["spec"])
    declared: list[Manifest] = (spec.get("arguments") or {}).get("parameters") or []
    return declared


def _own(names: Sequence[str]) -> list[str]:
    return [name for name in names if not name.startswith("tiphys-")]


PipelineOption = Annotated[
    str | None, typer.Option("--pipeline", metavar="NAME", help="Which pipeline, where the file defines several.")
]

ExecutorPluginOption = Annotated[
    Path | None,
    typer.Option(
        "--executor-plugin",
        metavar="FILE",
        help="Have the Workflow bring this executor plugin along (YAML of the ConfigMap tiphys-executor-plugin or of "
        "an ExecutorPlugin), for an Argo with ARGO_WORKFLOW_LEVEL_EXECUTOR_PLUGINS=true.",
    ),
]


def load(file: Path, name: str | None) -> "AnyPipeline":
    """Like `hera_pipelines.load_pipeline`; what the file prints goes to stderr, since stdout is for data."""
    from hera_pipelines import load_pipeline  # imports Hera, for which no other command should wait

    with redirect_stdout(sys.stderr):
        return load_pipeline(file, name)
