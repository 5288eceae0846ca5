"""The programs of a gang whose member dies are started again together, in the pods that they have.

Real launchers and programs, a pod for each below the local engine. The ranks add their numbers up over sockets at each
step, as collectives would, and each saves a part of the state that says which incarnation it was made by.
"""

import contextlib
import json
import math
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hera.workflows import DAG
from support.processes.polling import until
from tiphys_controller import start_run

from hera_pipelines import Checkpoints, Pipeline, Retries, Train
from hera_pipelines.local.run_session import LocalSession
from tiphys.checkpoint.ranks.barrier import RankInfo
from tiphys.checkpoint.restore.loader import CheckpointLoader
from tiphys.lineage.select import list_commits
from tiphys.records import IncarnationRecord
from tiphys.store import DirectoryStore, RunLayout, read_events, read_record, read_step_attempts
from tiphys.store.incarnations import incarnation_key

MEMBERS = 4
PATIENCE = 300.0

# Steps until the file `enough` exists in its folder, and writes each into the file of its rank.
TRAIN = """
import json, os, pathlib, signal, socket, struct, time
import numpy as np
from tiphys import checkpoint

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
process, attempt = int(os.environ.get("TIPHYS_INCARNATION", "1")), int(os.environ["TIPHYS_ATTEMPT"])
folder = pathlib.Path(os.environ["TRACES"])
trace = open(folder / f"rank-{rank}", "a", buffering=1)

def tell(**facts):
    facts |= {"attempt": attempt, "process": process, "pid": os.getpid(), "at": time.time()}
    trace.write(json.dumps(facts) + "\\n")

def receive(connection):
    data = b""
    while len(data) < 8:
        if not (more := connection.recv(8 - len(data))):
            raise ConnectionError("the other rank is gone")
        data += more
    return struct.unpack("d", data)[0]

class Ring:
    def __init__(self):
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.connections = []
        if rank == 0:
            listener = socket.socket()  # as the plainest program: without the option to reuse an address
            listener.bind(address)
            listener.listen()
            self.connections = [listener.accept()[0] for _ in range(world - 1)]
            return
        while not self.connections:
            try:
                self.connections = [socket.create_connection(address)]
            except OSError:
                time.sleep(0.01)

    def add_up(self, number):
        if rank == 0:
            number += sum(receive(connection) for connection in self.connections)
        for connection in self.connections:
            connection.sendall(struct.pack("d", number))
        return number if rank == 0 else receive(self.connections[0])

with checkpoint.session(sharded=True) as session:
    state = session.restore(default={"step": 0, "weights": np.zeros(1000), "process": 0})
    ring = Ring()
    tell(begins=state["step"])
    while True:
        ends = ring.add_up(float((folder / "enough").exists() and rank == 0))
        total = ring.add_up(float(rank + state["step"]))
        state = {"step": state["step"] + 1, "weights": state["weights"] + total, "process": process}
        session.step(state["step"], state)
        tell(step=state["step"], total=total)
        if (folder / f"kill-{process}-{rank}").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if (folder / f"bug-{process}-{rank}").exists():
            raise TypeError("a bug")
        if ends:
            break
        time.sleep(0.01)
"""


class Rank:
    """What one rank has told."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.facts: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        if self._path.exists():
            with self._path.open() as file:
                file.seek(self._offset)
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._offset += len(whole)
            self.facts += [json.loads(line) for line in whole.splitlines()]
        return self.facts

    def steps(self, attempt: int, process: int) -> list[dict[str, Any]]:
        return [
            fact for fact in self.read() if (fact["attempt"], fact["process"]) == (attempt, process) and "step" in fact
        ]


class Training:
    """A run of this machine, in a thread."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor, retries: Retries, command: list[str]) -> None:
        self.folder, self.store = folder, DirectoryStore(folder / "store")
        self.traces = folder / "traces"
        for made in (self.traces, folder / "code"):
            made.mkdir()
        (folder / "code" / "train.py").write_text(TRAIN)
        with Pipeline("digits", store="s3://ml-runs", entrypoint="main") as pipeline:
            fit = Train(
                name="fit",
                image="i",
                command=command,
                env={"TRACES": str(self.traces), "OMP_NUM_THREADS": "1"},
                nodes=MEMBERS,
                checkpoints=Checkpoints(every="5 steps", keep_last=None, hang_after="30s"),
                retries=retries,
            )
            with DAG(name="main"):
                fit()
        self._manifest: dict[str, Any] = pipeline.to_dict()
        self.ranks = [Rank(self.traces / f"rank-{rank}") for rank in range(MEMBERS)]
        self.phase: Future[str] = pool.submit(self._run)

    def _run(self) -> str:
        with LocalSession(self.store, self.folder / "state", speed=50.0, code=self.folder / "code") as session:
            return str(session.run(start_run(self.store, session, self._manifest, "night").workflow_name))

    def until_all_step(self, attempt: int, process: int) -> None:
        def holds() -> bool:
            assert not self.phase.done(), self.logs()
            return all(rank.steps(attempt, process) for rank in self.ranks)

        until(holds, PATIENCE)

    def until_committed(self, attempt: int, process: int) -> None:
        """Return once the launchers have heard of a commit of this process: its next save has begun after that."""
        self.until_all_step(attempt, process)
        first = max(rank.steps(attempt, process)[0]["step"] for rank in self.ranks)

        def holds() -> bool:
            assert not self.phase.done(), self.logs()
            newest = next(iter(list_commits(self.store, "night/fit")), None)
            return newest is not None and newest.global_step > first + 10

        until(holds, PATIENCE)

    def pid(self, rank: int) -> int:
        return int(self.ranks[rank].read()[-1]["pid"])

    def end(self) -> str:
        (self.traces / "enough").touch()
        return self.phase.result(PATIENCE)

    def outcomes(self) -> list[str]:
        ends = [attempt.end for attempt in read_step_attempts(self.store, "night", "fit") if attempt.end is not None]
        return [f"{end.outcome}{f':{end.cause}' if end.cause else ''} {end.incarnations}" for end in ends]

    def logs(self) -> str:
        return "\n".join(path.read_text()[-4000:] for path in sorted((self.folder / "state" / "logs").glob("*fit*")))

    def processes_of_commits(self) -> list[set[int]]:
        """Of each checkpoint, the incarnations that its parts were made by."""
        loader = CheckpointLoader(self.store)
        found = []
        for ref in list_commits(self.store, "night/fit"):
            manifest = loader.read_manifest(ref)
            states = [loader.load(manifest, None, RankInfo(rank=rank, world_size=MEMBERS)) for rank in range(MEMBERS)]
            assert {state["step"] for state in states} == {ref.global_step}
            found.append({state["process"] for state in states})
        return found


class Beginner:
    def __init__(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        self._folder, self._pool = folder, pool

    def __call__(self, retries: Retries = Retries(), command: list[str] | None = None) -> Training:  # noqa: B008
        return Training(self._folder, self._pool, retries, command or ["python", "train.py"])


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Beginner]:
    with ThreadPoolExecutor(1) as pool:
        yield Beginner(tmp_path, pool)
        (tmp_path / "traces" / "enough").touch()  # so that nothing goes on if the test has failed


class Recovery(NamedTuple):
    kind: str
    seconds: float


def kill_one(training: Training, process: int, kind: str, choice: random.Random) -> Recovery:
    """Kill or stop ranks, and return how long all took until they stepped again."""
    victim, other = choice.sample(range(MEMBERS), 2)
    stopped = training.pid(other)
    if kind == "stop":
        os.kill(stopped, signal.SIGSTOP)
    began = time.time()
    os.kill(training.pid(victim), signal.SIGKILL)
    training.until_all_step(1, process + 1)
    if kind == "stop":
        with pytest.raises(ProcessLookupError):  # nothing of the process before can go on and commit
            os.kill(stopped, signal.SIGCONT)
    return Recovery(kind, max(rank.steps(1, process + 1)[0]["at"] for rank in training.ranks) - began)


def campaign(training: Training, kills: int, seed: int) -> list[Recovery]:
    choice = random.Random(seed)
    recoveries = []
    for process in range(1, kills + 1):
        training.until_committed(1, process)
        recoveries.append(kill_one(training, process, "kill" if process % 2 else "stop", choice))
    return recoveries


def check_campaign(training: Training, kills: int, recoveries: list[Recovery]) -> None:
    assert training.end() == "Succeeded", training.logs()
    assert training.outcomes() == [f"done {kills + 1}"], "no attempt but the first, so no pod but the first ones"
    mixed = [processes for processes in training.processes_of_commits() if len(processes) != 1]
    assert not mixed, "checkpoints of several incarnations"
    for rank in training.ranks:  # all go on from the same step, and none leaves one out
        begins = [fact["begins"] for fact in rank.read() if "begins" in fact]
        assert begins == [fact["begins"] for fact in training.ranks[0].facts if "begins" in fact]
        assert len(begins) == kills + 1
        assert begins == sorted(begins)
    totals: dict[int, set[float]] = {}
    for fact in (fact for rank in training.ranks for fact in rank.facts if "total" in fact):
        totals.setdefault(fact["step"], set()).add(fact["total"])
    assert {step: {float(MEMBERS * (step - 1) + sum(range(MEMBERS)))} for step in totals} == totals
    events = [event for event in read_events(training.store, "night") if event.name == "program.restarted"]
    assert [event.data["incarnation"] for event in events] == list(range(2, kills + 2)), "one event for each round"
    seconds = sorted(recovery.seconds for recovery in recoveries)
    print(  # noqa: T201  the measurement
        f"{kills} kills of a gang of {MEMBERS}: all step again after {seconds[len(seconds) // 2]:.2f} s (median), "
        f"{seconds[math.ceil(0.95 * len(seconds)) - 1]:.2f} s (p95); {len(mixed)} mixed checkpoints"
    )


def test_gang_goes_on_in_its_pods_when_a_rank_is_killed(begin: Beginner) -> None:
    training = begin()
    check_campaign(training, 2, campaign(training, 2, seed=1))
    record = read_record(training.store, incarnation_key(RunLayout("night"), "fit", 1, 2), IncarnationRecord)
    assert (record.cause, record.exit_code) == ("infrastructure", 137)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("retries", [Retries(spare=False), Retries(spare=True)], ids=["anew", "spare"])
def test_gang_goes_on_after_each_of_many_kills(begin: Beginner, retries: Retries) -> None:
    """TIPHYS_GANG_KILLS=200 says how many; the last line says how long all ranks stood still."""
    kills = int(os.environ.get("TIPHYS_GANG_KILLS", "20"))
    training = begin(retries)
    check_campaign(training, kills, campaign(training, kills, seed=20))


@pytest.mark.heavy
def test_gang_that_dies_again_before_a_checkpoint_gets_new_pods(begin: Beginner) -> None:
    training = begin()
    training.until_committed(1, 1)
    (training.traces / "kill-2-1").touch()  # at the first step of the next process
    os.kill(training.pid(2), signal.SIGKILL)
    training.until_all_step(2, 1)
    assert training.end() == "Succeeded", training.logs()
    assert training.outcomes() == ["failed:infrastructure 2", "done 1"]


@pytest.mark.heavy
def test_gang_fails_by_the_error_of_one_member_and_not_by_those_that_lost_it(begin: Beginner) -> None:
    training = begin()
    training.until_committed(1, 1)
    (training.traces / "bug-1-2").touch()
    assert training.phase.result(PATIENCE) == "Failed", training.logs()
    assert training.outcomes() == ["failed:user_error 1"]


@pytest.mark.heavy
def test_gang_whose_author_refuses_restarts_gets_new_pods(begin: Beginner) -> None:
    training = begin(Retries(in_place=False))
    training.until_committed(1, 1)
    os.kill(training.pid(2), signal.SIGKILL)
    training.until_all_step(2, 1)
    assert training.end() == "Succeeded", training.logs()
    assert training.outcomes() == ["failed:infrastructure 1", "done 1"]


@pytest.mark.heavy
def test_gang_that_is_asked_to_end_gets_new_pods(begin: Beginner) -> None:
    """The program of one member dies while the pod of another one goes."""
    training = begin()
    training.until_committed(1, 1)
    launcher = int(Path(f"/proc/{training.pid(3)}/stat").read_text().rpartition(")")[2].split()[1])
    victim = training.pid(1)
    os.kill(launcher, signal.SIGTERM)
    with contextlib.suppress(ProcessLookupError):  # the ranks may have saved and ended together before this one dies
        os.kill(victim, signal.SIGKILL)
    until(lambda: len(training.outcomes()) == 1, PATIENCE)
    training.until_all_step(2, 1)
    assert training.end() == "Succeeded", training.logs()
    assert training.outcomes()[-1] == "done 1"
