"""When GPUs come back of which nobody has seen the pods end.

| the attempt           | its pod        | declared time | its GPUs                        |
|-----------------------|----------------|---------------|---------------------------------|
| ended by force        | lives          | none          | are held, for ever              |
| ended by force        | ends at last   | none          | come back                       |
| ended by force        | lives          | over          | come back, counted and told     |
| of a workflow over    | lives          | over          | come back, and it is fenced     |
| cannot be fenced      | lives          | over          | are held until it can           |
| goes on               | lives          | over          | are held                        |
| ended by force        | lives          | a clock jumps | are held                        |
"""

import pytest
from support.stories.plugin import Flow, World, fit, gpus, phase, said, workflow, world
from tiphys_plugin import Queues
from tiphys_plugin.operations import lease_reclaim

from tiphys.checkpoint.save.commit import check_fence
from tiphys.errors import FencedError, StoreError
from tiphys.store import read_events

RUN = "digits-abc12"
LIMIT = 300


def rules(limit: int | None = LIMIT) -> Queues:
    queue = {"name": "research", "gpus": {"A100": 8}}
    return Queues.model_validate({"queues": [queue], "force_release_after_seconds": limit})


@pytest.fixture
def here(tmp_path) -> World:
    return world(tmp_path, rules())


@pytest.fixture
def patient(tmp_path) -> World:
    return world(tmp_path, rules(None))


def lost(here: World) -> Flow:
    """A training that holds all GPUs, on a node that is cut off; it has been ended by force."""
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    flow.pod("fit", 1)
    while phase(flow.end_try("fit", 0, status="Error", exit_code="-1")) == "Pending":
        here.clock.advance(12)
    return flow


def another(here: World) -> Flow:
    return here.submit(fit(gpu=gpus(8)), name="other-xyz99", uid="uid-2")


def time_passes(here: World, waiting: Flow, looks: int, seconds: float = LIMIT / 5) -> None:
    """Somebody waits and asks meanwhile."""
    for _ in range(looks):
        here.clock.advance(seconds)
        waiting.admit("fit", 0)


def holders(here: World) -> list[str]:
    return [lease.request.uid for lease in here.ledger.snapshot().leases]


def test_no_time_takes_gpus_away_that_may_be_in_use(patient):
    flow, waiting = lost(patient), another(patient)
    time_passes(patient, waiting, 4, 86_400)
    assert holders(patient) == ["uid-1"]
    assert "holds 8 of 8 A100" in said(waiting.admit("fit", 0))
    flow.pod("fit", 1, phase="Failed")
    time_passes(patient, waiting, 1)
    assert holders(patient) == ["uid-2"]
    assert b"tiphys_leases_forced_total 0.0" in patient.core.metrics.render()


def test_gpus_come_back_after_a_declared_time_and_that_is_counted_and_reported(here):
    lost(here)
    waiting = another(here)
    time_passes(here, waiting, 5)
    assert holders(here) == ["uid-1"]
    time_passes(here, waiting, 1)
    assert holders(here) == ["uid-2"]
    assert b"tiphys_leases_forced_total 1.0" in here.core.metrics.render()
    [event] = [one for one in read_events(here.store, RUN) if one.name == "lease.forced"]
    assert (event.step, event.attempt, event.data["gpus"]) == ("fit", 1, 8)
    assert "within 300 s" in event.message
    with pytest.raises(FencedError):
        check_fence(here.store, RUN, "fit", 1)


def over(here: World) -> None:
    """A workflow that failed, whose training goes on saving on a node that is cut off."""
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    flow.pod("fit", 1)
    here.cluster.write_workflow(workflow([fit(gpu=gpus(8))]) | {"status": {"phase": "Failed"}})


def test_an_attempt_without_an_end_is_fenced_before_its_gpus_are_taken_back(here):
    over(here)
    check_fence(here.store, RUN, "fit", 1)
    time_passes(here, another(here), 6)
    assert holders(here) == ["uid-2"]
    with pytest.raises(FencedError):
        check_fence(here.store, RUN, "fit", 1)


def test_a_holder_that_cannot_be_fenced_keeps_its_gpus(here, monkeypatch):
    over(here)
    waiting = another(here)
    with monkeypatch.context() as patched:
        patched.setattr(lease_reclaim, "fence_lease_holder", failing)
        time_passes(here, waiting, 8)
    assert holders(here) == ["uid-1"]
    time_passes(here, waiting, 1)
    assert holders(here) == ["uid-2"]


def failing(*_: object) -> None:
    raise StoreError("no space left")


def test_a_holder_with_a_live_pod_is_never_overdue(here):
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    flow.pod("fit", 1)
    time_passes(here, another(here), 8)
    assert holders(here) == ["uid-1"]


@pytest.mark.parametrize("hours", [24, -24])
def test_a_clock_that_jumps_takes_nothing_back(here, hours):
    lost(here)
    waiting = another(here)
    time_passes(here, waiting, 2)
    here.clock.advance(hours * 3600)
    waiting.admit("fit", 0)
    assert holders(here) == ["uid-1"]


def listed_runs(here: World, monkeypatch) -> list[str]:
    """The runs whose pods are listed from now on."""
    runs: list[str] = []
    pods = here.cluster.pods

    def listing(namespace: str, run: str, *of_attempt: str):
        runs.append(run)
        return pods(namespace, run, *of_attempt)

    monkeypatch.setattr(here.cluster, "pods", listing)
    return runs


def test_end_of_a_workflow_lists_the_pods_of_no_other(here, monkeypatch):
    flow = here.submit(fit(gpu=gpus(4)))
    others = [here.submit(fit(gpu=gpus(2)), name=f"other-{n}", uid=f"uid-{n}") for n in (2, 3)]
    for each in (flow, *others):
        each.admit("fit", 0)
    here.clock.advance(3600)
    here.cluster.write_workflow(workflow([fit(gpu=gpus(4))]) | {"status": {"phase": "Failed"}})
    runs = listed_runs(here, monkeypatch)
    flow.finalize("Failed")
    assert set(runs) == {RUN}
    assert holders(here) == ["uid-2", "uid-3"]


def test_holder_that_goes_on_costs_a_waiting_request_no_listing_of_pods(here, monkeypatch):
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    flow.pod("fit", 1)
    runs = listed_runs(here, monkeypatch)
    here.clock.advance(3600)
    assert "holds 8 of 8 A100" in said(another(here).admit("fit", 0))
    assert RUN not in runs
