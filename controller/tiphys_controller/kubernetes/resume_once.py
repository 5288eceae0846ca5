"""Resume one run from inside of a cluster, and end: what a Workflow of Argo runs that an event has started.

``python -m tiphys_controller.kubernetes.resume_once RUN --store URL``
"""

import argparse
import sys
from collections.abc import Callable, Sequence

from tiphys.errors import TiphysError
from tiphys.kube import KubeApi, cluster_name, connect
from tiphys.store import Store, open_store
from tiphys_controller.kubernetes.kubernetes_submitter import KubernetesSubmitter
from tiphys_controller.submit.resume import Resumed, resume


def main(
    arguments: Sequence[str] | None = None,
    api: Callable[[], KubeApi] = connect,
    store: Callable[[str], Store] = open_store,
) -> int:
    """Resume the run that the arguments name; return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        connected = api()
        submitter = KubernetesSubmitter(connected, cluster_name(connected))
        done = resume(store(options.store), submitter, options.run, key=options.key)
    except TiphysError as error:
        print(f"resume: {error}", file=sys.stderr)  # noqa: T201  this is the command's own voice
        return error.exit_code
    print(_said(done))  # noqa: T201
    return 0


def _said(done: Resumed) -> str:
    if done.submission is None:
        return f"nothing is missing of run {done.run}"
    return f"submission {done.submission} of run {done.run} is Workflow {done.workflow_name}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tiphys_controller.kubernetes.resume_once", description=__doc__)
    parser.add_argument("run", help="name of the run")
    parser.add_argument("--store", required=True, help="URL of the storage that runs are kept in")
    parser.add_argument("--key", default="", help="idempotency key: one submission for each, however often it is asked")
    return parser


if __name__ == "__main__":
    sys.exit(main())
