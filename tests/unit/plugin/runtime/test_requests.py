"""What arrives at the plugin, from foreign bodies to broken ones.

| body                                  | answer                                          |
|---------------------------------------|-------------------------------------------------|
| of another plugin, or no plugin       | {}: not mine                                    |
| field missing, unknown, of other type | Failed, names the field                         |
| a placeholder Argo did not fill in    | Failed, names it                                |
| the same, inside attempts             | Succeeded and run=false: Failed is "try again"  |
| storage out of reach                  | StoreError (503), later Pending with the reason |
"""

from dataclasses import replace

import pytest
from support.world import QUICK, Flow, World, fit, outputs, phase, prep, said, world

from tiphys.errors import StoreError
from tiphys.store import DirectoryStore


@pytest.fixture
def flow(tmp_path) -> Flow:
    return world(tmp_path).submit(prep(), fit())


@pytest.mark.parametrize(
    "template",
    [None, "text", {}, {"plugin": None}, {"plugin": []}, {"plugin": {}}, {"plugin": {"slack": {"op": "admit"}}}],
)
def test_foreign_body_is_not_mine(flow, template):
    reply = flow.world.core.execute_document(flow.document({}) | {"template": template})
    assert reply.to_json() == {}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"op": "explode"}, "plugin.tiphys: Input tag 'explode'"),
        ({"op": 7}, "plugin.tiphys: "),
        ({"step": None}, "plugin.tiphys.step: Input should be a valid string, got None"),
        ({"node": 3}, "plugin.tiphys.node: Input should be a valid string, got 3"),
        ({"inputs": {"lr": 0.1}}, "plugin.tiphys.inputs.lr: Input should be a valid string, got 0.1"),
        ({"inputs": []}, "plugin.tiphys.inputs: Input should be a valid dictionary, got []"),
        ({"stepp": "fit"}, "plugin.tiphys.stepp: Extra inputs are not permitted, got 'fit'"),
        ({"uid": "uid-9"}, "plugin.tiphys.uid is 'uid-9', but the call is about workflow digits-abc12"),
        ({"run": "{{workflow.parameters.tiphys-run}}"}, "plugin.tiphys.run holds"),
        ({"step": "x" * 60}, "has no step"),
    ],
)
def test_mistake_in_a_body_fails_the_node_and_names_the_field(flow, change, says):
    reply = flow.call(flow.body("admit", "prep") | change)
    assert phase(reply) == "Failed"
    assert says in said(reply)
    assert reply.requeue is None


def test_missing_field_is_named(flow):
    body = flow.body("admit", "prep")
    del body["node"]
    assert "plugin.tiphys.node: Field required" in said(flow.call(body))


@pytest.mark.parametrize("body", [None, "admit", ["admit"], {}])
def test_body_that_is_no_operation_fails_the_node(flow, body):
    document = flow.document({})
    document["template"]["plugin"]["tiphys"] = body
    reply = flow.world.core.execute_document(document)
    assert phase(reply) == "Failed"
    assert "plugin.tiphys" in said(reply)


@pytest.mark.parametrize("workflow", [None, {}, {"metadata": {"name": "x"}}, {"metadata": {"name": 1, "uid": "u"}}])
def test_request_without_its_workflow_fails_the_node(flow, workflow):
    reply = flow.world.core.execute_document(flow.document(flow.body("admit", "prep")) | {"workflow": workflow})
    assert phase(reply) == "Failed"
    assert "workflow" in said(reply)


@pytest.mark.parametrize("op", ["admit", "settle"])
def test_mistake_inside_attempts_is_passed_on_to_conclude(flow, op):
    reply = flow.call(flow.body(op, "fit", 0) | {"extra": "1"})
    assert phase(reply) == "Succeeded"
    assert said(reply).startswith("Refused: plugin.tiphys.extra")
    if op == "admit":
        assert outputs(reply)["run"] == "false"


def test_damaged_record_is_named_and_never_overwritten(flow):
    flow.admit("prep")
    key = "control/runs/digits-abc12/attempts/prep/000000001.json"
    flow.world.store.delete(key)
    flow.world.store.create(key, b"garbage")
    reply = flow.admit("prep")
    assert phase(reply) == "Failed"
    assert f"{key} is not a valid AttemptClaim" in said(reply)
    assert flow.world.store.read(key) == b"garbage"


class Unreachable(DirectoryStore):
    """A store that answers, or not, as it is told."""

    down = False

    def read(self, key: str) -> bytes:
        if self.down:
            raise StoreError(f"{self.url} did not answer: connection refused")
        return super().read(key)


@pytest.fixture
def shaky(tmp_path) -> World:
    return world(tmp_path, settings=replace(QUICK, silent_outage_calls=2), store=Unreachable(tmp_path / "store"))


def test_short_outage_is_for_argo_to_repeat_and_a_long_one_is_waited_for(shaky):
    flow = shaky.submit(prep())
    shaky.store.down = True
    for _ in range(2):
        with pytest.raises(StoreError):
            flow.admit("prep")
    for _ in range(3):
        waiting = flow.admit("prep")
        assert phase(waiting) == "Pending"
        assert "did not answer: connection refused" in said(waiting)
    shaky.store.down = False
    assert outputs(flow.admit("prep"))["run"] == "true"


def test_each_outage_is_counted_anew(shaky):
    flow = shaky.submit(prep())
    for _ in range(3):
        shaky.store.down = True
        with pytest.raises(StoreError):
            flow.admit("prep")
        shaky.store.down = False
        flow.admit("prep")


def test_answers_are_counted_by_operation_and_phase(flow):
    flow.admit("prep")
    flow.admit("nothing")
    text = flow.world.core.metrics.render().decode()
    assert 'tiphys_plugin_answers_total{answer="succeeded",op="admit"} 1.0' in text
    assert 'tiphys_plugin_answers_total{answer="failed",op="admit"} 1.0' in text
