"""Who may use a queue, and with which priority.

| queue                    | request                         | answer                                      |
|--------------------------|---------------------------------|---------------------------------------------|
| names no namespaces      | of any namespace                | as ever: it is shared                       |
| names namespaces         | of one of them                  | as ever                                     |
| names namespaces         | of another                      | rejected, with the queues that it may use   |
| does not exist           | of any namespace                | rejected, with the queues that it may use   |
| has a max_priority       | of a higher priority            | rejected, with the limit                    |
| no longer accepts it     | waits                           | delays nobody, preempts nobody, is rejected |
"""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from support.builders.ledger import NOW, ask, deferral
from support.checks.preemption_rounds import Arena
from support.stories.plugin import Flow, World, fit, gpus, outputs, phase, said, world
from tiphys_plugin.quota.lease import AdmissionReason, Admitted, LedgerState, Rejected
from tiphys_plugin.quota.ledger.transitions import release
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.decide import decide_admission


def queues(**research: Any) -> Queues:
    return Queues.model_validate(
        {
            "queues": [
                {"name": "research", "gpus": {"A100": 8}, **research},
                {"name": "speech", "gpus": {"A100": 16}, "namespaces": ["speech"]},
                {"name": "spare", "gpus": {"A100": 4}},
            ]
        }
    )


OWNED = queues(namespaces=["ml", "tools"])


def training(here: World, namespace: str, name: str = "digits-abc12", uid: str = "uid-1", **wish: Any) -> Flow:
    flow = here.submit(fit(gpu=gpus(**{"count": 8, **wish})), name=name, uid=uid)
    return replace(flow, namespace=namespace)


def test_a_namespace_cannot_take_the_gpus_of_a_queue_that_is_not_its_own(tmp_path):
    here = world(tmp_path, OWNED)
    foreign = training(here, "vision")
    answer = foreign.admit("fit", 0)
    assert phase(answer) == "Failed", "Argo starts nothing behind it, and does not repeat it"
    assert said(answer) == ("Rejected: QueueNotAllowed: namespace vision may not use queue research; it may use: spare")
    assert here.ledger.snapshot().leases == here.ledger.snapshot().pending == ()
    again = foreign.admit("fit", 1)
    assert phase(again) == "Failed", "argo retry makes another try"
    assert "namespace vision may not use queue research" in said(again)
    own = training(here, "ml", "other-abc12", "uid-2")
    assert outputs(own.admit("fit", 0))["run"] == "true", "its quota is still there"


@pytest.mark.parametrize("namespace", ["ml", "tools"])
def test_the_namespaces_that_a_queue_names_use_it(tmp_path, namespace):
    assert outputs(training(world(tmp_path, OWNED), namespace).admit("fit", 0))["run"] == "true"


@pytest.mark.parametrize("namespace", ["ml", "vision"])
def test_a_queue_without_namespaces_is_shared(tmp_path, namespace):
    assert outputs(training(world(tmp_path, OWNED), namespace, count=4, queue="spare").admit("fit", 0))["run"] == "true"


def test_the_name_of_a_namespace_is_taken_literally(tmp_path):
    here = world(tmp_path, queues(namespaces=["ml"]))
    for number, namespace in enumerate(("m", "ml-vision", "ML", "x.ml")):
        answer = training(here, namespace, f"digits-abc{number}", f"uid-{number}").admit("fit", 0)
        assert said(answer).startswith("Rejected: QueueNotAllowed"), namespace


def decide(rules: Queues, **wish: Any) -> object:
    return decide_admission(LedgerState(queues=rules), ask(4, **wish), 1, NOW)


def test_only_queues_that_the_namespace_may_use_are_named():
    unknown = decide(OWNED, namespace="vision", queue="reserch")
    assert isinstance(unknown, Rejected)
    assert (unknown.reason, unknown.message) == (
        AdmissionReason.QUEUE_UNKNOWN,
        "there is no queue 'reserch'; namespace vision may use: spare",
    )
    too_large = decide_admission(LedgerState(queues=OWNED), ask(10, namespace="ml"), 1, NOW)
    assert isinstance(too_large, Rejected)
    assert "speech" not in too_large.message
    nowhere = decide(Queues(queues=OWNED.queues[:2]), namespace="vision")
    assert isinstance(nowhere, Rejected)
    assert nowhere.message.endswith("it may use: none")


def test_a_priority_above_the_limit_of_the_queue_is_refused(tmp_path):
    here = world(tmp_path, queues(max_priority=10))
    greedy = training(here, "vision", priority=1_000_000)
    answer = greedy.admit("fit", 0)
    assert phase(answer) == "Failed"
    assert said(answer) == (
        "Rejected: PriorityTooHigh: queue research takes priorities up to 10, and the step has 1000000; "
        "lower the priority of the step"
    )
    assert here.ledger.snapshot().leases == ()
    modest = training(here, "vision", "other-abc12", "uid-2", priority=10)
    assert outputs(modest.admit("fit", 0))["run"] == "true"


def test_a_request_that_may_no_longer_use_its_queue_delays_no_other():
    arena = Arena(queues())
    assert isinstance(arena.ask(ask(8, "u1")), Admitted)
    assert deferral(arena.ask(ask(8, "u2", namespace="vision", priority=9))) is AdmissionReason.WAITING_FOR_QUOTA
    arena.book = release(arena.book, arena.book.leases[0].id, arena.now, arena.cache)
    arena.rules = OWNED
    assert isinstance(arena.ask(ask(8, "u3")), Admitted)
    assert isinstance(arena.ask(ask(8, "u2", namespace="vision", priority=9)), Rejected)
    assert arena.book.pending == ()


@pytest.mark.parametrize("change", [{"namespaces": ["ml"]}, {"max_priority": 8}])
def test_a_request_that_may_no_longer_use_its_queue_preempts_none(change):
    arena = Arena(queues(preempts_lower_priority=True))
    assert isinstance(arena.ask(ask(8, "u1")), Admitted)
    assert deferral(arena.ask(ask(8, "u2", namespace="vision", priority=9))) is AdmissionReason.WAITING_FOR_QUOTA
    allowed = arena.rules
    arena.rules = queues(preempts_lower_priority=True, **change)
    assert arena.look() == 0
    arena.rules = allowed
    arena.now += timedelta(seconds=1)
    assert arena.look() == 1, "it could have"
