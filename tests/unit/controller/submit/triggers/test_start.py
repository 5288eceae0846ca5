"""One run for one object.

| before | this call | outcome |
|---|---|---|
| nothing | – | a run with the fields of the object as parameters |
| the same object | from another controller, or by a listing | the same run |
| died anywhere | the same | one Workflow, what is missing is added |
| died, and the template was changed | the same | what was begun is completed |
| the run was deleted since | the same | nothing |
| the same content, uploaded again | – | nothing, also if the run was deleted since |
| the object was changed | – | another run |
| another template has a trigger for the object | – | another run |
| the run to resume runs | – | refused for now; resumed once it has ended |
"""

import re

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.builders.irregular_samples import Irregular
from support.fakes.submitter import FakeSubmitter
from support.processes.failpoints import dying_at
from support.stories.triggers import template, version
from tiphys_controller import start_run
from tiphys_controller.run_deletion import delete_runs
from tiphys_controller.submit.triggers.catalog import Trigger, read_trigger
from tiphys_controller.submit.triggers.start import (
    TriggeredRun,
    build_triggered_pipeline,
    find_triggered_run,
    read_last_triggered_run,
    start_triggered_run,
)

from tiphys.errors import ConflictError, UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.records import ObjectVersion
from tiphys.store import Store, list_runs, read_events, read_run, read_submissions

DOCUMENT = template(objects="s3://raw/ml/", parameters={"source": "url"})
OBJECT = version("ml/a.csv")
POINTS = ("start.after_key", "start.after_record", "start.after_claim", "start.after_create", "start.after_bind")
TRIGGER_POINTS = ("trigger.after_start", "trigger.after_ordered_record", "trigger.after_record")
HOSTILE = ['"; rm -rf / #', "<img src=x onerror=alert(1)>", "\x1b]0;x\x07", "$(id)`id`", "k" * 1000, "ü/ %2F+", "{x}"]


def trigger(document: Manifest = DOCUMENT) -> Trigger:
    found = read_trigger(document)
    assert found is not None
    return found


def start(
    store: Store, submitter: FakeSubmitter, one: ObjectVersion = OBJECT, document: Manifest = DOCUMENT
) -> TriggeredRun:
    found = trigger(document)
    return start_triggered_run(
        store, submitter, found, build_triggered_pipeline(found, document, one), one, "delivered"
    )


def sources(submitter: FakeSubmitter) -> list[str]:
    parameters = [submitter.manifest(name, "ml")["spec"]["arguments"]["parameters"] for name in submitter.names()]
    return sorted(one["value"] for each in parameters for one in each if one["name"] == "source")


def test_an_object_starts_a_run_that_knows_it(store: Store, submitter: FakeSubmitter) -> None:
    fields = ("url", "bucket", "key", "name", "etag", "size", "modified")
    document = template(objects="s3://raw/ml/", parameters={f"p-{field}": field for field in fields})
    document["spec"]["arguments"]["parameters"] += [{"name": f"p-{field}"} for field in fields]
    made = start(store, submitter, document=document)

    assert made.is_new
    assert (made.record.run, made.record.submission, made.record.source) == (submitter.names()[0], 1, "delivered")
    manifest = submitter.manifest(made.record.run, "ml")
    values = {one["name"]: one["value"] for one in manifest["spec"]["arguments"]["parameters"]}
    assert {name: value for name, value in values.items() if name.startswith("p-")} == {
        "p-url": "s3://raw/ml/a.csv",
        "p-bucket": "raw",
        "p-key": "ml/a.csv",
        "p-name": "a.csv",
        "p-etag": OBJECT.etag,
        "p-size": "1",
        "p-modified": "2026-05-04T12:01:00.000Z",
    }
    assert manifest["kind"] == "Workflow"
    assert "workflowMetadata" not in manifest["spec"]
    assert "tiphys.dev/trigger" not in manifest["metadata"]["annotations"]
    assert document["spec"]["arguments"]["parameters"][2] == {"name": "source", "value": "none"}, "no template changes"
    assert read_run(store, made.record.run).parameters["p-url"] == "s3://raw/ml/a.csv"
    [event] = read_events(store, made.record.run)
    assert (event.name, event.data["object"], event.data["submission"]) == ("run.triggered", "s3://raw/ml/a.csv", 1)
    assert "a notification named it" in event.message


def test_the_same_object_is_the_same_run(store: Store, submitter: FakeSubmitter) -> None:
    again = version("ml/a.csv", after_seconds=90.0)
    made = [start(store, submitter, one) for one in (OBJECT, OBJECT, again)]

    assert len(submitter.names()) == 1
    assert {one.record.run for one in made} == set(submitter.names())
    assert [one.is_new for one in made] == [True, False, False], "an upload of the same bytes is no other object"
    assert find_triggered_run(store, trigger(), OBJECT) == made[0].record == find_triggered_run(store, trigger(), again)
    assert [one.name for one in read_events(store, made[0].record.run)] == ["run.triggered"]


def test_a_run_is_identified_by_content_key_and_trigger(store: Store, submitter: FakeSubmitter) -> None:
    other = template("other", objects="s3://raw/", parameters={"source": "url"})
    start(store, submitter)
    start(store, submitter, version("ml/a.csv", "2"))
    start(store, submitter, version("ml/b.csv"))
    start(store, submitter, OBJECT, other)

    assert len(submitter.names()) == 4


@pytest.mark.parametrize("key", HOSTILE)
def test_a_key_is_a_value_and_nothing_else(store: Store, submitter: FakeSubmitter, key: str) -> None:
    made = start(store, submitter, version(f"ml/{key}"))

    assert sources(submitter) == [f"s3://raw/ml/{key}"]
    without = {"arguments": None}
    expected = start(store, submitter, version("ml/plain"))
    hostile, plain = (submitter.manifest(one.record.run, "ml")["spec"] for one in (made, expected))
    assert hostile | without == plain | without


@pytest.mark.parametrize(
    ("key", "why"), [("{{=sprig.env('HOME')}}", "Argo would evaluate"), ("x\ufffd[2J", "does not list it as it is")]
)
def test_a_key_that_argo_would_evaluate_or_that_is_not_the_objects_starts_nothing(
    store: Store, submitter: FakeSubmitter, key: str, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        start(store, submitter, version(f"ml/{key}"))
    assert submitter.names() == []
    assert list(store.list("")) == []


@pytest.mark.parametrize("point", [*POINTS, *TRIGGER_POINTS])
def test_a_controller_that_died_leaves_one_workflow(store: Store, submitter: FakeSubmitter, point: str) -> None:
    with dying_at(point):
        start(store, submitter)
    again = [start(store, submitter) for _ in range(2)]

    assert submitter.names() == [again[0].record.run]
    assert list(list_runs(store)) == submitter.names()
    assert again[0].record == again[1].record == find_triggered_run(store, trigger(), OBJECT)
    assert [one.is_new for one in again] == [point != "trigger.after_record", False]


def test_a_template_that_was_changed_does_not_make_another_run(store: Store, submitter: FakeSubmitter) -> None:
    with dying_at("start.after_record"):
        start(store, submitter)
    changed = template(objects="s3://raw/ml/", parameters={"source": "key"})
    start(store, submitter, document=changed)

    assert sources(submitter) == ["s3://raw/ml/a.csv"], "as it was begun"


def test_a_deleted_run_is_not_made_again(store: Store, submitter: FakeSubmitter) -> None:
    made = start(store, submitter)
    submitter.end(made.record.run, namespace="ml")
    submitter.delete(made.record.run, "ml")
    deleted = delete_runs(store, submitter, [made.record.run], force=True)

    assert [one.kept_because for one in deleted] == [()]
    for one in (OBJECT, version("ml/a.csv", after_seconds=90.0)):
        assert find_triggered_run(store, trigger(), one) == made.record


def test_the_object_that_was_modified_last_is_the_last(store: Store, submitter: FakeSubmitter) -> None:
    made = [start(store, submitter, version(f"ml/{name}", after_seconds=at)) for name, at in (("b", 9.0), ("a", 5.0))]
    start(store, submitter, OBJECT, template("digits-2", objects="s3://raw/", parameters={"source": "url"}))

    assert read_last_triggered_run(store, "digits") == made[0].record
    assert read_last_triggered_run(store, "other") is None


@pytest.mark.parametrize(
    ("document", "mistake"),
    [
        (template(objects="s3://raw/ml/", parameters={"sauce": "url", "zest": "url"}), "no parameter 'sauce'"),
        (template(objects="s3://raw/ml/", parameters={}), "parameter 'source' of the WorkflowTemplate has no value"),
        (template(objects="s3://raw/ml/"), "Tiphys did not compile it"),
    ],
)
def test_a_template_that_makes_no_run_is_refused(
    store: Store, submitter: FakeSubmitter, document: Manifest, mistake: str
) -> None:
    if "compile" in mistake:
        del document["spec"]["workflowMetadata"]
        document["spec"]["arguments"]["parameters"] = [{"name": "source"}]
    if "no value" in mistake:
        document["spec"]["arguments"]["parameters"] = [{"name": "source"}]
    with pytest.raises(UsageError, match=mistake):
        start(store, submitter, document=document)
    assert list(store.list("")) == []


def test_first_in_order_of_several_parameters_without_a_value_is_named(store: Store, submitter: FakeSubmitter) -> None:
    first, *others = sorted(Irregular().parameters(3))
    document = template(objects="s3://raw/ml/", parameters={})
    document["spec"]["arguments"]["parameters"] = [{"name": name} for name in (*others, first)]
    with pytest.raises(UsageError, match=re.escape(f"parameter {first!r} of the WorkflowTemplate has no value")):
        start(store, submitter, document=document)


def test_an_object_resumes_a_run_once_it_has_ended(store: Store, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, pipeline_of(gated("prep"), gated("fit", depends="prep")), "nightly", namespace="ml")
    document = template(objects="s3://raw/ml/", resume="nightly")
    with pytest.raises(ConflictError, match="is still running"):
        start(store, submitter, document=document)
    History(store, "nightly").done("prep")
    submitter.end("nightly", namespace="ml")
    with dying_at("trigger.after_start"):
        start(store, submitter, document=document)
    made = start(store, submitter, document=document)
    submitter.end("nightly-2", namespace="ml")
    again = start(store, submitter, document=document)

    assert (made.record.run, made.record.submission, again.record.submission) == ("nightly", 2, 2)
    assert submitter.names() == ["nightly", "nightly-2"]
    assert len(read_submissions(store, "nightly")) == 2


def test_a_run_without_missing_steps_is_not_resumed(store: Store, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, pipeline_of(gated("prep")), "nightly", namespace="ml")
    History(store, "nightly").done("prep")
    submitter.end("nightly", "Succeeded", namespace="ml")
    made = start(store, submitter, document=template(objects="s3://raw/ml/", resume="nightly"))

    assert (made.record.submission, submitter.names()) == (0, ["nightly"])
