"""One of several pods of a step: it fetches inputs, runs the program, and the first stores what it has made.

| program, pod | stored | exit code |
|---|---|---|
| ended well, first | every declared output that is there | 0 |
| ended well, another | nothing | 0 |
| failed | nothing | its own |
| an input is gone | – | of storage: try again |

| of an elastic training, ended well | stored | exit code |
|---|---|---|
| rank 0 at the end, whichever pod that is | every declared output | 0 |
| another, once they are stored | nothing | 0 |
| another, asked to end before, or without a sign of the one with rank 0 | nothing | 75 |
| rank 0, after another had begun to store | nothing | 75 |
"""

import contextlib
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiphys.errors import ObjectMissingError, UsageError
from tiphys.launch import member_files
from tiphys.launch.__main__ import main
from tiphys.store import RunLayout, Store
from tiphys.store.incarnations import stored_outputs_prefix

PREFIX = RunLayout("digits").outputs("fit", 2)
LINK = "os.symlink('gone', folder / 'out' / 'w')"
PROGRAM = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
(folder / "out").mkdir()
(folder / "out" / "weights").write_text((folder / "in" / "a").read_text())
(folder / "out" / "deep").mkdir()
(folder / "out" / "deep" / "more").write_text("more")
(folder / "loss").write_text("0.5")
sys.exit(int(sys.argv[2]))
"""


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Store, code: int = 0, **environ: str) -> int:
    declared = {
        "inputs": {"data": str(tmp_path / "in"), "absent": str(tmp_path / "absent")},
        "outputs": {
            "artifacts/model": str(tmp_path / "out"),
            "parameters/loss": str(tmp_path / "loss"),
            "artifacts/missing": str(tmp_path / "missing"),
        },
    }
    given = {
        "TIPHYS_STORE": store.url,
        "TIPHYS_RUN": "digits",
        "TIPHYS_STEP": "fit",
        "TIPHYS_ATTEMPT": "2",
        "TIPHYS_FILES": json.dumps(declared),
        "TIPHYS_INPUT_KEYS": json.dumps({"data": "data/runs/digits/outputs/prep/data"}),
        **environ,
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return main(["--", sys.executable, "-c", PROGRAM, str(tmp_path), str(code)])


def stored(store: Store) -> dict[str, bytes]:
    return {info.key.removeprefix(PREFIX): store.read(info.key) for info in store.list(PREFIX)}


@pytest.fixture
def data(store: Store) -> None:
    store.create("data/runs/digits/outputs/prep/data/a", b"weights")
    store.create("data/runs/digits/outputs/prep/data-of-another/a", b"no")


@pytest.mark.usefixtures("data")
def test_the_first_stores_outputs_where_argo_would(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Store
) -> None:
    assert run(monkeypatch, tmp_path, store, NODE_RANK="0") == 0
    assert stored(store) == {
        "artifacts/model/weights": b"weights",
        "artifacts/model/deep/more": b"more",
        "parameters/loss": b"0.5",
    }


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize(
    "ranks", [{"NODE_RANK": "1", "RANK": "0"}, {"PET_NODE_RANK": "1", "RANK": "0"}, {"RANK": "1"}], ids=str
)
def test_a_member_other_than_the_first_stores_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Store, ranks: dict[str, str]
) -> None:
    assert run(monkeypatch, tmp_path, store, **ranks) == 0
    assert stored(store) == {}


@pytest.mark.usefixtures("data")
def test_a_program_that_fails_stores_nothing_and_its_exit_code_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Store
) -> None:
    assert run(monkeypatch, tmp_path, store, 75) == 75
    assert stored(store) == {}


ELASTIC = {"TIPHYS_ELASTIC": "2:4", "PET_RDZV_CONF": ""}
MARKS = stored_outputs_prefix(RunLayout("digits"), "fit", 2)
SESSION = """
from tiphys.launch.session_registry import note_open_session
for rank in os.environ["RANKS"].split():
    note_open_session({**os.environ, "RANK": rank, "LOCAL_RANK": "0"})
    note_open_session({**os.environ, "RANK": str(int(rank) + 1), "LOCAL_RANK": "1"})
"""


def run_elastic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Store, number: str, ranks: str) -> int:
    """The exit code of an elastic member whose first process had these ``ranks``, one after the other."""
    program = PROGRAM.replace("sys.exit", f"{SESSION}\nsys.exit")
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", program)
    return run(monkeypatch, tmp_path, store, NODE_RANK=number, RANKS=ranks, **ELASTIC)


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize(("number", "ranks"), [("0", ""), ("0", "0"), ("1", "0"), ("2", "4 2 0")])
def test_the_member_with_rank_0_at_the_end_stores_outputs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Store, number: str, ranks: str
) -> None:
    assert run_elastic(monkeypatch, tmp_path, store, number, ranks) == 0
    assert stored(store)["parameters/loss"] == b"0.5"
    assert [info.key.removeprefix(MARKS) for info in store.list(MARKS)] == ["000000000", "stored"]


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize(("number", "ranks"), [("1", ""), ("1", "2"), ("0", "0 2")])
def test_member_without_rank_0_ends_well_once_outputs_are_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Store, number: str, ranks: str
) -> None:
    store.create(f"{MARKS}stored", b"")
    assert run_elastic(monkeypatch, tmp_path, store, number, ranks) == 0
    assert stored(store) == {}


@pytest.mark.usefixtures("data")
def test_outputs_that_another_member_began_to_store_are_not_mixed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Store
) -> None:
    store.create(f"{MARKS}000000000", b"0")
    assert run_elastic(monkeypatch, tmp_path, store, "1", "0") == 75
    assert stored(store) == {}


def wait_for_outputs(
    monkeypatch: pytest.MonkeyPatch, store: Store, happens: Callable[[float], bool], endpoint: str = ""
) -> tuple[int, float]:
    """Exit code and seconds of a wait in which ``happens`` is called each second, and returns True for SIGTERM."""
    signals = SimpleNamespace(is_stop_requested=False, now=0.0)

    def wait_next(seconds: float) -> None:
        signals.now += seconds
        signals.is_stop_requested |= happens(signals.now)

    signals.wait_next = wait_next
    monkeypatch.setattr(member_files, "time", SimpleNamespace(monotonic=lambda: signals.now))
    environ = {"TIPHYS_RUN": "digits", "TIPHYS_STEP": "fit", "TIPHYS_ATTEMPT": "2", "NODE_RANK": "1"}
    outputs = member_files.ElasticOutputs(store, environ)
    return outputs.wait(endpoint, signals), signals.now  # type: ignore[arg-type]


def test_member_waits_as_long_as_the_outputs_are_being_stored(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    def mark(now: float) -> bool:
        if now % 10 == 0:
            store.create(f"{MARKS}{'stored' if now == 1000 else f'{int(now):09d}'}", b"")
        return False

    assert wait_for_outputs(monkeypatch, store, mark) == (0, 1000)


def test_member_without_a_sign_of_the_one_that_stores_ends_its_attempt(
    monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    code, seconds = wait_for_outputs(monkeypatch, store, lambda now: False)
    assert (code, 120 < seconds < 125) == (75, True)


def test_member_waits_as_long_as_the_rendezvous_takes_connections(
    monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(256)

        def close(now: float) -> bool:
            if now == 200:
                listener.close()
            return False

        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        code, seconds = wait_for_outputs(monkeypatch, store, close, endpoint)
    assert (code, 318 < seconds < 325) == (75, True)


def test_member_that_is_asked_to_end_looks_once_more_for_stored_outputs(
    monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    assert wait_for_outputs(monkeypatch, store, lambda now: now == 5) == (75, 5)

    def end(now: float) -> bool:
        if now == 5:
            store.create(f"{MARKS}stored", b"")
        return now == 5

    assert wait_for_outputs(monkeypatch, store, end) == (0, 5)


def test_an_input_that_is_gone_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Store) -> None:
    assert run(monkeypatch, tmp_path, store) == ObjectMissingError.exit_code
    assert not (tmp_path / "out").exists(), "the program was not started"


@pytest.mark.usefixtures("data")
def test_an_output_stored_before_its_reply_was_lost_is_accepted(tmp_path: Path, store: Store) -> None:
    (tmp_path / "file").write_text("x")
    for _ in range(2):
        member_files.store_output(store, tmp_path / "file", "outputs/file")
    assert store.read("outputs/file") == b"x"


@pytest.mark.usefixtures("data")
def test_an_output_that_no_store_can_keep_is_refused_by_name_before_any_of_it_is_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Store, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", f"{PROGRAM[: PROGRAM.rindex('sys.exit')]}{LINK}")
    assert run(monkeypatch, tmp_path, store) == 2
    assert f"tiphys: output {tmp_path}/out: 'w -> gone' is a link" in capfd.readouterr().err
    assert not [key for key in stored(store) if key.startswith("artifacts/model")]


def test_a_link_to_a_file_of_the_same_folder_is_stored_as_that_file(tmp_path: Path, store: Store) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "epoch=9.ckpt").write_text("w")
    (tmp_path / "out" / "last.ckpt").symlink_to("epoch=9.ckpt")

    member_files.store_output(store, tmp_path / "out", "outputs/model")

    assert [store.read(f"outputs/model/{name}") for name in ("epoch=9.ckpt", "last.ckpt")] == [b"w", b"w"]


@pytest.mark.usefixtures("data")
def test_a_stop_that_comes_while_inputs_are_fetched_is_obeyed(tmp_path: Path, store: Store) -> None:
    with pytest.raises(member_files._StoppedError):
        member_files.fetch_input(store, "data/runs/digits/outputs/prep/data", tmp_path / "in", lambda: True)


@pytest.mark.parametrize("code", [0, 3])
def test_the_launcher_of_one_pod_names_what_argo_drops(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    monkeypatch.setenv("TIPHYS_OUTPUT_MODEL", str(tmp_path))
    monkeypatch.setenv("TIPHYS_OUTPUT_LOSS", str(tmp_path / "absent"))
    program = f"import os, sys; os.symlink('weights', {str(tmp_path / 'latest')!r}); sys.exit({code})"
    assert main(["--", sys.executable, "-c", program]) == code
    said = f"tiphys: output {tmp_path}: 'latest -> weights' is a link, which no store can keep; let the program write"
    assert (said in capfd.readouterr().err) is (code == 0)


def test_a_single_file_is_fetched_as_one(tmp_path: Path, store: Store) -> None:
    store.create("one", b"1")
    store.create("one-2", b"of another artifact")
    member_files.fetch_input(store, "one", tmp_path / "deep" / "in")
    assert (tmp_path / "deep" / "in").read_bytes() == b"1"


def test_without_the_environment_of_a_step_it_says_what_it_is_for() -> None:
    with pytest.raises(UsageError, match="only a compiled step of several nodes"):
        member_files.MemberFiles.from_environment({"TIPHYS_FILES": "{}"})


@pytest.mark.parametrize(
    ("node", "given", "expected"),
    [
        ("0", "join_timeout=9", "join_timeout=9,is_host=1"),
        ("2", "join_timeout=9", "join_timeout=9,is_host=0"),
        ("2", "", "is_host=0"),
        ("2", "is_host=1", "is_host=1"),
    ],
)
def test_the_nodes_of_an_elastic_training_meet_at_the_first(node: str, given: str, expected: str) -> None:
    environ = {"TIPHYS_ELASTIC": "2:4", "NODE_RANK": node, "PET_RDZV_CONF": given}
    assert member_files.rendezvous_variables(environ) == {"PET_RDZV_CONF": expected}
    del environ["TIPHYS_ELASTIC"]
    assert member_files.rendezvous_variables(environ) == {}


def test_a_pod_without_files_needs_no_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Store) -> None:
    nothing = json.dumps({"inputs": {}, "outputs": {}})
    program = "import os, sys; sys.exit(7 if os.environ['PET_RDZV_CONF'] == 'is_host=1' else 8)"
    run(monkeypatch, tmp_path, store)  # sets the environment
    for name, value in {"TIPHYS_FILES": nothing, "TIPHYS_ELASTIC": "1:2", "TIPHYS_STORE": "file:///nowhere"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PET_RDZV_CONF", "")
    assert main(["--", sys.executable, "-c", program]) == 7
