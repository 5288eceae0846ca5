"""A run whose Workflow has ended goes on by itself, or because Alertmanager says so.

| what happens | what follows |
|---|---|
| the Workflow of a run that asks for it is deleted | after a minute the controller makes the next one, pruned |
| its training is given up after its pod was taken away | the controller makes the next one at once |
| the same, of a run that does not ask | an alert has it resumed, once, however often it is delivered |
| a person stops it | nothing, whatever alerts say |
"""

import json
import shutil
from typing import Any

import pytest
from support.stories.interrupted_training.pipelines import expected_version, pair, story
from support.stories.interrupted_training.scenarios import check_starts, model, version

from hera_pipelines import AutoResume, Pipeline, Retries
from tiphys.kube.resources import PODS, WORKFLOWS
from tiphys.records import AttemptEndOutcome
from tiphys.store import read_submissions

from .world import Workflow, World, command

STEPS = 40
NEVER = {"retries": Retries(preemption=0, infrastructure=0, backoff="1s")}
"""The first pod that is taken away ends the run."""
_POST = """
import json, sys, urllib.request
token = open('/etc/tiphys/api/token').read().strip()
request = urllib.request.Request('http://127.0.0.1:7243' + sys.argv[1], sys.stdin.read().encode(),
    {'Authorization': 'Bearer ' + token, 'Content-Type': 'application/json'})
print(urllib.request.urlopen(request, timeout=60).status)
"""


def asking(pipeline: Pipeline) -> Pipeline:
    pipeline.auto_resume = AutoResume(cooldown="1s")
    return pipeline


def next_of(world: World, run: str, number: int = 2) -> Workflow:
    """Wait for the n-th Workflow of a run; its name is made of both."""
    name = f"{run}-{number}"
    world.until(
        f"{name} is made by itself", lambda: world.api.get(WORKFLOWS, world.settings.namespace, name) is not None
    )
    return world.workflow(name)


def deliver(world: World, *alerts: dict[str, Any]) -> str:
    """What Alertmanager sends, from a pod that may reach the controller; skips where that cannot be done."""
    if not shutil.which("kubectl"):
        pytest.skip("to deliver an alert from inside of the cluster takes kubectl on PATH")
    namespace = world.settings.system_namespace
    [pod, *_] = world.api.list(PODS, namespace, labels="app.kubernetes.io/component=controller").items
    mounted = pod["spec"]["containers"][0].get("args") or []
    if not any("--token-file" in one for one in mounted):
        pytest.skip("the release takes no alerts: set api.tokenSecret and alerts.rules.RunFailed=resume in its values")
    line = ["kubectl", "exec", "--stdin", "--namespace", namespace, pod["metadata"]["name"], "--"]
    body = json.dumps({"version": "4", "status": "firing", "receiver": "tiphys", "alerts": list(alerts)})
    return command([*line, "python", "-c", _POST, "/v1/alerts"], given=body).strip()


def alert(workflow: Workflow, fingerprint: str) -> dict[str, Any]:
    labels = {"alertname": "RunFailed", "namespace": workflow.world.settings.namespace, "workflow": workflow.name}
    return {"status": "firing", "labels": labels, "startsAt": "2026-03-01T12:00:00Z", "fingerprint": fingerprint}


def test_a_deleted_workflow_is_followed_by_the_next_one_unasked(world: World) -> None:
    first = world.submit(asking(pair(world.place, steps=STEPS, pause=0.5)).compile())
    first.trains()
    run = first.run
    world.api.delete(WORKFLOWS, world.settings.namespace, first.name)
    second = next_of(world, run)
    second.wait()
    assert {node.template for node in second.nodes()}.isdisjoint({"preprocess", "preprocess-admit"})
    assert f"model-{model(world.store, run)}" == expected_version(STEPS)
    check_starts(world.store, run)


def test_a_run_that_failed_from_outside_goes_on_at_once(world: World) -> None:
    first = world.submit(asking(story(world.place, steps=STEPS, pause=0.5, training=NEVER)).compile())
    world.api.delete(PODS, world.settings.namespace, first.trains())
    first.wait("Failed")
    second = next_of(world, first.run)
    second.wait()
    # Beside whichever of the two the controller saw last when it told.
    second.wait_for("an Event says so", lambda: first.events("AutoResumed") + second.events("AutoResumed"))
    assert version(world.store, first.run) == expected_version(STEPS)
    check_starts(world.store, first.run)
    assert len(read_submissions(world.store, first.run)) == 2


def test_an_alert_has_a_run_resumed_once_however_often_it_comes(world: World) -> None:
    first = world.submit(story(world.place, steps=STEPS, pause=0.5, training=NEVER).compile())
    world.api.delete(PODS, world.settings.namespace, first.trains())
    first.wait("Failed")
    one = alert(first, first.uid[:8])
    assert [deliver(world, one), deliver(world, one, one), deliver(world, one)] == ["202"] * 3
    second = next_of(world, first.run)
    second.wait()
    assert deliver(world, one) == "202"
    assert first.event_message("AlertHandled")
    assert version(world.store, first.run) == expected_version(STEPS)
    assert [one.claim.submission for one in read_submissions(world.store, first.run)] == [1, 2]


def test_a_workflow_that_a_person_stopped_is_not_resumed(world: World) -> None:
    first = world.submit(asking(pair(world.place, steps=STEPS, pause=0.5)).compile())
    first.trains()
    world.argo("stop", first.name)
    first.wait("Failed")
    first.event_message("AutoResumeEndedByPerson")
    assert len(read_submissions(world.store, first.run)) == 1
    ends = [attempt.end for attempt in first.attempts("train")]
    assert all(end is None or end.outcome is not AttemptEndOutcome.DONE for end in ends)
