"""What the web pages show beyond the store: reads it from the engine on this machine, or from a cluster."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hera_pipelines.cli.target import cluster_of_submission, find_local_workflows
from tiphys.errors import UsageError
from tiphys.store import Attempt, Store, Submission

if TYPE_CHECKING:
    from hera_pipelines.cli.commands.follow.pod_logs import PodLog
    from tiphys.kube import KubeApi


class AttemptLogReader:
    """Finds the logs of attempts, as `hera_pipelines.ui.log_page.AttemptLogs`.

    Args:
        store: The store.
        connect: Connects to the cluster, on the first use; None if the pages do not ask it.
    """

    def __init__(self, store: Store, connect: "Callable[[], KubeApi] | None") -> None:
        self._store = store
        self._connect = connect
        self._api: KubeApi | None = None

    def __call__(self, attempt: Attempt, submission: Submission, max_lines: int, max_bytes: int) -> "Iterator[PodLog]":
        from hera_pipelines.cli.commands.follow.pod_logs import choose_pod_logs

        logs = choose_pod_logs(
            self._store,
            submission,
            lambda: self._connect_for(submission),
            lambda: find_local_workflows(submission, attempt.claim.run),
        )
        return logs.find(attempt.claim, max_lines, follow=False, max_bytes=max_bytes)

    def _connect_for(self, submission: Submission) -> "KubeApi":
        if self._connect is None:
            raise UsageError(
                f"its pods and the archive of Argo are known to {cluster_of_submission(submission)}, which these pages "
                "do not ask; start them with --cluster"
            )
        if self._api is None:
            self._api = self._connect()
        return self._api
