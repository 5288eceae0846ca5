"""Options that several commands share: the cluster, the store, workflow parameters, and the pipeline file.

Cluster options have the names that kubectl uses. The Kubernetes client and Hera
are imported only when a command uses them, because each takes a noticeable part
of a second.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

import typer

from hera_pipelines.cli.screen import Format, Screen
from tiphys.errors import TiphysError, UsageError, unknown_name_message
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol import environment
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.store import Store, is_bucket_url, list_runs, open_store

if TYPE_CHECKING:
    from hera_pipelines.authoring.loading import AnyPipeline
    from tiphys.kube import KubeApi


_named = partial(typer.Option, metavar="NAME", show_default=False)
"""An option with a name, whose help says where it comes from by default."""

ContextOption = Annotated[
    str | None, _named("--context", help="Context of the kubeconfig. Default: its current context.")
]
NamespaceOption = Annotated[str | None, _named("-n", "--namespace", help="Namespace. Default: that of the context.")]
InstallationOption = Annotated[
    str | None, _named("-n", "--namespace", help="Namespace that Tiphys is installed in. Default: that of the context.")
]
KubeconfigOption = Annotated[
    Path | None,
    _named(
        "--kubeconfig",
        metavar="FILE",
        help="Kubeconfig file. Default: the variable KUBECONFIG, then ~/.kube/config; in a pod, its service account.",
    ),
]
ArgoServerOption = Annotated[
    str | None,
    _named(
        "--argo-server",
        metavar="HOST:PORT",
        envvar="ARGO_SERVER",
        show_envvar=False,
        help="Access Workflows through this argo-server. Default: the variable ARGO_SERVER; ARGO_TOKEN and the other "
        "variables of the argo command apply too. Without an argo-server, the API server is used.",
    ),
]


_AnyFormat = TypeVar("_AnyFormat", bound=str)


def choose_format(command: typer.Context, output: _AnyFormat) -> _AnyFormat:
    """Return the format of ``-o``; ``wide`` is a table that the screen prints whole."""
    if output != Format.WIDE:
        return output
    if command.obj is not None:  # None while a shell asks for completions
        command.obj.wide = True
    return type(output)(Format.TABLE.value)


FormatOption = Annotated[
    Format,
    typer.Option(
        "-o", "--format", callback=choose_format, help="Output format; wide is a table with all columns, uncut."
    ),
]


CommandT = TypeVar("CommandT", bound=Callable[..., None])


def with_option_groups(command: CommandT) -> CommandT:
    """Replace each parameter of a command that is a dataclass by the options that its fields declare.

    Typer reads options from the signature of a function, and has no groups of them. ``Annotated[Group, "name", …]``
    takes these fields of the group alone; the others keep their defaults.
    """
    signature = inspect.signature(command, eval_str=True)
    groups, options = dict[str, Any](), dict[str, list[inspect.Parameter]]()
    for name, parameter in signature.parameters.items():
        annotated = get_args(parameter.annotation) if get_origin(parameter.annotation) is Annotated else ()
        group, *chosen = annotated or (parameter.annotation,)
        options[name] = [parameter]
        if is_dataclass(group):
            groups[name] = group
            options[name] = [option for option in _list_options(group) if not chosen or option.name in chosen]

    @wraps(command)
    def run(**values: Any) -> None:
        arguments = {name: {option.name: values[option.name] for option in options[name]} for name in options}
        command(**{n: _build_group(groups[n], own) if n in groups else own[n] for n, own in arguments.items()})

    parameters = [
        option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in chain.from_iterable(options.values())
    ]
    described: Any = run
    described.__signature__ = signature.replace(parameters=parameters)
    described.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return cast("CommandT", run)


def _list_options(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for each in fields(group):
        hint = hints[each.name]
        if is_dataclass(hint):
            yield from _list_options(hint)
        elif get_origin(hint) is Annotated:
            yield inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hint)


def _build_group(group: Any, values: Mapping[str, Any]) -> Any:
    hints = get_type_hints(group)
    built = {name: _build_group(hint, values) for name, hint in hints.items() if is_dataclass(hint)}
    return group(**built, **{each.name: values[each.name] for each in fields(group) if each.name in values})


class _Connection:
    """The cluster of options that name one."""

    kubeconfig: Path | None
    context: str | None
    namespace: str | None

    def connect(self, command: typer.Context | None = None) -> "KubeApi":
        """Connect to the API server of the cluster; the connection ends with ``command``, if that is given.

        Raises:
            UsageError: the kubeconfig is invalid or has no such context.
        """
        from tiphys import kube

        api = kube.connect_to_cluster(self.kubeconfig, self.context)
        api.namespace = self.namespace or api.namespace
        if command is not None:
            command.call_on_close(api.close)
        return api


@dataclass(frozen=True)
class ClusterOptions(_Connection):
    """A cluster, and a namespace of Workflows in it."""

    kubeconfig: KubeconfigOption = None
    context: ContextOption = None
    namespace: NamespaceOption = None
    argo_server: ArgoServerOption = None

    @property
    def is_given(self) -> bool:
        """Whether an option names the cluster or the namespace."""
        return bool(self.context or self.namespace or self.kubeconfig)

    @property
    def command_arguments(self) -> tuple[str, ...]:
        """The options that a later command needs to reach the same cluster."""
        is_option_needed = os.environ.get("ARGO_SERVER") != self.argo_server
        options = (
            ("--argo-server", self.argo_server if is_option_needed else None),
            ("--context", self.context),
            ("--kubeconfig", self.kubeconfig),
        )
        return tuple(command_arguments(options))


WorkflowOptions = Annotated[ClusterOptions, "context", "kubeconfig", "argo_server"]
"""The cluster of Workflows whose namespace is known."""
LogOptions = Annotated[ClusterOptions, "context", "kubeconfig"]
"""The same, for what only the API server answers."""
NamespaceOptions = Annotated[ClusterOptions, "context", "namespace", "kubeconfig"]
"""A namespace of Workflows, of which only the API server answers."""


@dataclass(frozen=True)
class InstallationOptions(_Connection):
    """A cluster, and the namespace that Tiphys is installed in."""

    namespace: InstallationOption = None
    context: ContextOption = None
    kubeconfig: KubeconfigOption = None


ServerOptions = Annotated[InstallationOptions, "context", "kubeconfig"]
"""A cluster as a whole."""


def command_arguments(options: Iterable[tuple[str, object]]) -> list[str]:
    """``--option value`` for each option with a value, as words of a command line."""
    return [word for option, value in options if value for word in (option, str(value))]


def complete_run(context: typer.Context, incomplete: str) -> list[str]:
    """Names of runs, for the completion of a shell; none from a store that is not a folder."""
    return _complete_from_store(context, incomplete, list_runs)


def complete_run_step(context: typer.Context, incomplete: str) -> list[str]:
    """Like `complete_run`; after the slash, the steps of the run and the items of its fan-outs."""
    run, slash, _ = incomplete.partition("/")
    return _complete_from_store(context, incomplete, partial(_list_run_steps, run=run) if slash else list_runs)


def _list_run_steps(store: Store, run: str) -> Iterator[str]:
    names = RunHistory.for_display(store, run).names
    for step in names.steps:
        yield f"{run}/{step}"
        yield from (f"{run}/{item.name}" for item in names.items(step))


def _complete_from_store(
    context: typer.Context, incomplete: str, list_names: Callable[[Store], Iterable[str]]
) -> list[str]:
    try:
        url = choose_store(context.params.get("store")).value
        if is_bucket_url(url):  # would be asked at each press of the key
            return []
        store = open_store(url, must_exist=True)
        return [name for name in list_names(store) if name.startswith(incomplete) and name.isprintable()]
    except TiphysError:
        return []


RunArgument = Annotated[str, typer.Argument(help="Name of the run.", autocompletion=complete_run)]
RunStepArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN[/STEP]",
        help="Name of the run, and of one of its steps. An item of a fan-out is named by index or value, such as "
        "'RUN/fit[2]' or 'RUN/fit[lr=0.1]'.",
        autocompletion=complete_run_step,
    ),
]


class RunStep(NamedTuple):
    """A run, and the id of one of its steps or items; empty for all."""

    history: RunHistory
    step: str


def parse_run_step(store: Store, text: str) -> RunStep:
    """Find what ``RUN[/STEP]`` names.

    Raises:
        NotFoundError: the store has no such run, or the run no such step or item; the message lists what there is.
        UsageError: several items have the value.
    """
    run, _, step = text.partition("/")
    history = RunHistory.for_display(store, run)
    history.record  # noqa: B018  raises for a run that does not exist
    return RunStep(history, history.names.resolve(step) if step else "")


DEFAULT_STORE = Path(".tiphys/store")
DEFAULT_STATE = Path(".tiphys/state")
_FROM_OPTION, _FROM_PIPELINE, _FROM_DEFAULT = "--store", "the pipeline", "the default"


class Setting(NamedTuple):
    """A value, and what named it."""

    value: str
    source: str
    is_lasting: bool = True
    """Whether later commands find the value again without an option."""


_STORE_HELP = "Store of the runs: s3://, gs:// or az:// URL, file:///dir or a path. Default: "
_DEFAULT_STORE_HELP = "the variable TIPHYS_STORE, then .tiphys/store in the working directory."
StoreOption = Annotated[str | None, _named(_FROM_OPTION, metavar="URL", help=f"{_STORE_HELP}{_DEFAULT_STORE_HELP}")]
PipelineStoreOption = Annotated[
    str | None,
    _named(_FROM_OPTION, metavar="URL", help=f"{_STORE_HELP}the pipeline's own store, then {_DEFAULT_STORE_HELP}"),
]


def existing_store(screen: Screen, given: str | None, pipeline: str = "") -> Store:
    """Open the store to read; raises `NotFoundError` if it does not exist."""
    return _open_chosen_store(screen, choose_store(given, pipeline), must_exist=True)


def store_for_writing(screen: Screen, given: str | None, pipeline: str = "") -> Store:
    """Open the store to write; a missing directory is created. ``pipeline`` is the store that the pipeline names."""
    return _open_chosen_store(screen, choose_store(given, pipeline), must_exist=False)


def store_arguments(store: Store, given: str | None, pipeline: str = "") -> tuple[str, ...]:
    """The option that a later command needs to find ``store``, as words; empty if it finds it without one."""
    return () if choose_store(given, pipeline).is_lasting else ("--store", store.url)


def is_store_named(given: str | None, pipeline: str = "") -> bool:
    """Whether something names the store, so that it is not the default folder."""
    return choose_store(given, pipeline).source != _FROM_DEFAULT


def named_store(screen: Screen, given: str | None, pipeline: str = "") -> str | None:
    """URL of the store that something names; None if only the default folder is left."""
    if not is_store_named(given, pipeline):
        return None
    chosen = choose_store(given, pipeline)
    _note_store(screen, chosen)
    return chosen.value


def existing_default_store() -> str | None:
    """The default folder of this directory, if it exists."""
    folder = Path.cwd() / DEFAULT_STORE
    return str(folder) if folder.is_dir() else None


def choose_store(given: str | None, pipeline: str = "") -> Setting:
    """URL of the store: the most specific one that is named.

    The option names the store of one command, a pipeline that of its runs, and the variable that of a shell.
    """
    if given:
        return Setting(given, _FROM_OPTION, is_lasting=False)
    if pipeline:
        return Setting(pipeline, _FROM_PIPELINE, is_lasting=False)
    if variable := os.environ.get(environment.STORE):
        return Setting(variable, environment.STORE)
    return Setting(str(Path.cwd() / DEFAULT_STORE), _FROM_DEFAULT)


def _open_chosen_store(screen: Screen, chosen: Setting, *, must_exist: bool) -> Store:
    _note_store(screen, chosen)
    try:
        return open_store(chosen.value, must_exist)
    except TiphysError as error:
        error.add_note(f"the store is from {chosen.source}")
        raise


def _note_store(screen: Screen, chosen: Setting) -> None:
    source, other = chosen.source, os.environ.get(environment.STORE)
    if source == _FROM_PIPELINE and other and other != chosen.value:
        source += f"; {environment.STORE} names {other}, which --store can choose"
    screen.note(f"store {chosen.value} (from {source})")


ParameterOption = Annotated[
    list[str] | None,
    typer.Option("--parameter", "-p", metavar="NAME=VALUE", help="Value of a workflow parameter; may be repeated."),
]


def parse_parameters(options: Sequence[str]) -> dict[str, str]:
    """Values by name; raises `UsageError` if an option is not ``NAME=VALUE``."""
    values = {}
    for text in options:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"parameter {text!r} is not NAME=VALUE; write, for example, -p lr=0.1")
        values[name] = value
    return values


def with_parameters(manifest: Manifest, values: Mapping[str, str], pipeline: "AnyPipeline | None" = None) -> Manifest:
    """Return ``manifest`` (a Workflow or CronWorkflow) with these parameter values; other parameters keep theirs.

    Raises:
        UsageError: the workflow does not declare one of the parameters, or it cannot have the value; a function of
            ``pipeline`` could not read a value.
    """
    filled = deepcopy(manifest)
    declared = declared_parameters(filled)
    names = [parameter["name"] for parameter in declared]
    if unknown := sorted(set(values) - set(names)):
        name, known = unknown[0], _author_parameters(names)
        declare = f"; Pipeline(arguments={{{name!r}: …}}) declares it, get_parameter({name!r}) gives it to a step"
        raise UsageError(unknown_name_message("the pipeline", "parameter", name, known) + (declare if pipeline else ""))
    for parameter in declared:
        if parameter["name"] in values:
            parameter["value"] = values[parameter["name"]]
            choices = parameter.get("enum")
            if choices and parameter["value"] not in choices:
                found = f"parameter {parameter['name']!r} cannot be {parameter['value']!r}"
                raise UsageError(f"{found}; it is one of {', '.join(map(repr, choices))}")
    if check := getattr(pipeline, "check_parameters", None):  # which one from YAML lacks
        final = {parameter["name"]: parameter.get("value") or "" for parameter in declared}
        check({name: value for name, value in final.items() if value or name in values})  # "" is to be filled in
    return filled


def warn_of_size(screen: Screen, manifest: Manifest) -> None:
    """Warn if the Workflow would become larger than Argo can store."""
    from hera_pipelines.compile.workflow_size import size_warning

    if warning := size_warning(manifest):
        screen.note(f"warning: {warning}")


def require_values(manifest: Manifest) -> None:
    """Raise `UsageError` for a parameter without a value. Argo would refuse it too, but only after the submission."""
    for parameter in declared_parameters(manifest):
        if parameter.get("value") is None and not parameter.get("valueFrom"):
            raise UsageError(f"parameter {parameter['name']!r} has no value; give one with -p {parameter['name']}=…")


def declared_parameters(manifest: Manifest) -> list[Manifest]:
    """The workflow parameters of a Workflow or CronWorkflow, with or without a value."""
    spec = manifest["spec"].get("workflowSpec", manifest["spec"])
    declared: list[Manifest] = (spec.get("arguments") or {}).get("parameters") or []
    return declared


def _author_parameters(names: Sequence[str]) -> list[str]:
    return [name for name in names if not name.startswith("tiphys-")]


SERVICE_ACCOUNT = "tiphys-workflow"
"""Service account that the Helm chart creates, with the permissions that Argo's pods need."""

ServiceAccountOption = Annotated[
    str,
    typer.Option("--service-account", metavar="NAME", help="Service account of the pods, if the pipeline names none."),
]

PipelineOption = Annotated[
    str | None, typer.Option("--pipeline", metavar="NAME", help="Name of the pipeline, if the file defines several.")
]


def compile_to_workflow(pipeline: "AnyPipeline", **options: Any) -> Manifest:
    """The compiled Workflow of ``pipeline``; of a schedule or template, the Workflow that it starts."""
    from hera_pipelines import Pipeline  # imports Hera, which takes half a second

    return pipeline.compile(**options) if isinstance(pipeline, Pipeline) else pipeline.workflow(**options)


def load_pipeline_file(file: Path, name: str | None) -> "AnyPipeline":
    """Load a pipeline like `hera_pipelines.load_pipeline`; output of the file goes to stderr, not to stdout."""
    from hera_pipelines import load_pipeline  # imports Hera, which takes half a second

    with redirect_stdout(sys.stderr):
        return load_pipeline(file, name)
