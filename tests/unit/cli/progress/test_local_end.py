"""What `tiphys run` says of a Workflow that has ended."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hera_pipelines.cli.error_messages import RunFailedError
from hera_pipelines.cli.progress.local import FollowedSubmission, report_end
from hera_pipelines.cli.screen import Screen
from tiphys.store import Store


def test_end_by_the_exit_handler_names_its_program(store: Store) -> None:
    nodes = [("wf", "DAG", "Succeeded", ""), ("wf.onExit", "DAG", "Failed", "")]
    nodes += [("wf.onExit.tell", "Pod", "Failed", "main: Error (exit code 6)"), ("wf.fit", "Pod", "Succeeded", "")]
    described = {
        name: {"name": name, "displayName": name.rpartition(".")[2], "type": kind, "phase": phase, "message": message}
        for name, kind, phase, message in nodes
    }
    progress = cast("Any", SimpleNamespace(rows={}, failure_sentences=list))

    with pytest.raises(RunFailedError, match=r"run wf failed: its exit handler: tell: main: Error \(exit code 6\); "):
        report_end(
            Screen(quiet=True),
            FollowedSubmission("wf", "wf", store, ()),
            progress,
            {"status": {"phase": "Failed", "nodes": described}},
        )
