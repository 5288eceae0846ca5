"""Controllers as processes by the hundred: one process loads everything once, and forks for each.

``python -m support.processes.forked_controllers`` reads one JSON object per line: the URL of a store
and of an API server, a story, whether somebody goes on with it, and for each
process the failpoints that it dies at. All of them begin at once. It answers
with their exit codes, negative for a signal. Forked before any thread runs,
each is a process of its own that a failpoint can kill.
"""

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiphys_controller.kubernetes import KubernetesSubmitter
from urllib3 import PoolManager

from support.processes.json_lines import JsonLineProcess
from support.stories.controller_crashes import STORIES
from tiphys.errors import TiphysError
from tiphys.kube import KubeApi, identify_cluster
from tiphys.store import open_store

BUG = 70
"""Exit code of a process that ended in no error of Tiphys; its trace is in the log."""


def tell(job: Mapping[str, Any]) -> int:
    """Do what the story asks for; the exit code."""
    story = STORIES[job["story"]]
    api = KubeApi(job["server"], PoolManager(), "default")
    try:
        (story.go_on if job["go_on"] else story.ask)(
            open_store(job["store"]), KubernetesSubmitter(api, identify_cluster(api))
        )
    except TiphysError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0


def child(job: Mapping[str, Any], failpoints: str, gate: int) -> None:
    os.dup2(os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.environ["TIPHYS_FAILPOINTS"] = failpoints
    os.environ["TIPHYS_FAILPOINTS_LOG"] = job["faults"]
    code = BUG
    try:
        os.read(gate, 1)  # answers nothing once all are there
        code = tell(job)
    except BaseException:  # noqa: BLE001  nothing of a child may go on as its parent
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def together(job: Mapping[str, Any]) -> list[int]:
    """Exit codes of processes that all begin at the same moment."""
    gate, opened = os.pipe()
    children = []
    for failpoints in job["failpoints"]:
        pid = os.fork()
        if pid == 0:
            os.close(opened)
            child(job, failpoints, gate)
        children.append(pid)
    os.close(opened)
    os.close(gate)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


def main() -> None:
    # What a SIGKILL leaves behind does not depend on it, and a disk takes its time.
    os.fsync = lambda descriptor: None
    for line in sys.stdin:
        sys.stdout.write(json.dumps(together(json.loads(line))) + "\n")
        sys.stdout.flush()


class ForkedControllers(JsonLineProcess):
    """The other end; use it in a ``with`` block."""

    MODULE = "support.processes.forked_controllers"

    def tell(
        self, story: str, store: str, server: str, folder: Path, failpoints: Sequence[str] = ("",), go_on: bool = False
    ) -> list[int]:
        """Have as many processes as there are ``failpoints`` tell a story; their exit codes.

        What they say goes to ``folder/log``, and which faults really happened to ``folder/faults``.
        """
        job = {
            "story": story,
            "store": store,
            "server": server,
            "failpoints": list(failpoints),
            "go_on": go_on,
            "log": str(folder / "log"),
            "faults": str(folder / "faults"),
        }
        found: list[int] = self.ask(job)
        return found


if __name__ == "__main__":
    main()
