"""Moves the runs of a cluster that is gone to another one: what somebody does with `resume`, for all of them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tiphys.errors import TiphysError
from tiphys.records.names import LOCAL_CLUSTER_PREFIX
from tiphys.store import Store, Submission, list_open_submissions, read_submissions
from tiphys_controller.submit.resume import resume_run
from tiphys_controller.submit.submission import submission_cluster
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


def list_lost_runs(store: Store, present: str, cluster: str = "") -> list[LostRun]:
    """The runs whose newest submission has no recorded end and went to another cluster than ``present``; by name.

    A run that was claimed for ``present`` and never sent, as after a crash of `recover_runs`, is still with the cluster
    that it had before.

    Args:
        store: The store; of its runs those with an open submission are read.
        present: Name of the cluster that is there.
        cluster: Only the runs of this cluster; empty for all.
    """
    opened = sorted({submission.run for submission in list_open_submissions(store)})
    with ThreadPoolExecutor(_READERS) as readers:
        submissions = readers.map(lambda run: read_submissions(store, run), opened)
        found = [_find_lost_run(listed, present) for listed in submissions]
    return [lost for lost in found if lost and cluster in ("", lost.cluster)]


def _find_lost_run(submissions: Sequence[Submission], present: str) -> LostRun | None:
    sent = [one for one in submissions if one.binding or submission_cluster(one) != present]
    if not sent or sent[-1].end or submission_cluster(sent[-1]).startswith(LOCAL_CLUSTER_PREFIX):
        return None
    last = sent[-1]
    cluster = submission_cluster(last)
    return LostRun(last.claim.run, cluster, last.claim.namespace) if cluster not in ("", present) else None


def count_lost_runs(lost: Sequence[LostRun]) -> list[tuple[str, str, int]]:
    """Cluster, namespace and number of runs, the most first."""
    return [(*place, count) for place, count in Counter((run.cluster, run.namespace) for run in lost).most_common()]


def recover_runs(store: Store, submitter: Submitter, lost: Sequence[LostRun], jobs: int) -> Iterator[RecoveredRun]:
    """Resume each run on the cluster of ``submitter``, as one whose Workflow is gone; in their order.

    Called again, it goes on where it was: a run that was sent to the new cluster is no longer lost.

    Args:
        store: The store of the runs.
        submitter: The cluster that gets their Workflows.
        lost: The runs, of a cluster that runs nothing any more.
        jobs: How many to resume at once. Those that were not begun are left when the iteration ends.
    """

    def recover(run: LostRun) -> RecoveredRun:
        try:
            resumed = resume_run(store, submitter, run.run, namespace=run.namespace, gone_cluster=run.cluster)
        except TiphysError as error:
            return RecoveredRun(run.run, message=str(error))
        return RecoveredRun(run.run, resumed.workflow_name)

    pool = ThreadPoolExecutor(jobs)
    try:
        yield from pool.map(recover, lost)
    finally:
        pool.shutdown(cancel_futures=True)
