"""The reply of Argo's template.execute, byte for byte as its agent reads it."""

from typing import Any

import pytest
from pydantic import ValidationError

from tiphys.protocol.execute_api import (
    NOT_MINE,
    ArtifactValue,
    ExecuteRequest,
    NodeOutputs,
    ParameterValue,
    S3Location,
    failed_reply,
    find_artifact_place,
    pending_reply,
    succeeded_reply,
)


def test_a_body_of_another_plugin_gets_an_empty_answer() -> None:
    assert NOT_MINE.to_json() == {}


@pytest.mark.parametrize(("seconds", "text"), [(10, "10s"), (2.5, "2.5s"), (300.0, "300s")])
def test_pending_says_why_and_when_to_ask_again(seconds: float, text: str) -> None:
    assert pending_reply("Deferred: queue research is full", seconds).to_json() == {
        "node": {"phase": "Pending", "message": "Deferred: queue research is full"},
        "requeue": text,
    }


@pytest.mark.parametrize("reply", [succeeded_reply("done"), failed_reply("done")])
def test_a_final_answer_never_asks_to_be_called_again(reply: object) -> None:
    assert "requeue" not in reply.to_json()  # type: ignore[attr-defined]


def test_success_carries_outputs_as_argo_spells_them() -> None:
    outputs = NodeOutputs(
        parameters=[ParameterValue(name="run", value="true")],
        artifacts=[ArtifactValue(name="model", s3=S3Location(key="p/model"))],
    )

    assert succeeded_reply("adopted", outputs).to_json() == {
        "node": {
            "phase": "Succeeded",
            "message": "adopted",
            "outputs": {
                "parameters": [{"name": "run", "value": "true"}],
                "artifacts": [{"name": "model", "s3": {"key": "p/model"}}],
            },
        }
    }


def test_failure_says_why() -> None:
    assert failed_reply("no such queue").to_json() == {"node": {"phase": "Failed", "message": "no such queue"}}


def test_a_request_may_say_more_than_we_read() -> None:
    request = ExecuteRequest.model_validate(
        {
            "workflow": {"metadata": {"name": "digits", "namespace": "ml", "uid": "u", "labels": {}}, "spec": {}},
            "template": {"name": "fit-admit", "plugin": {"tiphys": {"op": "admit"}}},
            "progress": "0/1",
        }
    )

    assert request.workflow.metadata.uid == "u"
    assert request.template["plugin"] == {"tiphys": {"op": "admit"}}


@pytest.mark.parametrize("body", [{}, {"workflow": {"metadata": {"name": "a", "uid": "u"}}}, {"template": {}}])
def test_a_request_that_is_no_request_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ExecuteRequest.model_validate(body)


@pytest.mark.parametrize(
    ("artifact", "place"),
    [
        ({"s3": {"key": "p/a"}}, ("", "p/a")),
        ({"s3": {"key": "p/a", "bucket": "b"}}, ("b", "p/a")),
        ({"gcs": {"key": "p/a"}}, ("", "p/a")),
        ({"gcs": {"key": "p/a", "bucket": "b"}}, ("b", "p/a")),
        ({"azure": {"blob": "p/a"}}, ("", "p/a")),
        ({"azure": {"blob": "p/a", "container": "c", "endpoint": "https://x"}}, ("c", "p/a")),
        ({"gcs": {}}, None),
        ({"raw": {"data": "x"}}, None),
        ({}, None),
    ],
)
def test_an_artifact_is_in_a_bucket_of_any_of_the_three_clouds(
    artifact: dict[str, Any], place: tuple[str, str] | None
) -> None:
    assert find_artifact_place(artifact) == place
