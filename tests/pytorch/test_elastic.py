"""torchrun on several nodes, one of which is lost: the others go on, in the same attempt and to the same end.

The nodes are processes of the local engine, from what compile has made of
``nodes="2:4"``, on a queue that has room for three. What the ranks compute does
not depend on their number.

| a node | the others go on |
|---|---|
| is killed while all are inside one step | from the newest checkpoint |
| is told to go, as by a drain | from what all have saved together before it went |
| is lost and was the first, where torchrun meets | the same, and meet at the next one |
| comes, after one was lost | with it, from what all have saved together; no node comes below the local engine |
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed here: make test-torch")

from hera.workflows import DAG, Parameter
from support.builders.lineage import claim_of, write_claim
from support.fakes.resource_templates import filled_in
from support.processes.polling import until
from tiphys_controller import start_run
from tiphys_plugin import DirectoryCluster

from hera_pipelines import Checkpoints, Pipeline, Train
from hera_pipelines.local.nodes import NodeChange
from hera_pipelines.local.pods.gang_pods import member_templates
from hera_pipelines.local.run_session import LocalSession
from tiphys.lineage.select import list_commits
from tiphys.records import AttemptEndOutcome
from tiphys.store import DirectoryStore, read_step_attempts

pytestmark = pytest.mark.timeout(1800)  # only a deadlock takes so long

SECONDS = 600.0
QUEUES = "queues: [{name: research, gpus: {A100: 3}}]"

TRAIN = """
import json, os, pathlib, sys, time
import torch
import torch.distributed as dist
from tiphys import checkpoint

folder = pathlib.Path(os.environ["TRAINER_FOLDER"])
last, held, holds, pause = json.loads(os.environ["TRAINER_PLAN"])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def tell(name, **facts):
    (folder / (name + ".new")).write_text(json.dumps(facts))
    (folder / (name + ".new")).rename(folder / (name + ".json"))

dist.init_process_group("gloo")
with checkpoint.session() as session:
    state = session.restore(default={"step": 0, "weights": torch.zeros(8).numpy()})
    weights = torch.from_numpy(state["weights"].copy())
    while world < 3 and not (folder / "killed").exists():  # the third node is late, and torchrun starts all anew
        if session.should_stop:
            sys.exit(75)
        time.sleep(0.02)
    tell(f"began-{world}-{rank}", step=state["step"])
    for step in range(state["step"] + 1, last + 1):
        gradient = torch.full((8,), float(step))
        dist.all_reduce(gradient)
        weights += gradient / world
        session.step(step, lambda: {"step": step, "weights": weights.numpy()})
        time.sleep(pause)
        if step == held and not (folder / "killed").exists():
            node = os.environ["NODE_RANK"]
            tell(f"held-{world}-{node}", agent=os.getppid(), worker=os.getpid())
            while holds and not (folder / "killed").exists():
                if session.should_stop:
                    break
                time.sleep(0.02)
    if rank == 0:
        path = pathlib.Path(os.environ["TIPHYS_OUTPUT_WEIGHTS"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(weights.tolist()))
dist.destroy_process_group()
"""


class Plan(NamedTuple):
    """How many steps there are, at which all are ready to lose a node, or wait for it, and how long each takes."""

    last: int
    held: int
    holds: bool
    pause: float
    every: str


def pipeline(folder: Path, plan: Plan) -> dict[str, Any]:
    # Nobody waits long for more nodes than there are; whoever is slow, as on a busy machine, is not missed too soon.
    quick = "join_timeout=600,read_timeout=600,last_call_timeout=5"
    with Pipeline("digits", store="s3://ml-runs/tiphys", entrypoint="main") as made:
        fit = Train(
            name="fit",
            image="i",
            command=["python", "-m", "torch.distributed.run", "train.py"],
            env={
                "TRAINER_FOLDER": str(folder),
                "TRAINER_PLAN": json.dumps(plan[:4]),
                "PET_RDZV_CONF": quick,
                "OMP_NUM_THREADS": "1",
            },
            outputs=[Parameter(name="weights", value_from={"path": "/tmp/weights"})],
            nodes="2:4",
            gpus=1,
            gpu_type="A100",
            queue="research",
            grace="2m",
            checkpoints=Checkpoints(every=plan.every, keep_last=None),
        )
        with DAG(name="main"):
            fit()
    manifest: dict[str, Any] = made.to_dict()
    return manifest


class Training:
    """One run on this machine, in a thread."""

    def __init__(self, folder: Path, plan: Plan, pool: ThreadPoolExecutor) -> None:
        self.folder = folder
        self.plan = plan
        self.store = DirectoryStore(folder / "store")
        self.changes: list[NodeChange] = []
        self.phase: Future[str] = pool.submit(self._run)

    def _run(self) -> str:
        with LocalSession(
            self.store,
            self.folder / "state",
            self.folder / "queues.yaml",
            observer=self.changes.append,
            code=self.folder / "code",
        ) as session:
            made = start_run(self.store, session, pipeline(self.folder, self.plan), "run")
            return str(session.run(made.workflow_name))

    def said(self, name: str) -> dict[str, Any]:
        """What a rank has told."""
        path = self.folder / f"{name}.json"
        until(lambda: path.exists() or self.phase.done(), SECONDS)
        assert path.exists(), self.logs()
        document: dict[str, Any] = json.loads(path.read_text())
        return document

    def held(self) -> None:
        """Return once three nodes are ready to lose one."""
        for node in range(3):
            self.said(f"held-3-{node}")

    def go_on(self) -> None:
        """Have the nodes that are left reach the end: in the same attempt, with what all would have computed."""
        (self.folder / "killed").touch()
        assert self.phase.result(SECONDS) == "Succeeded", self.logs()
        [attempt] = read_step_attempts(self.store, "run", "fit")
        assert attempt.end is not None
        assert attempt.end.outcome is AttemptEndOutcome.DONE
        [output] = attempt.end.outputs
        assert json.loads(output.value or "") == [float(sum(range(1, self.plan.last + 1)))] * 8
        said = "\n".join(change.message for change in self.changes)
        assert "Attempt 1, 3 of 4 pods, holds 3 A100" in said
        assert "2 of its 3 nodes were left in the end" in said

    def began_with_two(self) -> int:
        """The step from which the two nodes that are left have gone on."""
        [step] = {self.said(f"began-2-{rank}")["step"] for rank in range(2)}
        return int(step)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted((self.folder / "state" / "logs").glob("*fit*")))


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[Plan], Training]]:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(TRAIN)
    (tmp_path / "queues.yaml").write_text(QUEUES)
    with ThreadPoolExecutor(1) as pool:
        yield lambda plan: Training(tmp_path, plan, pool)
        (tmp_path / "killed").touch()  # so that nothing goes on if the test has failed


@pytest.mark.parametrize("node", [2, 0])
def test_the_others_go_on_from_the_newest_checkpoint_when_a_node_is_lost(
    begin: Callable[[Plan], Training], node: int
) -> None:
    training = begin(Plan(last=12, held=6, holds=True, pause=0.0, every="2 steps"))
    training.held()
    until(lambda: any(ref.global_step == 6 for ref in list_commits(training.store, "run/fit")), SECONDS)
    lost = training.said(f"held-3-{node}")
    launcher = int(Path(f"/proc/{lost['agent']}/stat").read_text().rpartition(")")[2].split()[1])
    for number in (launcher, lost["agent"], lost["worker"]):  # none of them has a word to say
        with contextlib.suppress(ProcessLookupError):  # the kernel ends torchrun with its launcher
            os.kill(number, signal.SIGKILL)
    training.go_on()
    assert training.began_with_two() in range(6, 12), "nothing that was saved was trained again"
    newest = list_commits(training.store, "run/fit")[0]
    assert (newest.attempt, newest.global_step) == (1, 12)


@pytest.mark.parametrize("node", [2, 0])
def test_members_save_before_a_node_goes_and_the_others_continue_from_there(
    begin: Callable[[Plan], Training], node: int
) -> None:
    # What one rank is told reaches the others in some seconds, at whatever pace they train, if it is steady: a wait
    # would be taken for the pace, and the step at which all shall save would come before they know of it. So nothing
    # is held, and the pause is most of a step, also on a busy machine.
    training = begin(Plan(last=400, held=25, holds=False, pause=0.05, every="1000000 steps"))
    training.held()
    cluster = DirectoryCluster(training.folder / "state" / "cluster")
    [goes] = [pod for pod in cluster.attempt_pods() if pod.rank == node]
    cluster.delete_pod(goes)
    training.go_on()
    [saved] = list_commits(training.store, "run/fit")
    assert training.began_with_two() == saved.global_step
    assert saved.global_step < 400


GROWS = """
import json, os, pathlib, time
import torch
import torch.distributed as dist
from tiphys import checkpoint

folder = pathlib.Path(os.environ["TRAINER_FOLDER"])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
trace = open(folder / f"trace-{os.environ['NODE_RANK']}", "a", buffering=1)

def tell(**facts):
    facts |= {"at": time.time(), "rank": rank, "world": world, "worker": os.getpid(), "agent": os.getppid()}
    trace.write(json.dumps(facts) + "\\n")

dist.init_process_group("gloo")
with checkpoint.session() as session:
    state = session.restore(default={"step": 0, "total": 0})
    step, total = state["step"], state["total"]
    tell(begins=step)
    ends = False
    while not ends:
        gradient = torch.tensor([float(step + 1), float((folder / "enough").exists())])
        dist.all_reduce(gradient)
        step, total, ends = step + 1, total + int(gradient[0]) // world, bool(gradient[1])
        session.step(step, {"step": step, "total": total})
        tell(step=step, total=total)
dist.destroy_process_group()
"""


class Members:
    """The launchers of an elastic gang, each started by hand, as pods of the Job that compile has written."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, DirectoryStore(folder / "store")
        write_claim(self.store, claim_of(1, run="run"))
        (folder / "train.py").write_text(GROWS)
        self._templates = self._read_templates()
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def _read_templates(self) -> list[dict[str, Any]]:
        with Pipeline("digits", store="s3://ml-runs/tiphys", entrypoint="main") as made:
            fit = Train(
                name="fit",
                image="i",
                command=["python", "-m", "torch.distributed.run", "train.py"],
                env={"TRAINER_FOLDER": str(self.folder), "OMP_NUM_THREADS": "1"},
                nodes="2:4",
                grace="2m",
                checkpoints=Checkpoints(every="20 steps", keep_last=None),
            )
            with DAG(name="main"):
                fit()
        [run] = [template for template in made.to_dict()["spec"]["templates"] if template["name"] == "fit-run"]
        answers = {
            "run-id": "run",
            "attempt": "1",
            "lineage": "run/fit",
            "resume-from": "",
            "checkpoint-uri": "u",
            "gang": "gang",
            "members": "4",
            "spare": "2",
            "gates": "",
            "tolerations": "",
            "input-keys": "{}",
            "node-requirements": "{}",
        }
        values = {f"inputs.parameters.tiphys-{name}": value for name, value in answers.items()}
        job = filled_in(run["resource"]["manifest"], {**values, "workflow.uid": "uid-1", "node.name": "fit"})
        job["spec"]["completions"] = 5  # as after a growth: the fifth is started later
        return member_templates(job)

    def start(self, number: int) -> None:
        container = self._templates[number]["container"]
        variables = {variable["name"]: variable["value"] for variable in container["env"]}
        stores = dict.fromkeys(("TIPHYS_STORE", "TIPHYS_CHECKPOINT_STORE"), self.store.url)
        environ = {**os.environ, **variables, **stores, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        with (self.folder / f"log-{number}").open("wb") as log:
            words = [*container["command"], *(container.get("args") or [])]
            self.processes[number] = subprocess.Popen(
                words, env=environ, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
            )

    def facts(self, number: int) -> list[dict[str, Any]]:
        path = self.folder / f"trace-{number}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def until_all_step(self, numbers: Collection[int], after: int = 0) -> None:
        """Return once these members, and no others, have trained beyond the step ``after``."""
        world = len(numbers)

        def holds() -> bool:
            assert all(self.processes[number].poll() is None for number in numbers), self.logs()
            newest = [self.facts(number)[-1:] for number in numbers]
            return all(
                facts and facts[0]["world"] == world and facts[0].get("step", 0) > after + 25 for facts in newest
            )

        until(holds, SECONDS)

    def last_step(self, number: int, world: int) -> int:
        return max(fact["step"] for fact in self.facts(number) if fact["world"] == world and "step" in fact)

    def standstill(self, numbers: Collection[int]) -> float:
        """Seconds between the last step of any of these members in the world before and the first that all take now."""
        facts = [[fact for fact in self.facts(number) if "step" in fact] for number in numbers]
        before = max(fact["at"] for of_member in facts for fact in of_member if fact["world"] != of_member[-1]["world"])
        return float(max(next(fact["at"] for fact in steps if fact["at"] > before) for steps in facts) - before)

    def kill(self, number: int) -> None:
        fact = self.facts(number)[-1]
        for pid in (self.processes[number].pid, fact["agent"], fact["worker"]):
            with contextlib.suppress(ProcessLookupError):  # the kernel ends torchrun with its launcher
                os.kill(pid, signal.SIGKILL)
        self.processes.pop(number).wait()

    def end(self) -> None:
        (self.folder / "enough").touch()
        for process in self.processes.values():
            assert process.wait(SECONDS) == 0, self.logs()

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("log-*")))


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Members]:
    made = Members(tmp_path)
    yield made
    for process in made.processes.values():
        process.kill()
        process.wait()


def test_members_save_at_one_step_and_go_on_with_a_node_that_joins_after_one_was_lost(
    gang: Members, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        gang.start(number)
    gang.until_all_step(range(4))
    gang.kill(3)
    gang.until_all_step(range(3), gang.last_step(0, 4))
    lost = gang.standstill(range(3))
    gang.start(4)
    gang.until_all_step([0, 1, 2, 4], gang.last_step(0, 3))
    with capsys.disabled():
        sys.stderr.write(
            f"\nstood still for {lost:.1f} s when a node was lost, {gang.standstill(range(3)):.1f} s to grow\n"
        )
    [begun] = {[fact["begins"] for fact in gang.facts(number) if "begins" in fact][-1] for number in (0, 1, 2, 4)}
    assert begun >= gang.last_step(0, 3), "no step is lost to a node that joins"
    assert any(ref.global_step == begun for ref in list_commits(gang.store, "run/fit"))
    gang.end()
    [newest] = {(gang.facts(number)[-1]["step"], gang.facts(number)[-1]["total"]) for number in (0, 1, 2, 4)}
    assert newest[1] == sum(range(1, newest[0] + 1)), "each step counts once"
