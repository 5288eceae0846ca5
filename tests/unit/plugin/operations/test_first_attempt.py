"""The first attempt of a step is opened by one write, because winning it says that there was none before.

| step of the run's first submission            | admit                                           |
|-----------------------------------------------|-------------------------------------------------|
| never asked about                             | one look for a later submission, one write      |
| asked about before, by this node              | the recorded answer                             |
| asked about before, by another node           | the attempt before is ended, or what it made is taken over |
| a later submission was claimed                | refused, nothing written                        |
"""

import pytest
from support.fakes.counting_store import CountingStore
from support.stories.plugin import Flow, World, keys, outputs, phase, prep, said, world
from tiphys_plugin.operations import admit

from tiphys.records import AttemptClaim, SubmissionClaim, SubmissionKind
from tiphys.store import DirectoryStore, RunLayout, claim_record

ATTEMPTS = "control/runs/digits-abc12/attempts"
PLAIN = prep(parameters=())


@pytest.fixture
def here(tmp_path) -> World:
    return world(tmp_path, store=CountingStore(DirectoryStore(tmp_path / "store")))


@pytest.fixture
def flow(here) -> Flow:
    """A workflow whose place is known."""
    flow = here.submit(PLAIN, prep(name="known", template="t-known"))
    assert outputs(flow.admit("known"))["run"] == "true"
    here.store.requests.clear()
    return flow


def test_the_first_attempt_costs_one_read_and_one_write(flow):
    assert outputs(flow.admit("prep"))["attempt"] == "1"
    assert flow.world.store.requests == {"read": 1, "create": 1}


def test_asking_again_gives_the_recorded_answer(flow):
    first = flow.admit("prep")
    assert flow.admit("prep") == first
    assert keys(flow.world.store, f"{ATTEMPTS}/prep/") == [f"{ATTEMPTS}/prep/000000001.json"]


def test_a_second_node_of_the_step_takes_over_the_attempt_of_the_first(flow):
    flow.write_output(flow.admit("prep"), "0/artifacts/data", b"rows")
    assert phase(flow.conclude("prep")) == "Succeeded"
    again = flow.call({**flow.body("admit", "prep"), "node": "digits-abc12.again.prep.admit"})
    assert said(again) == "Adopted from attempt 1"


def test_the_loser_of_the_race_for_an_attempt_waits_for_the_winner(flow, monkeypatch):
    winner = AttemptClaim(
        run="digits-abc12",
        step="prep",
        attempt=1,
        submission=1,
        uid="uid-1",
        node="digits-abc12.other.prep.admit",
        instance="digits-abc12.prep",
        step_key="k",
    )

    def rival_claims(point: str) -> None:
        if point == "admit.before_claim":
            flow.world.store.create(f"{ATTEMPTS}/prep/000000001.json", winner.to_bytes())
            flow.pod("prep", 1, retry=None)

    with monkeypatch.context() as patched:
        patched.setattr(admit, "failpoint", rival_claims)
        reply = flow.admit("prep")
    assert phase(reply) == "Pending"
    assert "pod" in said(reply)
    assert keys(flow.world.store, f"{ATTEMPTS}/prep/") == [f"{ATTEMPTS}/prep/000000001.json"]


def test_a_workflow_whose_run_went_on_opens_none(flow):
    newer = SubmissionClaim(
        run="digits-abc12", submission=2, kind=SubmissionKind.RESUME, workflow_name="digits-abc12-2", namespace="ml"
    )
    claim_record(flow.world.store, RunLayout("digits-abc12").submission(2), newer)
    refused = flow.admit("prep")
    assert phase(refused) == "Failed"
    assert "submission 2 has taken over" in said(refused)
    assert keys(flow.world.store, f"{ATTEMPTS}/prep/") == []
