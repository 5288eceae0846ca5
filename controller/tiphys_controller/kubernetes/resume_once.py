"""Resumes one run from inside a cluster: the program of a Workflow that an Argo event starts.

``python -m tiphys_controller.kubernetes.resume_once RUN --store URL``
"""

import argparse
import sys
from collections.abc import Callable, Sequence

from tiphys.errors import TiphysError
from tiphys.kube import KubeApi, connect_to_cluster, identify_cluster
from tiphys.store import Store, open_store
from tiphys_controller.kubernetes.kubernetes_submitter import KubernetesSubmitter
from tiphys_controller.submit.resume import ResumeResult, resume_run


def main(
    arguments: Sequence[str] | None = None,
    api: Callable[[], KubeApi] = connect_to_cluster,
    store: Callable[[str], Store] = open_store,
) -> int:
    """Resume the run that the arguments name; return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        connected = api()
        submitter = KubernetesSubmitter(connected, identify_cluster(connected))
        done = resume_run(store(options.store), submitter, options.run, key=options.key or None)
    except TiphysError as error:
        print(f"resume: {error}", file=sys.stderr)  # noqa: T201  this is the command's own voice
        return error.exit_code
    print(_format_result(done))  # noqa: T201
    return 0


def _format_result(result: ResumeResult) -> str:
    if result.submission is None:
        return f"run {result.run} has no missing steps"
    return f"submission {result.submission} of run {result.run} is Workflow {result.workflow_name}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tiphys_controller.kubernetes.resume_once", description=__doc__)
    parser.add_argument("run", help="name of the run")
    parser.add_argument("--store", required=True, help="URL of the store that holds the runs")
    parser.add_argument("--key", default="", help="idempotency key: repeated calls with one key make one submission")
    return parser


if __name__ == "__main__":
    sys.exit(main())
