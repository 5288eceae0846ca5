"""Fan-out items are known by their value, and equal ones by who asked first."""

import pytest
from support.stories.plugin import fit, outputs, phase, prep, records

from tiphys.records import item_step_id
from tiphys.store import read_step_attempts

SWEEP = prep(name="sweep", fan_out=True, parameters=())


def step_of(reply) -> str:
    return outputs(reply)["step"]


def test_item_has_a_step_id_of_its_own(here):
    flow = here.submit(SWEEP)
    assert step_of(flow.admit("sweep", item="0:a")) == item_step_id("sweep", "a", 0)
    assert step_of(flow.admit("sweep", item="1:b")) == item_step_id("sweep", "b", 0)


def test_equal_items_are_distinguished_and_keep_their_place(here):
    flow = here.submit(SWEEP)
    first, second = flow.admit("sweep", item="0:a"), flow.admit("sweep", item="1:a")
    assert [step_of(first), step_of(second)] == [item_step_id("sweep", "a", 0), item_step_id("sweep", "a", 1)]
    assert flow.admit("sweep", item="1:a") == second
    assert flow.admit("sweep", item="0:a") == first


def test_conclude_finds_the_item_of_its_admit(here):
    flow = here.submit(SWEEP)
    flow.write_output(flow.admit("sweep", item="0:a"), "0/artifacts/data", b"0")
    flow.admit("sweep", item="1:a")
    assert phase(flow.conclude("sweep", item="0:a")) == "Succeeded"
    assert phase(flow.conclude("sweep", item="1:a")) == "Failed"


@pytest.mark.parametrize("value", ["lr:0.2", "a(1).admit", "x(0)"])
def test_tries_of_a_training_item_are_attempts_of_that_item(here, value):
    flow = here.submit(fit(name="sweep", fan_out=True))
    item = f"1:{value}"
    flow.admit("sweep", 0, item=f"0:{value}")
    flow.admit("sweep", 0, item=item)
    failed = flow.conclude("sweep", 0, item=item, status="Failed", exit_code="75")
    assert phase(failed) == "Error"
    again = flow.admit("sweep", 1, item=item)
    assert (outputs(again)["step"], outputs(again)["attempt"]) == (item_step_id("sweep", value, 1), "2")
    flow.write_output(again, "artifacts/model", b"m")
    assert phase(flow.conclude("sweep", 1, item=item)) == "Succeeded"
    assert flow.conclude("sweep", 0, item=item, status="Failed", exit_code="75") == failed

    attempts = read_step_attempts(here.store, "digits-abc12", item_step_id("sweep", value, 1))
    node = f"digits-abc12.sweep({item})"
    assert [attempt.claim.node for attempt in attempts] == [f"{node}(0).admit", f"{node}(1).admit"]
    assert {attempt.claim.instance for attempt in attempts} == {node}
    [other] = read_step_attempts(here.store, "digits-abc12", item_step_id("sweep", value, 0))
    assert other.end is None


def test_value_counts_in_its_canonical_form(here):
    flow = here.submit(SWEEP)
    first = flow.body("admit", "sweep", item="0:x") | {"item": '{"lr": 0.1, "n": 1}'}
    second = flow.body("admit", "sweep", item="1:x") | {"item": '{"n":1,"lr":0.1}'}
    assert step_of(flow.call(first)).rpartition(".")[0] == step_of(flow.call(second)).rpartition(".")[0]


def test_bound_item_remembers_its_value_and_how_argo_shows_it(here):
    here.submit(SWEEP).admit("sweep", item="3:a")
    (bound,) = records(here.store, "control/runs/digits-abc12/items/")
    assert (bound["label"], bound["item"], bound["submission"]) == ("sweep(3:a)", "a", 1)


def test_step_that_is_not_fanned_out_binds_no_item(here):
    here.submit(prep()).admit("prep")
    assert records(here.store, "control/runs/digits-abc12/items/") == []
