"""Moves the runs of a cluster that is gone to another one: what somebody does with `resume`, for all of them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tiphys.errors import TiphysError
from tiphys.records.names import LOCAL_CLUSTER_PREFIX
from tiphys.store import Store, list_open_submissions, read_submissions
from tiphys_controller.submit.resume import resume_run
from tiphys_controller.submit.submission import find_workflow, is_bound_workflow, submission_cluster
from tiphys_controller.submit.submitter import Submitter

_READERS = 16


class LostRun(NamedTuple):
    """A run without a recorded end, the cluster that it was last sent to, and the namespace of its Workflow there."""

    run: str
    cluster: str
    namespace: str


class RecoveredRun(NamedTuple):
    """What became of a lost run."""

    run: str
    workflow_name: str = ""
    """Its new Workflow; empty if nothing was missing, or if it was refused."""
    message: str = ""
    """Why it was refused."""


def list_lost_runs(store: Store, submitter: Submitter, cluster: str = "", namespace: str = "") -> list[LostRun]:
    """The runs without a recorded end that were last sent to ``cluster``, by name.

    A run that was claimed for the cluster of ``submitter`` and never sent, as after a crash of `recover_runs`, is still
    with the cluster that it had before.

    Args:
        store: The store; of its runs those with an open submission are read.
        submitter: The cluster that is there.
        cluster: Name of a cluster; empty for all others than that of ``submitter``. Of that one, as after etcd was lost
            and its certificates were kept, only runs are lost whose Workflow is gone.
        namespace: Only runs of this namespace; empty for all.
    """
    present = submitter.cluster
    opened = sorted({submission.run for submission in list_open_submissions(store)})

    def find(run: str) -> LostRun | None:
        submissions = read_submissions(store, run)
        sent = [
            submission for submission in submissions if submission.binding or submission_cluster(submission) != present
        ]
        last = sent[-1] if sent else None
        if last is None or last.end or namespace not in ("", last.claim.namespace):
            return None
        where = submission_cluster(last)
        is_wanted = where == cluster if cluster else where != present
        if not is_wanted or not where or where.startswith(LOCAL_CLUSTER_PREFIX):
            return None
        if where == present and (live := find_workflow(submitter, last)) and is_bound_workflow(last, live):
            return None
        return LostRun(run, where, last.claim.namespace)

    with ThreadPoolExecutor(_READERS) as readers:
        return [lost for lost in readers.map(find, opened) if lost]


def count_lost_runs(lost: Sequence[LostRun]) -> list[tuple[str, str, int]]:
    """Cluster, namespace and number of runs, the most first."""
    return [(*place, count) for place, count in Counter((run.cluster, run.namespace) for run in lost).most_common()]


def recover_runs(store: Store, submitter: Submitter, lost: Sequence[LostRun], jobs: int) -> Iterator[RecoveredRun]:
    """Resume each run on the cluster of ``submitter``, as one whose Workflow is gone; in their order.

    Called again, it goes on where it was: a run that was sent to the new cluster is no longer lost.

    At most ``jobs`` are resumed at once. Those that were not begun are left when the iteration ends.
    """

    def recover(run: LostRun) -> RecoveredRun:
        gone = run.cluster if run.cluster != submitter.cluster else ""
        try:
            resumed = resume_run(store, submitter, run.run, namespace=run.namespace, gone_cluster=gone)
        except TiphysError as error:
            return RecoveredRun(run.run, message=str(error))
        return RecoveredRun(run.run, resumed.workflow_name)

    pool = ThreadPoolExecutor(jobs)
    try:
        yield from pool.map(recover, lost)
    finally:
        pool.shutdown(cancel_futures=True)
