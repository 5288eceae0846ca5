"""Controllers as processes, killed at named points of claim, create and record, alone and in company.

All of them reach one store and one API server over the network. Each may be
killed at a point of its own, and the answer to a create may be lost. A kill
counts only if the log of failpoints and the exit code both say that it happened.
Whoever goes on afterwards: there is one Workflow for each submission, it is the
bound one, and it does what was asked.
"""

import copy
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.processes.controller import ControllerProcess, kubeconfig
from support.processes.forked_controllers import ForkedControllers
from support.processes.polling import until
from support.servers.kube_server import KubeServer, serving
from support.stories.controller_crashes import PIPELINE, RUN, STORIES, check, failed_run
from tiphys_controller.kubernetes import KubernetesSubmitter

from tiphys.errors import ConflictError, StoreError
from tiphys.kube import identify_cluster
from tiphys.kube.resources import WORKFLOWS
from tiphys.protocol.auto_resume_policy import AUTO_RESUME_ANNOTATION, AutoResumePolicy
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION
from tiphys.store import open_store, read_submissions

SEED = 20261122
CASES = [(name, point, number) for name, story in STORIES.items() for point in story.points for number in (1, 2, 3)]
KILLED, REFUSED, UNANSWERED = -signal.SIGKILL, ConflictError.exit_code, StoreError.exit_code
ASKING = copy.deepcopy(PIPELINE)
ASKING["metadata"]["labels"] = {PIPELINE_ANNOTATION: "digits"}
ASKING["metadata"]["annotations"][AUTO_RESUME_ANNOTATION] = AutoResumePolicy().model_dump_json()
LOST_ANSWERS = 0.2
"""Share of the rounds in which a Workflow is created and nobody is told."""


class Cluster:
    """The Workflows of an API server."""

    def __init__(self, server: KubeServer) -> None:
        self._server = server

    def names(self) -> list[str]:
        return sorted(one["metadata"]["name"] for one in self._server.objects("workflows"))

    def uid(self, name: str) -> str:
        uid: str = self.manifest(name)["metadata"]["uid"]
        return uid

    def manifest(self, name: str) -> dict[str, Any]:
        [found] = [one for one in self._server.objects("workflows") if one["metadata"]["name"] == name]
        return found


@pytest.fixture
def resumers() -> Iterator[ForkedControllers]:
    with ForkedControllers() as found:
        yield found


class Round:
    """One story: a run that has failed, those who die over it, and one who goes on."""

    def __init__(self, resumers: ForkedControllers, folder: Path, url: str) -> None:
        folder.mkdir()
        self.resumers, self.folder, self.url = resumers, folder, url
        self.killed: Counter[str] = Counter()
        self.lost = 0

    def tell(self, rng: random.Random, name: str, point: str, number: int) -> None:
        story = STORIES[name]
        with serving() as server:
            api = server.api("default")
            store = open_store(self.url)
            failed_run(store, KubernetesSubmitter(api, identify_cluster(api)))
            api.patch(WORKFLOWS, "default", RUN, {"status": {"phase": "Failed"}})
            before = len(server.requests)
            losing = rng.random() < LOST_ANSWERS
            if losing:
                server.fail_next(0, verb="create", plural="workflows", done=True)
            others = [rng.choice(("", *story.points)) for _ in range(number - 1)]
            codes = self._tell(name, server, [point, *others])
            said = (name, point, others, codes, losing, self._log())
            # On a busy machine an answer may also come too late.
            assert set(codes) <= {0, KILLED, REFUSED, UNANSWERED}, said
            assert number > 1 or codes in ([KILLED], [UNANSWERED]), said
            self._go_on(name, server, said)
            check(name, story, store, Cluster(server))
            self.lost = losing and sum(one.verb == "create" for one in server.requests[before:])

    def _tell(self, name: str, server: KubeServer, points: list[str]) -> list[int]:
        failpoints = [f"{STORIES[name].verb}.{point}=crash" if point else "" for point in points]
        codes = self.resumers.tell(name, self.url, server.url, self.folder, failpoints)
        faults = self.folder / "faults"
        self.killed = Counter(faults.read_text().splitlines() if faults.exists() else [])
        assert codes.count(KILLED) == self.killed.total(), (codes, self.killed)
        return codes

    def _go_on(self, name: str, server: KubeServer, said: object) -> None:
        """An answer that is lost now is asked for again, as a person would."""
        for _ in range(5):
            [code] = self.resumers.tell(name, self.url, server.url, self.folder, go_on=True)
            if code != UNANSWERED:
                break
        assert code == 0 or (code == REFUSED and "is still running" in self._log().splitlines()[-1]), (code, said)

    def _log(self) -> str:
        return (self.folder / "log").read_text()


def campaign(resumers: ForkedControllers, folder: Path, url: str, kills: int) -> Counter[str]:
    """Tell stories, all of them before one is told again, until so many were killed; where, and answers lost."""
    rng, found = random.Random(SEED), Counter[str]()
    for number in count():
        if number % len(CASES) == 0:
            order = rng.sample(CASES, len(CASES))
        trial = Round(resumers, folder / str(number), url.format(number=number))
        trial.tell(rng, *order[number % len(CASES)])
        found += trial.killed
        found["answer lost"] += trial.lost > 0
        if found.total() - found["answer lost"] >= kills:
            return found
    raise AssertionError


def test_controllers_that_are_killed_make_one_workflow(resumers: ForkedControllers, tmp_path: Path) -> None:
    campaign(resumers, tmp_path, f"file://{tmp_path}/store-{{number}}", kills=8)


@pytest.mark.heavy
@pytest.mark.timeout(1500)
def test_three_hundred_controllers_that_are_killed_make_one_workflow_each_time(
    resumers: ForkedControllers, tmp_path: Path
) -> None:
    found = campaign(resumers, tmp_path, f"file://{tmp_path}/store-{{number}}", kills=300)
    points = {f"{story.verb}.{point}=crash" for story in STORIES.values() for point in story.points}
    assert points | {"answer lost"} == set(found)


@pytest.mark.heavy
@pytest.mark.timeout(1500)
def test_the_same_over_object_storage(bucket: str, tmp_path: Path) -> None:
    with ForkedControllers() as resumers:
        found = campaign(resumers, tmp_path, f"s3://{bucket}/{{number}}", kills=30)
    assert found["answer lost"] > 0


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_leaders_that_are_killed_one_after_the_other_make_one_workflow(tmp_path: Path) -> None:
    """What one has decided and another has claimed, the third sends."""
    faults = tmp_path / "faults"
    with serving() as server, ExitStack() as running:
        api = server.api("ml")
        server.add_namespace("tiphys")
        environment = {"KUBECONFIG": str(kubeconfig(server, tmp_path)), "TIPHYS_FAILPOINTS_LOG": str(faults)}
        store = open_store(f"file://{tmp_path}/store")

        def begin(name: str, point: str) -> ControllerProcess:
            given = [f"--store={store.url}", "--namespace=ml", "--auto-resume=on"]
            own = {"POD_NAME": name, "TIPHYS_FAILPOINTS": f"{point}=crash" if point else ""}
            return running.enter_context(ControllerProcess(given, {**environment, **own}))

        failed_run(store, KubernetesSubmitter(api, identify_cluster(api)), ASKING, "ml")
        api.patch(WORKFLOWS, "ml", RUN, {"status": {"phase": "Failed"}})
        for name, point in (("first", "automatic.after_intent"), ("second", "resume.after_claim")):
            assert begin(name, point).ended() == KILLED
        begin("third", "")
        until(
            lambda: read_submissions(store, RUN)[-1].binding is not None and len(read_submissions(store, RUN)) == 2,
            seconds=120,
        )

        assert faults.read_text().split() == ["automatic.after_intent=crash", "resume.after_claim=crash"]
        check("resume", STORIES["resume"], store, Cluster(server))
