"""``tiphys why``: what a person is told about GPUs that a step waits for."""

import json

import pytest
from support.desk import Desk
from support.kube_server import serving
from support.ledger import ask

QUEUES = "queues: [{name: research, gpus: {A100: 8}}]"


@pytest.fixture
def desk(tmp_path, capsys):
    with serving() as server:
        made = Desk(server, tmp_path, capsys)
        made.queues("apply", text=QUEUES)
        yield made


def why(desk: Desk, *arguments: str) -> tuple[int, str, str]:
    return desk.tiphys("why", *arguments)


def test_each_reason_is_told_with_its_numbers(desk):
    ledger = desk.ledger()
    ledger.request(ask(6, "u1", seconds=3600))
    ledger.request(ask(4, "u2"))
    code, out, _ = why(desk, "run-u2/fit")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("run-u2/fit has waited 0:00:0")
    assert lines[0].endswith("for 4 A100 of queue research")
    assert lines[1] == "  WaitingForQuota: queue research holds 6 of 8 A100; 4 A100 asked"
    assert lines[2].startswith("  position 1; expected to start by 20")


def test_who_waits_for_others_is_told_for_whom(desk):
    ledger = desk.ledger()
    ledger.request(ask(6, "u1"))
    ledger.request(ask(4, "u2"))
    ledger.request(ask(1, "u3"))
    _, out, _ = why(desk, "run-u3")
    assert "BehindEarlierRequest: 1 A100 asked; behind run-u2/fit (4 A100, asked earlier)" in out
    assert "position 2; when it starts cannot be said" in out


def test_who_holds_gpus_is_told_since_when(desk):
    desk.ledger().request(ask(6, "u1"))
    _, out, _ = why(desk, "run-u1")
    assert out.startswith("run-u1/fit holds 6 A100 of queue research since 20")


def test_a_step_that_could_start_is_told_so(desk):
    ledger = desk.ledger()
    ledger.request(ask(8, "u1"))
    ledger.request(ask(4, "u2"))
    ledger.release(ledger.snapshot().leases[0].id)
    _, out, _ = why(desk, "run-u2")
    assert "nothing stands in its way now" in out


def test_a_step_whose_queue_shrank_is_told_that_it_never_starts(desk):
    ledger = desk.ledger()
    ledger.request(ask(8, "u1"))
    ledger.request(ask(4, "u2"))
    desk.queues("apply", text="queues: [{name: research, gpus: {A100: 2}}]")
    _, out, _ = why(desk, "run-u2")
    assert "ExceedsMaxQuota: 4 A100 can never be had" in out


def test_the_document_has_the_same_reasons(desk):
    ledger = desk.ledger()
    ledger.request(ask(6, "u1"))
    ledger.request(ask(4, "u2"))
    _, out, _ = why(desk, "run-u2", "-o", "json")
    [waiting] = json.loads(out)["waiting"]
    assert waiting["position"] == 1
    assert waiting["expectedStart"] is None
    assert [one["reason"] for one in waiting["reasons"]] == ["WaitingForQuota"]


def test_a_run_that_nobody_knows_is_named_with_what_to_do(desk):
    code, _, err = why(desk, "run-u9/fit")
    assert code != 0
    assert "run-u9/fit neither holds GPUs nor waits for any in GPULedger ml/default; `tiphys get run-u9` shows" in err
