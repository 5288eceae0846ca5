"""The commands that actions of the pages run.

| run                   | pages       | command                                              |
|-----------------------|-------------|------------------------------------------------------|
| on this machine       | any         | with the state folder of its engine                  |
| on a cluster          | --cluster   | with the options of the cluster                      |
| on a cluster          | without it  | none: the pages say why                              |
| on another machine    | any         | none: the pages say why                              |
"""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.builders.compiled_workflows import gated, pipeline_of
from support.fakes.submitter import FakeSubmitter
from tiphys_controller import start_run

from hera_pipelines.cli.look.page_sources import CommandActions
from hera_pipelines.cli.look.ui import TOKEN_VARIABLE
from hera_pipelines.cli.shared_options import ClusterOptions
from hera_pipelines.local.live_workflows import LocalWorkflows
from hera_pipelines.ui.run_actions import ActionRequest, RunAction
from tiphys.errors import ConflictError, NotFoundError, StoreError, TiphysError, UsageError
from tiphys.lineage.run_history import RunHistory
from tiphys.store import Store

PIPELINE = pipeline_of(gated("fit"), parameters={"lr": "0.1"})
EAST = "kubernetes:east"


@pytest.fixture
def begin(store: Store, tmp_path: Path) -> Callable[[str], CommandActions]:
    """Starts run ``r`` on a cluster, and gives the actions of pages that may ask the cluster ``east``."""

    def begin_on(cluster: str, options: ClusterOptions | None = None) -> CommandActions:
        submitter = FakeSubmitter(tmp_path / "cluster", cluster)
        start_run(store, submitter, PIPELINE, "r")
        return CommandActions(store, FakeSubmitter(tmp_path / "east", EAST), options)

    return begin_on


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Arguments and environment of each command, none of which runs."""
    commands: list[tuple[list[str], dict[str, str]]] = []

    def run(line: Sequence[str], *, env: dict[str, str], stdout: Any, **_: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append((list(line[3:]), env))
        stdout.write(b"warmer\n")
        return subprocess.CompletedProcess(line, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def request(action: RunAction, **fields: Any) -> ActionRequest:
    return ActionRequest(action, "r", after=1, by="alice", **fields)


def test_on_a_cluster_the_command_has_its_options(
    store: Store, begin: Callable[..., CommandActions], ran: list[tuple[list[str], dict[str, str]]]
) -> None:
    actions = begin(EAST, ClusterOptions(Path("/k"), "west", None, None))
    assert actions.find_obstacle("r", RunHistory(store, "r").last_submission) == ""

    assert actions.perform(request(RunAction.RESUME)) == "r"
    assert actions.perform(request(RunAction.STOP)) == "r"
    parameters = {"lr": "0.3; --force"}
    assert actions.perform(request(RunAction.FORK, nonce="n", name="--warmer", parameters=parameters)) == "warmer"

    cluster = [f"--store={store.url}", "--context", "west", "--kubeconfig", "/k"]
    assert [arguments for arguments, _ in ran] == [
        ["resume", *cluster, "--detach", "--idempotency-key=page:resume:r:1", "--", "r"],
        ["stop", *cluster, "--", "r"],
        [
            "fork",
            *cluster,
            "--detach",
            "--idempotency-key=page:fork:r:n",
            "--run=--warmer",
            "--parameter=lr=0.3; --force",
            "--",
            "r",
        ],
    ]


def test_on_this_machine_the_command_has_the_state_folder_of_the_engine(
    store: Store,
    begin: Callable[..., CommandActions],
    ran: list[tuple[list[str], dict[str, str]]],
    tmp_path: Path,
) -> None:
    actions = begin(LocalWorkflows(tmp_path / "state").cluster, ClusterOptions(None, "west", None, None))
    assert actions.find_obstacle("r", RunHistory(store, "r").last_submission) == ""
    actions.perform(request(RunAction.RESUME))
    [(arguments, _)] = ran
    assert f"--state={tmp_path / 'state'}" in arguments
    assert "--context" not in arguments


def test_no_program_of_a_run_gets_the_token(
    begin: Callable[..., CommandActions],
    ran: list[tuple[list[str], dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "a token of sufficient length")
    begin(EAST, ClusterOptions()).perform(request(RunAction.STOP))
    assert TOKEN_VARIABLE not in ran[0][1]
    assert "PATH" in ran[0][1]


@pytest.mark.parametrize(
    ("cluster", "options", "words"),
    [
        (EAST, None, "it runs on kubernetes:east, which these pages do not ask; start them with --cluster"),
        ("kubernetes:west", ClusterOptions(), "went to cluster kubernetes:west"),
        ("local:elsewhere:/state/cluster", None, "was started on machine elsewhere"),
    ],
)
def test_an_action_that_the_pages_cannot_take_has_a_reason(
    store: Store, begin: Callable[..., CommandActions], cluster: str, options: ClusterOptions | None, words: str
) -> None:
    assert words in begin(cluster, options).find_obstacle("r", RunHistory(store, "r").last_submission)


def test_a_fork_is_planned_with_its_parameters(begin: Callable[..., CommandActions]) -> None:
    actions = begin(EAST, ClusterOptions())
    assert actions.plan_fork("r", {"lr": "0.3"}).running == ("fit",)
    with pytest.raises(UsageError, match="speed"):
        actions.plan_fork("r", {"speed": "1"})


@pytest.mark.parametrize(
    ("code", "kind"), [(1, TiphysError), (2, UsageError), (3, NotFoundError), (4, ConflictError), (75, StoreError)]
)
def test_the_error_of_a_command_is_that_of_the_page(
    begin: Callable[..., CommandActions], monkeypatch: pytest.MonkeyPatch, code: int, kind: type[TiphysError]
) -> None:
    def fail(line: Sequence[str], *, stderr: Any, **_: Any) -> subprocess.CompletedProcess[bytes]:
        stderr.write(b"store s3://ml-runs/tiphys\ntiphys: the run is still running\n")
        return subprocess.CompletedProcess(line, code)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(kind, match=r"^the run is still running$"):
        begin(EAST, ClusterOptions()).perform(request(RunAction.RESUME))


def test_a_command_that_does_not_end_is_given_up(
    begin: Callable[..., CommandActions], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(line: Sequence[str], **_: Any) -> None:
        raise subprocess.TimeoutExpired(list(line), 1)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(StoreError, match="did not answer within"):
        begin(EAST, ClusterOptions()).perform(request(RunAction.STOP))
