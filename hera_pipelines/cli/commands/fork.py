"""``tiphys fork``: a new run that goes on from another one, with other code or parameters if wanted."""

from dataclasses import dataclass
from typing import Annotated

import typer
from tiphys_controller import Change, Forked, Started, Submitter
from tiphys_controller import fork as fork_run

from hera_pipelines.cli.code_changes import DriftOption, Edits, FileArgument, FromOption, show_drift
from hera_pipelines.cli.commands.resume import show_plan
from hera_pipelines.cli.progress.cluster import follow, newest_job
from hera_pipelines.cli.progress.local import (
    BEGUN_BEFORE,
    CodeOption,
    EngineOptions,
    Job,
    PortOption,
    QueuesOption,
    SpeedOption,
    StateOption,
    carry_out,
    local_engine,
    remembered_code,
)
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import (
    DEFAULT_STATE,
    ArgoServerOption,
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
    ParameterOption,
    PipelineOption,
    StoreOption,
    Where,
    existing_store,
    must_be_named,
)
from hera_pipelines.cli.target import (
    CLUSTER_OPTIONS,
    ENGINE_OPTIONS,
    ToClusterOption,
    cluster_submitter,
    is_on_cluster,
    last_submission,
    refuse,
    runs_on_cluster,
    words,
)
from hera_pipelines.local.run_session import LocalSession
from tiphys.store import Store, read_run

EXAMPLES = """\b
Examples:
  tiphys fork digits-7xk2p -p lr=0.3
  tiphys fork digits-7xk2p digits.py --run digits-repaired
  tiphys fork digits-7xk2p --from fit -p lr=0.3 --dry-run
  tiphys fork digits-7xk2p -p lr=0.3 --idempotency-key sweep-17
"""

_ONLY_CLUSTER = {**CLUSTER_OPTIONS, "detach": "--detach"}


def fork(
    command: typer.Context,
    run: Annotated[str, typer.Argument(help="Name of the run to go on from.")],
    file: FileArgument = None,
    which: PipelineOption = None,
    parameter: ParameterOption = None,
    again: FromOption = None,
    drift: DriftOption = None,
    name: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Name of the new run; else one is made.")
    ] = None,
    idempotency_key: Annotated[
        str, typer.Option("--idempotency-key", metavar="KEY", help="Under one key a run is forked once.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and submit nothing.")] = False,
    store: StoreOption = None,
    state: StateOption = DEFAULT_STATE,
    queues: QueuesOption = None,
    plugin_port: PortOption = 0,
    speed: SpeedOption = 1.0,
    code: CodeOption = None,
    cluster: ToClusterOption = False,
    local: Annotated[bool, typer.Option("--local", help="On this machine, in place of the cluster it ran on.")] = False,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    argo_server: ArgoServerOption = None,
    detach: Annotated[bool, typer.Option("--detach", help="Submit to the cluster and do not watch.")] = False,
) -> None:
    """Begin a new run from another one, which is left alone; it may be running.

    What the other run has finished is taken over where program, parameters and
    inputs are the same. Other trainings start from the newest checkpoint of the
    other run, those behind --from from the beginning. The name of the new run
    goes to stdout.
    """
    screen: Screen = command.obj
    place = existing_store(screen, store)
    read_run(place, run)
    last = last_submission(place, run)
    on_cluster = runs_on_cluster(last, cluster, local)
    change = Edits(file, which, parameter or (), drift or (), here=not on_cluster).of(place, run)
    wanted = _Wanted(place, run, name, tuple(again or ()), change, idempotency_key, must_be_named(store))
    if dry_run:
        _tell(screen, wanted.begin(LocalSession(place, state), dry_run=True))
        return
    if on_cluster:
        refuse(command, ENGINE_OPTIONS, "this is for the local engine, and the fork goes to a cluster; see --local")
        _on_cluster(screen, wanted, Where(kubeconfig, context, namespace, argo_server), detach, is_on_cluster(last))
    else:
        refuse(command, _ONLY_CLUSTER, f"this is for a cluster, and run {run} was run here; see --cluster")
        folder = code or (file.parent if file else remembered_code(place, run))
        _here(screen, wanted, EngineOptions(state, queues, plugin_port, speed, folder))


@dataclass(frozen=True)
class _Wanted:
    """What is asked for, wherever it is carried out."""

    store: Store
    parent: str
    name: str | None
    again: tuple[str, ...]
    change: Change | None
    key: str
    store_must_be_named: bool

    def begin(self, submitter: Submitter, namespace: str = "", dry_run: bool = False) -> Forked:
        """Fork the run."""
        asked = (self.parent, self.name, namespace, self.again, self.change)
        return fork_run(self.store, submitter, *asked, dry_run=dry_run, key=self.key)


def _here(screen: Screen, wanted: _Wanted, options: EngineOptions) -> None:
    with local_engine(wanted.store, options) as (session, watch):
        started = _tell(screen, wanted.begin(session, "default"))
        if started is not None and started.created:
            job = Job(started.run, started.workflow_name, wanted.store, options.state, wanted.store_must_be_named)
            carry_out(screen, session, watch, job)


def _on_cluster(screen: Screen, wanted: _Wanted, where: Where, detach: bool, as_before: bool) -> None:
    """``as_before``: its parent ran on a cluster, so that its namespace means something there."""
    submitter, at_hand = cluster_submitter(where, screen.note)
    started = _tell(screen, wanted.begin(submitter, where.namespace or ("" if as_before else at_hand)))
    if started is None or not started.created:
        return
    options = words([("--store", wanted.store.url if wanted.store_must_be_named else "")])
    job = newest_job(submitter, wanted.store, started.run, tuple(options), where.words)
    if not detach:
        follow(screen, submitter, job, read_run(wanted.store, started.run).workflow)


def _tell(screen: Screen, forked: Forked) -> Started | None:
    """Show what the fork will do, and its name; None after a dry run."""
    show_drift(screen, forked.drift)
    if forked.started is None:
        show_plan(screen, forked.plan, Format.TABLE)
    elif forked.started.created:
        screen.note(f"fork of run {forked.plan.run}; takes over what is finished there under the same step key")
        screen.write(forked.started.run)
    else:
        screen.write(forked.started.run)
        screen.note(BEGUN_BEFORE)
    screen.out.file.flush()
    return forked.started
