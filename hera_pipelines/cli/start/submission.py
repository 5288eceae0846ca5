"""From the options of ``tiphys run``, ``resume`` and ``fork`` to a submission that is shown until it ends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tiphys_controller import Submitter

from hera_pipelines.cli.progress.cluster import find_cluster_submission, follow_submission
from hera_pipelines.cli.progress.local import EngineOptions, LocalDetachOption, LocalSubmission, run_to_end
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import ClusterOptions, FormatOption, PipelineStoreOption
from hera_pipelines.cli.start.detach import Detachment, detach
from hera_pipelines.cli.target import CLUSTER_OPTIONS, ENGINE_OPTIONS, OnClusterOption, is_on_cluster, refuse_options
from tiphys.errors import UsageError
from tiphys.records import SubmissionClaim
from tiphys.store import RunLayout, Store, Submission, read_record, read_run, read_submission_workflow

if TYPE_CHECKING:
    from tiphys_controller import ClusterSubmitter

IdempotencyKeyOption = Annotated[
    str | None,
    typer.Option(
        "--idempotency-key",
        metavar="KEY",
        help="Submit at most once with this key; a repeated command finds what the first one submitted.",
    ),
]
RunNameOption = Annotated[
    str | None, typer.Option("--run", metavar="NAME", help="Name of the new run. Default: a generated name.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show the plan and submit nothing.")]
LocalOption = Annotated[bool, typer.Option("--local", help="Run on this machine instead of the run's cluster.")]

Submit = Callable[[Submitter, str], tuple[str, int] | None]
"""Submits to a namespace and says what it did; returns the run and the number of the submission to follow, if any."""


@dataclass(frozen=True)
class SubmissionOptions:
    """Options of a submission: its store, and the engine or the cluster that it goes to."""

    store: PipelineStoreOption = None
    engine: EngineOptions = field(default_factory=EngineOptions)
    on_cluster: OnClusterOption = False
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    in_background: LocalDetachOption = False
    idempotency_key: IdempotencyKeyOption = None
    output: FormatOption = Format.TABLE


def choose_target(
    command: typer.Context, options: SubmissionOptions, run: str, last: Submission | None, local: bool
) -> bool:
    """Whether to continue a run on a cluster: where its last submission ran, unless an option chooses.

    Raises:
        UsageError: both targets are named, or an option of the other one is given.
    """
    if options.on_cluster and local:
        raise UsageError("--cluster and --local exclude each other; give one of them")
    on_cluster = options.on_cluster or (not local and is_on_cluster(last))
    if on_cluster:
        hint = f"run {run} continues on a cluster; see --local"
        refuse_options(command, ENGINE_OPTIONS, f"this is for the local engine, and {hint}")
    else:
        hint = f"run {run} continues on this machine; check its name, or see --cluster"
        refuse_options(command, CLUSTER_OPTIONS, f"this is for a cluster, and {hint}")
    return on_cluster


@dataclass(frozen=True)
class SubmissionTarget:
    """Where a submission goes, and what a later command needs to find its store."""

    screen: Screen
    options: SubmissionOptions
    store: Store
    store_arguments: tuple[str, ...]

    def submit_locally(self, submit: Submit, code: Path | None, detachment: Detachment | None = None) -> None:
        """Submit to the local engine, and run the Workflow to its end.

        ``code`` is the folder of its modules; ``detachment`` that of a command which is in the background already.
        """
        if detachment is None and self.options.in_background:
            detachment = detach()
        from hera_pipelines.local.run_session import LocalSession  # imports the engine and the web server

        engine = self.options.engine
        with LocalSession(
            self.store, engine.state, engine.queues, engine.plugin_port, engine.speed, code=engine.code or code
        ) as session:
            if submitted := submit(session, "default"):
                claim = self._read_claim(*submitted)
                submission = self.local_submission(claim.run, claim.workflow_name)
                run_to_end(self.screen, session, submission, detachment)

    def local_submission(self, run: str, workflow_name: str) -> LocalSubmission:
        return LocalSubmission(run, workflow_name, self.store, self.store_arguments, self.options.engine.state)

    def submit_to_cluster(self, submit: Submit, submitter: "ClusterSubmitter", namespace: str) -> None:
        """Submit to a cluster, and follow the Workflow until it ends, unless it runs in the background."""
        submitted = submit(submitter, namespace)
        if submitted is None:
            return
        claim, arguments = self._read_claim(*submitted), self.options.cluster.command_arguments
        submission = find_cluster_submission(submitter, self.store, claim, self.store_arguments, arguments)
        self.screen.note(
            f"Workflow {claim.namespace}/{submission.workflow_name} in cluster {submitter.cluster}; stop it with "
            f"{submission.command('stop')}"
        )
        if not self.options.in_background:
            manifest = read_submission_workflow(self.store, read_run(self.store, claim.run), claim)
            follow_submission(self.screen, submitter, submission, manifest)

    def _read_claim(self, run: str, submission: int) -> SubmissionClaim:
        return read_record(self.store, RunLayout(run).submission(submission), SubmissionClaim)
