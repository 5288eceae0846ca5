"""What the web pages show and do beyond the store: with the engine on this machine, or with a cluster.

An action of a page runs the command that the page shows, in a process of its own
that goes on in the background, so that page and terminal cannot differ.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import IO, TYPE_CHECKING

from tiphys_controller import PlanReport, Submitter, fork_run

from hera_pipelines.cli.look.ui import TOKEN_VARIABLE
from hera_pipelines.cli.repair.code_changes import RunEdits
from hera_pipelines.cli.shared_options import DEFAULT_STATE, ClusterOptions
from hera_pipelines.cli.target import cluster_of_submission, find_local_workflows, is_on_cluster, require_same_cluster
from hera_pipelines.local.live_workflows import LocalWorkflows
from hera_pipelines.ui.run_actions import ActionRequest, RunAction
from tiphys.errors import ConflictError, NotFoundError, StoreError, TiphysError, UsageError
from tiphys.lineage.run_history import RunHistory
from tiphys.store import Attempt, Store, Submission

_COMMAND_SECONDS = 120.0
_ERRORS = {2: UsageError, 3: NotFoundError, 4: ConflictError, 75: StoreError}
"""By exit code."""

if TYPE_CHECKING:
    from hera_pipelines.cli.look.pod_logs import PodLog
    from tiphys.kube import KubeApi


class AttemptLogReader:
    """Finds the logs of attempts, as `hera_pipelines.ui.log_page.AttemptLogs`.

    ``connect`` leads to the cluster, and is called on the first use; None if the pages do not ask it.
    """

    def __init__(self, store: Store, connect: "Callable[[], KubeApi] | None") -> None:
        self._store = store
        self._connect = None if connect is None else cache(connect)

    def __call__(self, attempt: Attempt, submission: Submission, max_lines: int, max_bytes: int) -> "Iterator[PodLog]":
        from hera_pipelines.cli.look.pod_logs import choose_pod_logs

        logs = choose_pod_logs(self._store, submission, lambda: self._connect_for(submission))
        return logs.find(attempt.claim, max_lines, follow=False, max_bytes=max_bytes)

    def _connect_for(self, submission: Submission) -> "KubeApi":
        if self._connect is None:
            raise UsageError(
                f"its pods and the archive of Argo are known to {cluster_of_submission(submission)}, which these pages "
                "do not ask; start them with --cluster"
            )
        return self._connect()


class CommandActions:
    """Carries out actions by the commands of the same names; a `hera_pipelines.ui.run_actions.RunActionBackend`.

    ``cluster_options`` are None if the pages ask no cluster.
    """

    def __init__(self, store: Store, submitter: Submitter, cluster_options: ClusterOptions | None) -> None:
        self._store = store
        self._submitter = submitter
        self._cluster_options = cluster_options

    def find_obstacle(self, run: str, last: Submission | None) -> str:
        if last is None:
            return "it was never submitted"
        try:
            if not is_on_cluster(last):
                find_local_workflows(last, run)
            elif self._cluster_options is None:
                return (
                    f"it runs on {cluster_of_submission(last)}, which these pages do not ask; start them with --cluster"
                )
            else:
                require_same_cluster(last, self._submitter.cluster, run)
        except UsageError as error:
            return str(error)
        return ""

    def plan_fork(self, run: str, parameters: Mapping[str, str]) -> PlanReport:
        edits = RunEdits(parameters=[f"{name}={value}" for name, value in parameters.items()])
        on_cluster = is_on_cluster(RunHistory(self._store, run).last_submission)
        change = edits.build_change(self._store, run, runs_locally=not on_cluster)
        return fork_run(self._store, LocalWorkflows(DEFAULT_STATE), run, change=change, dry_run=True).plan

    def perform(self, request: ActionRequest) -> str:
        printed = _run_command([request.action, *self._build_options(request), "--", request.run])
        return printed.strip() if request.action is RunAction.FORK else request.run

    def _build_options(self, request: ActionRequest) -> Iterator[str]:
        yield f"--store={self._store.url}"
        last = RunHistory(self._store, request.run).last_submission
        options = self._cluster_options
        if options is not None and is_on_cluster(last):
            yield from options.command_arguments
        elif last is not None and request.action is not RunAction.STOP:
            yield f"--state={find_local_workflows(last, request.run).state}"
        if request.action is not RunAction.STOP:
            yield from ("--detach", f"--idempotency-key={request.key}")
        if request.name:
            yield f"--run={request.name}"
        for name, value in request.parameters.items():
            yield f"--parameter={name}={value}"


def _run_command(arguments: list[str]) -> str:
    """Run ``tiphys`` until it ends or goes on in the background; answers what it printed.

    Raises:
        TiphysError: it failed, or did not answer in time.
    """
    line = [sys.executable, "-m", "hera_pipelines.cli", *arguments]
    environ = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    # Files, because the process in the background would keep pipes open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            done = subprocess.run(
                line,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environ,
                timeout=_COMMAND_SECONDS,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise StoreError(f"`tiphys {arguments[0]}` did not answer within {_COMMAND_SECONDS:g} s") from error
        if done.returncode == 0:
            return _read_text(out)
        lines = [line.removeprefix("tiphys: ") for line in _read_text(err).splitlines() if line.startswith("tiphys: ")]
        message = lines[-1] if lines else f"`tiphys {arguments[0]}` failed with exit code {done.returncode}"
        raise _ERRORS.get(done.returncode, TiphysError)(message)


def _read_text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
