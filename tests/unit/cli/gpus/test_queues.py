"""``tiphys queues``: what becomes of quotas in a cluster, and what a person is shown of them."""

import json
from typing import Any

import pytest
import yaml
from support.builders.ledger import ask
from support.servers.kube_server import serving
from support.servers.kube_store import Collection
from support.stories.kubeconfig_folder import QUEUES, Desk

from tiphys.kube.resources import GPU_LEDGERS


@pytest.fixture
def desk(tmp_path, capsys):
    with serving() as server:
        yield Desk(server, tmp_path, capsys)


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


def test_queue_file_becomes_the_spec_of_the_ledger(desk):
    code, out, err = desk.queues("apply")
    assert code == 0
    assert desk.spec() == yaml.safe_load(QUEUES)
    assert rows(out) == [
        ["QUEUE", "GPU", "TYPE", "QUOTA", "NEW", "QUOTA", "HELD", "WAITING"],
        ["research", "A100", "-", "8", "0", "0"],
        ["research", "*", "-", "4", "0", "0"],
        ["nightly", "*", "-", "2", "0", "0"],
    ]
    assert "GPULedger ml/default is created; the Tiphys services of this namespace use it" in err


def test_queues_are_replaced_whole_and_the_status_is_left_alone(desk):
    desk.queues("apply", text="queues: [{name: old, gpus: {T4: 1}}]\ninventory: {T4: {count: 1}}\n")
    desk.ledger().request(ask(1, queue="old", gpu_type="T4"))
    code, out, err = desk.queues("apply")
    assert code == 0
    assert desk.spec() == yaml.safe_load(QUEUES)
    assert ["old", "T4", "1", "-", "1", "0"] in rows(out)
    assert "warning: queue old holds 1 T4 and has no quota for them" in err
    assert len(desk.ledger().snapshot().leases) == 1


def test_quota_below_what_is_held_is_pointed_out(desk):
    desk.queues("apply")
    desk.ledger().request(ask(8))
    desk.ledger().request(ask(2, "u2"))
    code, out, err = desk.queues("apply", text="queues: [{name: research, gpus: {A100: 4}}]")
    assert code == 0
    assert ["research", "A100", "8", "4", "8", "2"] in rows(out)
    assert "warning: queue research holds 8 A100 and may hold 4; it is granted no more until" in err


def test_request_that_loses_its_quota_is_pointed_out(desk):
    desk.queues("apply")
    desk.ledger().request(ask(8))
    desk.ledger().request(ask(2, "u2"))
    _, _, err = desk.queues("apply", "--dry-run", text="queues: [{name: nightly, gpus: {'*': 4}}]")
    assert "warning: queue research holds 8 A100" in err
    desk.ledger().release(desk.ledger().snapshot().leases[0].id)
    _, _, err = desk.queues("apply", "--dry-run", text="queues: [{name: nightly, gpus: {'*': 4}}]")
    assert "warning: steps wait for 2 A100 of queue research, which has no quota for them" in err


def test_waiting_steps_that_may_no_longer_use_the_queue_are_pointed_out(desk):
    desk.queues("apply")
    desk.ledger().request(ask(8))
    desk.ledger().request(ask(2, "u2", namespace="vision"))
    desk.ledger().request(ask(2, "u3", priority=9))
    owned = "queues: [{name: research, gpus: {A100: 8}, namespaces: [ml], max_priority: 5}]"
    _, _, err = desk.queues("apply", "--dry-run", text=owned)
    for namespace in ("ml", "vision"):
        assert f"warning: 1 waiting step of namespace {namespace} may not use queue research" in err
    assert "may not use" not in desk.queues("apply", "--dry-run")[2]


def test_owners_of_a_queue_are_stored_and_shown(desk):
    owned = "queues: [{name: research, gpus: {A100: 8}, namespaces: [ml, vision], max_priority: 5}]"
    assert desk.queues("apply", text=owned)[0] == 0
    assert desk.spec() == yaml.safe_load(owned)
    assert "only for ml, vision, priority at most 5" in desk.queues("show")[1]
    [row] = json.loads(desk.queues("show", "-o", "json")[1])["queues"]
    assert (row["namespaces"], row["max_priority"]) == (["ml", "vision"], 5)


def test_dry_run_writes_nothing(desk):
    _, out, err = desk.queues("apply", "--dry-run")
    assert ["research", "A100", "-", "8", "0", "0"] in rows(out)
    assert "is unchanged; without --dry-run it would be created" in err
    assert desk.server.count(verb="get", plural="gpuledgers") == desk.server.count(plural="gpuledgers") == 1


@pytest.mark.parametrize(("option", "read"), [("yaml", yaml.safe_load), ("json", json.loads)])
def test_manifest_for_a_synchroniser_is_what_the_command_would_store(desk, option, read):
    code, out, _ = desk.queues("apply", "--dry-run", "-o", option, "-n", "ml")
    assert (code, desk.server.requests) == (0, [])
    manifest = read(out)
    assert manifest["metadata"] == {"name": "default", "namespace": "ml"}
    desk.api.create(GPU_LEDGERS, "ml", manifest)
    assert desk.queues("apply")[0] == 0
    assert desk.spec() == manifest["spec"] == yaml.safe_load(QUEUES)


def test_services_leave_a_manifest_as_it_was_applied(desk):
    manifest = yaml.safe_load(desk.queues("apply", "--dry-run", "-o", "yaml")[1])
    labelled = {**manifest, "metadata": {"name": "default", "annotations": {"applied-by": "git"}}}
    desk.api.create(GPU_LEDGERS, "ml", labelled)
    for number in range(3):
        desk.ledger().request(ask(4, f"u{number}"))
    stored = desk.api.get(GPU_LEDGERS, "ml", "default")
    assert stored["spec"] == manifest["spec"]
    assert stored["metadata"]["annotations"] == {"applied-by": "git"}
    assert stored["status"]["summary"] == {"leases": 2, "gpus": 8, "held": "research 8", "waiting": 1}


def test_manifest_without_a_dry_run_is_refused(desk):
    code, out, err = desk.queues("apply", "-o", "yaml")
    assert (code, out, desk.server.requests) == (2, "", [])
    assert "-o is for --dry-run" in err


def test_first_queues_of_a_ledger_that_limits_nothing(desk):
    desk.ledger().request(ask(4))
    _, out, err = desk.queues("apply")
    assert ["research", "A100", "unlimited", "8", "4", "0"] in rows(out)
    assert "GPULedger ml/default is up to date" in err


def test_name_and_namespace_can_be_chosen(desk):
    desk.server.add_namespace("other")
    assert desk.queues("apply", "-n", "other", "--name", "cohort-b")[0] == 0
    assert desk.api.get(GPU_LEDGERS, "other", "cohort-b")["spec"] == yaml.safe_load(QUEUES)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("queues: [{name: a}]", "queues.0.gpus: Field required"),
        ("queues: [{name: a, gpus: {A100: -1}}]", "greater than or equal to 0"),
        ("queues: [", "not valid YAML"),
    ],
)
def test_wrong_queue_file_is_refused_before_anything_is_asked(desk, text, says):
    code, out, err = desk.queues("apply", text=text)
    assert (code, out) == (2, "")
    assert says in err
    assert desk.server.requests == []


def test_cluster_without_the_kind_is_pointed_to_the_chart(desk):
    desk.server.unknown.add("gpuledgers")
    code, _, err = desk.queues("apply")
    assert code == 3
    assert "install the chart of Tiphys, and choose its namespace with -n" in err


def test_account_that_may_not_is_refused_in_the_words_of_the_server(desk):
    desk.server.authorize = lambda request: request.verb == "get"
    code, _, err = desk.queues("apply")
    assert code == 78
    assert 'cannot create resource "gpuledgers"' in err


def test_show_lists_quotas_holders_and_waiting_requests(desk):
    desk.queues("apply")
    desk.ledger().request(ask(8))
    desk.ledger().request(ask(2, "u2"))
    code, out, _ = desk.queues("show")
    assert code == 0
    shown = rows(out)
    assert shown[:2] == [
        ["QUEUE", "GPU", "TYPE", "QUOTA", "UP", "TO", "HELD", "WAITING"],
        ["research", "A100", "8", "8", "8", "2"],
    ]
    people = ["research", "ml", "run-u1", "fit", "1"]
    assert [line[:8] for line in shown if line[:1] == ["holds"]] == [["holds", "8", "A100", *people]]
    assert [line[:4] for line in shown if line[:1] == ["waits"]] == [["waits", "for", "2", "A100"]]


def test_show_as_a_document(desk):
    desk.queues("apply", text=f"{QUEUES}inventory: {{A100: {{count: 16}}}}\n")
    desk.ledger().request(ask(8))
    document = json.loads(desk.queues("show", "-o", "json")[1])
    assert document == yaml.safe_load(desk.queues("show", "-o", "yaml")[1])
    assert (document["kind"], document["namespace"], document["ledger"]) == ("QueueList", "ml", "default")
    row = {"name": "research", "gpuType": "A100", "quota": 8, "most": 8, "held": 8, "borrowed": 0, "waiting": 0}
    row["stopped"] = False
    assert (document["queues"][0], document["limited"]) == (row, True)
    assert document["inventory"] == {"A100": {"count": 16}}
    assert [lease["request"]["run"] for lease in document["leases"]] == ["run-u1"]


def test_show_without_a_ledger_says_where_to_look(desk):
    code, _, err = desk.queues("show")
    assert code == 3
    assert "there is no GPULedger ml/default; choose the namespace that Tiphys is installed in with -n" in err


def test_show_of_queues_that_cannot_be_read_says_that_nothing_is_granted(desk):
    desk.api.create(GPU_LEDGERS, "ml", {"metadata": {"name": "default"}, "spec": {"queues": [{"name": "a"}]}})
    desk.ledger().request(ask(2))
    code, out, err = desk.queues("show")
    assert code == 0
    assert ["research", "A100", "-", "-", "0", "2"] in rows(out)
    assert "no GPUs are granted: the spec of GPULedger ml/default: queues.0.gpus: Field required" in err


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ({"version": 6}, "it has format 6, and this Tiphys reads 7; repair it with `kubectl edit"),
        ({"version": 8}, "it has format 8, and this Tiphys reads 7; upgrade Tiphys"),
        ({"version": 7}, "log: KeyError"),
        (
            {"version": 7, "log": {"id": "a", "number": 1, "entries": [{"n": 1, "leases": [{"id": "a"}]}]}},
            "lease.request: Field",
        ),
    ],
)
def test_damaged_book_is_an_error_of_its_own(desk, status, says):
    made = desk.api.create(GPU_LEDGERS, "ml", {"metadata": {"name": "default"}})
    desk.api.replace(GPU_LEDGERS, "ml", {**made, "status": status}, "status")
    for verb in ("show", "apply"):
        code, _, err = desk.queues(verb)
        assert code == 5
        assert f"the status of GPULedger ml/default is damaged: {says}" in err


LAB = """
queues:
  - {name: research, gpus: {A100: 8}, cohort: lab, borrowing_limit: {A100: 4}, weight: 2}
  - {name: nightly, gpus: {A100: 8}, cohort: lab, lending_limit: {A100: 2}, stopped: true}
"""


def test_queues_that_share_show_how_far_they_may_go(desk):
    desk.queues("apply", text=LAB)
    desk.ledger().request(ask(10))
    _, out, err = desk.queues("show")
    assert rows(out)[1:3] == [
        ["research", "A100", "8", "10", "10", "0"],
        ["nightly", "A100", "8", "16", "0", "0", "stopped"],
    ]
    assert "warning" not in err
    [borrower, _] = json.loads(desk.queues("show", "-o", "json")[1])["queues"]
    assert (borrower["most"], borrower["borrowed"]) == (10, 2)


def test_a_queue_that_goes_by_gpu_time_says_so(desk):
    desk.queues("apply", text="queues: [{name: research, gpus: {A100: 8}, order: attained, preempts_longer: true}]")
    assert "least GPU time first, preempts longer" in desk.queues("show")[1]


def test_a_kind_that_drops_what_it_does_not_know_is_noticed(desk, monkeypatch):
    """The API server prunes fields that an older kind does not declare, and says nothing."""
    create = desk.server.store.create

    def pruned(collection: Collection, namespace: str, body: Any) -> Any:
        old = [{"name": queue["name"], "gpus": queue["gpus"]} for queue in body["spec"]["queues"]]
        return create(collection, namespace, {**body, "spec": {"queues": old}})

    monkeypatch.setattr(desk.server.store, "create", pruned)
    code, _, err = desk.queues("apply", text=LAB)
    assert code != 0
    assert "the kind GPULedger of this cluster is older than this command" in err


GOING = """
queues:
  - {name: research, gpus: {A100: 8}, cohort: lab, preempts_lower_priority: true, reclaims: true}
  - {name: nightly, gpus: {A100: 8}, cohort: lab, min_runtime_seconds: 1800}
"""


def test_queues_that_preempt_are_shown_and_victims_are_marked(desk):
    desk.queues("apply", text=GOING)
    ledger = desk.ledger()
    ledger.request(ask(16))
    ledger.request(ask(8, "u2", priority=5))
    [lease] = ledger.snapshot().leases
    assert ledger.mark_preempted(("u2", "fit"), {lease.id: 60.0})
    shown = rows(desk.queues("show")[1])
    assert shown[1][-4:] == ["preempts", "lower", "priority,", "reclaims"]
    assert shown[2][-3:] == ["first", "1800", "s"]
    assert [line[:3] for line in shown if line[:1] == ["releases"]] == [["releases", "16", "A100"]]
    first, second = json.loads(desk.queues("show", "-o", "json")[1])["queues"]
    assert (first["preempts_lower_priority"], first["reclaims"]) == (True, True)
    assert second["min_runtime_seconds"] == 1800
