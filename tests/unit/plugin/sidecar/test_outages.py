"""What a call gets while service, storage, API server or ledger do not answer.

| call                        | until the limit | after it                                     |
|-----------------------------|-----------------|----------------------------------------------|
| admit, conclude of a Step   | Pending         | Failed                                       |
| the same of a Train         | Pending         | Failed: after Error Argo would try for ever  |
| finalize                    | Pending         | Succeeded; the controller records the rest   |
"""

from typing import Any

import pytest
from tiphys_plugin.sidecar.outages import _MAX_STEPS, OutageClock, find_wait_reason

from tiphys.protocol.execute_api import ExecuteReply

LIMIT = 1800.0


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outages(clock: Clock) -> OutageClock:
    return OutageClock(LIMIT, clock)


def call(op: str = "admit", node: str = "läufe.v1.prep.admit", uid: str = "u-1", **fields: Any) -> dict[str, Any]:
    declared = {"parameters": [{"name": "run"}, {"name": "pod-patch"}]} if op == "admit" else {}
    body = {"op": op, "node": node, "run": "", "step": "prep", **fields}
    metadata = {"name": "läufe.v1", "namespace": "ml", "uid": uid}
    return {"workflow": {"metadata": metadata}, "template": {"outputs": declared, "plugin": {"tiphys": body}}}


def keep_calling(outages: OutageClock, clock: Clock, document: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The reply to the last of the calls that Argo makes within ``seconds``, the first of which is at once."""
    end = clock.now + seconds
    reply = outages.answer(document, "storage is away")
    while clock.now < end:
        clock.now = min(end, clock.now + 60)
        reply = outages.answer(document, "storage is away")
    return reply


def node_after(outages: OutageClock, clock: Clock, document: dict[str, Any], seconds: float) -> dict[str, Any]:
    reply = keep_calling(outages, clock, document, seconds)
    ExecuteReply.model_validate(reply)
    assert ("requeue" in reply) == (reply["node"]["phase"] == "Pending")
    node: dict[str, Any] = reply["node"]
    return node


RETRIED = "läufe.v1.fit(0:lr:0.1)(3).admit"
CALLS = [
    (call("admit"), "Failed"),
    (call("conclude", node="läufe.v1.prep.conclude"), "Failed"),
    (call("admit", node=RETRIED), "Failed"),
    (call("conclude", node="w.fit(0).conclude", status="Failed"), "Failed"),
    (call("conclude", node="w.fit(0).conclude", status="Error"), "Failed"),
    (call("conclude", node="w.fit(0).conclude", status="Succeeded"), "Failed"),
    (call("conclude", node="w.fit(0).conclude", status="Omitted"), "Failed"),
    (call("finalize", node="w.onExit.finalize", status="Succeeded"), "Succeeded"),
    (call("finalize", node="w.onExit.finalize", status="Failed"), "Succeeded"),
]


@pytest.mark.parametrize(("document", "phase"), CALLS)
def test_call_waits_until_the_limit_and_then_gets_its_final_answer(outages, clock, document, phase):
    node = node_after(outages, clock, document, LIMIT - 0.1)
    assert node == {"phase": "Pending", "message": "Waiting, for 30 min at most: storage is away"}
    clock.now += 0.1
    final = outages.answer(document, "storage is away")["node"]
    assert final["phase"] == phase
    assert "30 min" in final["message"]
    assert "storage is away" in final["message"]


def test_attempt_that_gives_up_starts_no_program(outages, clock):
    node = node_after(outages, clock, call("admit", node=RETRIED), LIMIT)
    assert (node["phase"], "outputs" in node) == ("Failed", False), "Argo runs a program behind a success only"


def test_step_that_gives_up_names_the_command_that_continues(outages, clock):
    assert node_after(outages, clock, call(run="läufe"), LIMIT)["message"].endswith("`tiphys resume läufe`")
    assert node_after(outages, clock, call(), LIMIT)["message"].endswith("`tiphys resume läufe.v1`")


def test_an_outage_has_its_own_time(outages, clock):
    for _ in range(5):
        assert node_after(outages, clock, call(), LIMIT - 1)["phase"] == "Pending"
        outages.end(call())
        clock.now += 1


@pytest.mark.parametrize("other", [call(uid="u-2"), call(step="fit"), call(item="b")])
def test_step_item_and_workflow_have_their_own_time(outages, clock, other):
    keep_calling(outages, clock, call(), LIMIT)
    assert outages.answer(other, "away")["node"]["phase"] == "Pending"
    outages.end(other)
    assert outages.answer(call(), "away")["node"]["phase"] == "Failed"


def test_attempts_of_a_training_share_one_time(outages, clock):
    keep_calling(outages, clock, call("admit", node="w.fit(0).admit"), LIMIT)
    for op in ("admit", "conclude"):
        assert outages.answer(call(op, node=f"w.fit(1).{op}"), "away")["node"]["phase"] == "Failed"


def test_pauses_grow_with_the_outage_and_stay_short(outages, clock):
    pauses = []
    for _ in range(400):
        reply = outages.answer(call(), "away")
        if "requeue" not in reply:
            break
        pauses.append(float(reply["requeue"].removesuffix("s")))
        clock.now += pauses[-1]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (2.0, 15.0)
    assert len(pauses) < 140


def test_memory_of_outages_is_bounded_and_no_step_fails_early(outages, clock):
    for number in range(2 * _MAX_STEPS + 1):
        assert outages.answer(call(step=f"s{number}"), "away")["node"]["phase"] == "Pending"
    assert [len(steps) for steps in outages._outages.values()] == [_MAX_STEPS]
    clock.now += 3600
    outages.answer(call(), "away")
    assert [len(steps) for steps in outages._outages.values()] == [1]


def test_steps_of_one_namespace_do_not_extend_the_wait_of_another(outages, clock):
    neighbour = call()
    neighbour["workflow"]["metadata"]["namespace"] = "team.ü"
    keep_calling(outages, clock, neighbour, LIMIT - 60)
    for number in range(_MAX_STEPS + 1):
        outages.answer(call(step=f"s{number}"), "away")
    clock.now += 60
    assert outages.answer(neighbour, "away")["node"]["phase"] == "Failed"


@pytest.mark.parametrize("limit", [20.0, 90.0, 1800.0, 1e9])
def test_reason_of_a_wait_is_found_in_its_message(clock, limit):
    reason = "Waiting: cannot write /läufe: no space, for 3 min at most: x"
    node = OutageClock(limit, clock).answer(call(), reason)["node"]
    assert (find_wait_reason(node["message"]), find_wait_reason("done: x")) == (reason, "done: x")
    assert find_wait_reason("Waiting: the ledger is lost") == "the ledger is lost"


def test_outage_long_ago_does_not_count(outages, clock):
    outages.answer(call(), "away")
    clock.now += LIMIT * 4
    assert outages.answer(call(), "away")["node"]["phase"] == "Pending"


@pytest.mark.parametrize("body", [None, "admit", [1], {}, {"op": 7, "node": None, "step": ["x"]}])
def test_broken_body_waits_as_any_other_call(outages, clock, body):
    document = {"workflow": None, "template": {"plugin": {"tiphys": body}}}
    assert node_after(outages, clock, document, 1)["phase"] == "Pending"
    assert keep_calling(outages, clock, document, LIMIT)["node"]["phase"] == "Failed"
