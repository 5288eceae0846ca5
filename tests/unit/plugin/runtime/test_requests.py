"""What arrives at the plugin, from foreign bodies to broken ones.

| body                                  | answer                                          |
|---------------------------------------|-------------------------------------------------|
| of another plugin, or no plugin       | {}: not mine                                    |
| field missing, unknown, of other type | Failed, names the field                         |
| a placeholder Argo did not fill in    | Failed, names it                                |
| the same, in a try of a training      | Failed: Error is "try again"                    |
| storage or ledger out of reach        | StoreError (503), which the sidecar waits out   |
"""

import pytest
from support.stories.plugin import QUICK, Flow, fit, outputs, phase, prep, said, world

from tiphys.errors import StoreError
from tiphys.store import DirectoryStore, read_run


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


@pytest.mark.parametrize("op", ["admit", "conclude"])
def test_mistake_in_a_try_of_a_training_is_not_tried_again(flow, op):
    reply = flow.call(flow.body(op, "fit", 0) | {"extra": "1"})
    assert phase(reply) == "Failed"
    assert said(reply).startswith("Refused: plugin.tiphys.extra")


def test_operation_of_an_older_version_is_refused_with_its_remedy(flow):
    reply = flow.call(flow.body("settle", "fit", 0, status="Failed"))
    assert phase(reply) == "Failed"
    assert "compile the pipeline with the version of Tiphys that the plugin runs" in said(reply)


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


def test_call_that_storage_did_not_answer_is_for_the_caller_to_repeat(tmp_path):
    store = Unreachable(tmp_path / "store")
    here = world(tmp_path, settings=QUICK, store=store)
    flow = here.submit(prep())
    store.down = True
    for _ in range(10):
        with pytest.raises(StoreError, match="did not answer: connection refused"):
            flow.admit("prep")
    store.down = False
    assert outputs(flow.admit("prep"))["run"] == "true"


def test_run_is_recorded_although_the_ledger_does_not_answer(tmp_path):
    here = world(tmp_path, settings=QUICK)
    flow = here.submit(prep())
    here.core.forget_recovery()

    def away(*_: object) -> None:
        raise StoreError("the API server did not answer")

    snapshot, here.ledger.snapshot = here.ledger.snapshot, away
    with pytest.raises(StoreError):
        flow.admit("prep")
    assert read_run(here.store, "digits-abc12").pipeline
    here.ledger.snapshot = snapshot
    assert outputs(flow.admit("prep"))["run"] == "true"


def test_answers_are_counted_by_operation_and_phase(flow):
    flow.admit("prep")
    flow.admit("nothing")
    text = flow.world.core.metrics.render().decode()
    assert 'tiphys_plugin_answers_total{answer="succeeded",op="admit"} 1.0' in text
    assert 'tiphys_plugin_answers_total{answer="failed",op="admit"} 1.0' in text
