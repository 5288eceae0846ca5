"""An elastic gang gets members back while it trains, and its pods the nodes of its lease.

| its members                                  | GPUs are idle | what follows                                        |
|----------------------------------------------|---------------|-----------------------------------------------------|
| one is lost                                  | yes           | its lease shrinks, then grows, and the Job makes one |
| one is lost                                  | no            | its lease shrinks                                   |
| all run, fewer than the most                 | yes           | it grows, once in ten minutes                       |
| one waits for its node, or is to leave       | yes           | it does not grow                                    |
| the service dies before the Job has grown    |               | the next round has it grow                          |
| the Job may not be changed                   |               | the GPUs come back                                  |
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.stories.plugin import Flow, World, fit, gpus, outputs, said
from support.stories.plugin_with_gangs import JOB, WithGangs, gang_world, pod
from tiphys_plugin import PluginCore, PodStatus, Queues
from tiphys_plugin.cluster.interface import GangStatus
from tiphys_plugin.eviction.loop import PreemptionLoop
from tiphys_plugin.quota.lease import Lease
from tiphys_plugin.runtime.context import SingleStore

from tiphys.errors import ForbiddenError
from tiphys.protocol.gang import GANG_LABEL, GangPhase, GangSpec
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL

GANG = GangSpec(members=4, min_members=2)
QUEUES: dict[str, Any] = {"queues": [{"name": "research", "gpus": {"A100": 8}}]}
NODES = {"nodes": [{"name": f"n{number}", "gpu_type": "A100", "gpus": 2} for number in range(1, 6)]}
TEN_MINUTES = 600.0


class GrowingJobs(WithGangs):
    """Its Jobs make the members that they are asked for, as pods that wait for a node or run at once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_gated = False
        self.error: Exception | None = None

    def grow_gang(self, gang: GangStatus, made: int, min_members: int) -> None:
        if self.error is not None:
            raise self.error
        found = self.objects[gang.name]
        assert found.remaining is not None
        for rank in range(found.made, made):
            self.make(rank)
        assert made >= min_members
        self.objects[gang.name] = replace(found, made=made, remaining=found.remaining + made - found.made)

    def make(self, rank: int, **fields: object) -> None:
        labels = {RUN_LABEL: "digits-abc12", STEP_LABEL: "fit", ATTEMPT_LABEL: "1", GANG_LABEL: "job"}
        phase = "Pending" if self.is_gated else "Running"
        self.write_pod(pod(rank, phase, None, **{"labels": labels, "is_gated": self.is_gated, **fields}))

    def place_pod(self, pod: PodStatus, node: str) -> None:
        assert pod.is_gated
        placed = {"is_gated": False, "planned_host": node, "host": node, "phase": "Running"}
        self.write_pod(pod.model_copy(update=placed))

    def lose_member(self, rank: int) -> None:
        self.lose(pod(rank))
        [name] = self.objects
        found = self.objects[name]
        assert found.remaining is not None
        self.objects[name] = replace(found, remaining=found.remaining - 1)


class Story:
    """A training on two to four nodes of two GPUs."""

    def __init__(self, folder: Path, queues: dict[str, Any]) -> None:
        self.here: World = gang_world(folder, Queues.model_validate(queues))
        self.cluster = GrowingJobs(folder / "cluster")
        self.here.cluster = self.cluster
        self.here.core = PluginCore(
            self.here.store,
            self.cluster,
            self.here.ledger,
            clock=self.here.clock,
            settings=self.here.core._context.settings,
        )

    def start(self, *, is_gated: bool = False) -> dict[str, str]:
        self.flow: Flow = self.here.submit(fit(artifacts=(), gang=GANG, gpu=gpus(8, members=4, min_members=2)))
        answer = outputs(self.flow.admit("fit", 0))
        members = int(answer["members"])
        self.cluster.is_gated = is_gated
        self.cluster.objects[answer["gang"]] = replace(
            JOB, name=answer["gang"], stage=GangPhase.ACTIVE, remaining=members, made=members, has_waiting_pods=True
        )
        for rank in range(members):
            self.cluster.make(rank)
        return answer

    def other(self, gpu_count: int) -> str:
        """Another training; the id of its lease."""
        other = self.here.submit(fit(gpu=gpus(gpu_count)), name="other-abc12", uid="uid-2")
        assert outputs(other.admit("fit", 0))["run"] == "true"
        [lease] = [lease.id for lease in self.here.ledger.snapshot().leases if lease.request.uid == "uid-2"]
        return lease

    def look(self) -> Lease:
        """One round; the lease after it."""
        PreemptionLoop(self.here.ledger, self.cluster, SingleStore(self.here.store), clock=self.here.clock).run_once()
        [lease] = [lease for lease in self.here.ledger.snapshot().leases if lease.request.uid == "uid-1"]
        return lease

    def ranks(self) -> list[int]:
        return sorted(pod.rank or 0 for pod in self.cluster.attempt_pods() if GANG_LABEL in pod.labels)

    def nodes(self) -> dict[int, str]:
        return {pod.rank or 0: pod.planned_host for pod in self.cluster.attempt_pods() if GANG_LABEL in pod.labels}


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path, QUEUES)


def members(lease: Lease) -> int:
    assert lease.request.gpus == 2 * lease.request.members
    return lease.request.members


def test_a_lost_member_is_replaced_by_one_with_a_new_number(story: Story) -> None:
    story.start()
    story.here.clock.advance(TEN_MINUTES)
    assert members(story.look()) == 4
    story.cluster.lose_member(1)
    assert members(story.look()) == 3
    assert members(story.look()) == 4
    assert story.ranks() == [0, 2, 3, 4]
    story.cluster.lose_member(2)
    story.look()
    assert members(story.look()) == 3, "it has just grown"
    story.here.clock.advance(TEN_MINUTES)
    assert members(story.look()) == 4
    assert story.ranks() == [0, 3, 4, 5]


def test_a_gang_that_began_with_fewer_grows_when_gpus_come_free(story: Story) -> None:
    other = story.other(4)
    assert story.start()["members"] == "2"
    story.here.clock.advance(TEN_MINUTES)
    assert members(story.look()) == 2
    story.here.ledger.release(other)
    assert members(story.look()) == 4
    assert story.ranks() == [0, 1, 2, 3]


@pytest.mark.parametrize("fields", [{"phase": "Pending"}, {"ending": True}], ids=["waits", "leaves"])
def test_a_gang_with_a_member_that_does_not_run_does_not_grow(story: Story, fields: dict[str, object]) -> None:
    story.other(4)
    story.start()
    story.here.ledger.release(story.here.ledger.snapshot().leases[0].id)
    phase = str(fields.pop("phase", "Running"))
    labels = {RUN_LABEL: "digits-abc12", STEP_LABEL: "fit", ATTEMPT_LABEL: "1", GANG_LABEL: "job"}
    story.cluster.write_pod(pod(1, phase, None, labels=labels, **fields))
    story.here.clock.advance(TEN_MINUTES)
    assert members(story.look()) == 2


def test_a_growth_that_a_service_did_not_finish_is_carried_out_by_the_next(story: Story) -> None:
    other = story.other(4)
    story.start()
    story.here.ledger.release(other)
    story.here.clock.advance(TEN_MINUTES)
    [lease] = story.here.ledger.snapshot().leases
    assert story.here.ledger.grow(lease.id, 2) is not None
    assert story.ranks() == [0, 1]
    assert members(story.look()) == 4
    assert story.ranks() == [0, 1, 2, 3]
    assert members(story.look()) == 4
    assert story.ranks() == [0, 1, 2, 3]


def test_a_job_that_may_not_be_changed_gives_its_new_gpus_back(story: Story) -> None:
    other = story.other(4)
    story.start()
    story.here.ledger.release(other)
    story.here.clock.advance(TEN_MINUTES)
    story.cluster.error = ForbiddenError("jobs.batch may not be patched")
    assert members(story.look()) == 2
    assert members(story.look()) == 2


def test_a_gang_that_is_ending_does_not_grow(story: Story) -> None:
    story.start()
    story.cluster.lose_member(3)
    story.here.clock.advance(TEN_MINUTES)
    assert members(story.look()) == 3
    [name] = story.cluster.objects
    story.cluster.objects[name] = replace(story.cluster.objects[name], stage=GangPhase.ENDING)
    assert members(story.look()) == 3


def placed(nodes: Collection[str]) -> set[str]:
    assert "" not in nodes
    assert len(nodes) == len({*nodes}), "each has two GPUs, as a member needs"
    return {*nodes}


def test_pods_of_a_gang_are_sent_to_the_nodes_of_its_lease_and_a_later_one_to_its_own(tmp_path: Path) -> None:
    story = Story(tmp_path, QUEUES | NODES)
    answer = story.start(is_gated=True)
    assert answer["gates"] == '{"name": "tiphys.dev/node"}'
    assert '"operator": "Exists"' in answer["node-requirements"]
    assert placed(story.nodes().values() if story.look() else ()) == {*story.look().nodes}
    story.cluster.lose_member(2)
    assert members(story.look()) == 3
    story.here.clock.advance(TEN_MINUTES)
    assert members(story.look()) == 4
    assert story.nodes()[4] == ""
    assert placed(story.nodes().values() if story.look() else ()) == {*story.look().nodes}


def test_pods_of_a_gang_wait_for_their_nodes_until_all_exist(tmp_path: Path) -> None:
    story = Story(tmp_path, QUEUES | NODES)
    story.start(is_gated=True)
    story.cluster.lose(pod(3))
    story.look()
    assert {*story.nodes().values()} == {""}
    story.cluster.make(3)
    story.look()
    assert len(placed(story.nodes().values())) == 4


def test_pods_of_a_gang_get_nodes_though_one_was_lost_before(tmp_path: Path) -> None:
    story = Story(tmp_path, QUEUES | NODES)
    story.start(is_gated=True)
    story.cluster.lose_member(3)
    assert members(story.look()) == 3
    assert placed(story.nodes().values() if story.look() else ()) == {*story.look().nodes}


def test_a_gang_without_declared_nodes_has_no_gates(story: Story) -> None:
    assert story.start()["gates"] == ""


def test_more_members_may_be_lost_after_a_gang_has_grown(story: Story) -> None:
    """The end of the attempt is that of the first member that it could not spare, of all that were made."""
    answer = story.start()
    story.here.clock.advance(TEN_MINUTES)
    story.cluster.lose_member(3)
    story.look()
    story.look()
    assert story.ranks() == [0, 1, 2, 4]
    labels = {RUN_LABEL: "digits-abc12", STEP_LABEL: "fit", ATTEMPT_LABEL: "1", GANG_LABEL: "job"}
    for rank, seconds, code in ((4, 10.0, 1), (2, 20.0, 1), (1, 30.0, 137)):
        story.cluster.write_pod(pod(rank, "Failed", seconds, labels=labels, exit_code=code))
    story.cluster.write_pod(pod(0, "Failed", 40.0, labels=labels, exit_code=75))
    found = story.cluster.objects[answer["gang"]]
    story.cluster.objects[answer["gang"]] = replace(found, stage=GangPhase.FINISHED, remaining=1)
    assert "rank 1 of 5" in said(story.flow.end_try("fit", 0))
