"""Where Argo keeps the outputs of steps, and whether Tiphys finds them there.

| default repository of the namespace | finding |
|---|---|
| bucket of the store | ok |
| none, and none of Argo's controller | warning |
| another bucket, or none that can be read | failed |
| key format below control/, without the pod, or with odd braces | warning |
| cannot be read | unknown |
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from tiphys_controller.doctor import CheckStatus, Finding, UnknownValue
from tiphys_controller.doctor.artifact_repository import check_artifact_repository
from tiphys_controller.doctor.observed import ArtifactSettings, WorkflowNamespace

STORE = "s3://ml-runs/team-a/tiphys"
ANNOTATION = "workflows.argoproj.io/default-artifact-repository"
FORBIDDEN = UnknownValue("configmaps is forbidden")


def config_map(name: str = "default", **s3: str) -> dict[str, Any]:
    return {"metadata": {"annotations": {ANNOTATION: name}}, "data": {"default": json.dumps({"s3": s3})}}


def check(
    declared: dict[str, Any] | None, controller: Mapping[str, str] | UnknownValue | None = None, store: str = STORE
) -> Finding:
    settings = ArtifactSettings(store, declared)
    namespace = WorkflowNamespace("team-a", True, frozenset(), frozenset(), {}, {}, artifact_settings=settings)
    [finding] = check_artifact_repository(namespace, {} if controller is None else controller)
    assert finding.check == "artifacts"
    return finding


@pytest.mark.parametrize(
    ("declared", "state", "says"),
    [
        (config_map(bucket="ml-runs"), CheckStatus.OK, "bucket ml-runs"),
        (config_map(bucket="ml-runs", keyFormat="argo/{{pod.name}}"), CheckStatus.OK, "bucket ml-runs"),
        (None, CheckStatus.WARNING, "there is no default artifact repository"),
        ({"metadata": {}, "data": {"default": "s3: {bucket: ml-runs}"}}, CheckStatus.WARNING, "there is no default"),
        (config_map(bucket="other"), CheckStatus.FAILED, "bucket other, and the store of the runs is s3://ml-runs"),
        (config_map(), CheckStatus.FAILED, "names no S3 bucket"),
        (config_map(name="missing", bucket="ml-runs"), CheckStatus.FAILED, "names no S3 bucket"),
        (config_map(bucket="ml-runs", keyFormat="a/{{workflow.name}}"), CheckStatus.WARNING, "lacks {{pod.name}}"),
        (config_map(bucket="ml-runs", keyFormat="a/{{pod.name}"), CheckStatus.WARNING, "braces do not match"),
        (
            config_map(bucket="ml-runs", keyFormat="team-a/tiphys/control/{{pod.name}}"),
            CheckStatus.WARNING,
            "below control/",
        ),
    ],
)
def test_the_repository_of_a_namespace(declared: dict[str, Any] | None, state: CheckStatus, says: str) -> None:
    finding = check(declared)

    assert finding.state is state
    assert says in finding.sentence
    assert bool(finding.remedy) == (state is not CheckStatus.OK)


@pytest.mark.parametrize("bucket", ["ml-runs", "other"])
def test_argos_controller_may_declare_it_for_all(bucket: str) -> None:
    settings = {"artifactRepository": f"s3:\n  bucket: {bucket}\n"}

    assert check(None, settings).state is (CheckStatus.OK if bucket == "ml-runs" else CheckStatus.FAILED)
    assert check(config_map(bucket="ml-runs"), settings).state is CheckStatus.OK


AZURE = {"container": "runs", "endpoint": "https://mlruns.blob.core.windows.net"}


@pytest.mark.parametrize(
    ("store", "repository", "state", "says"),
    [
        ("gs://ml-runs/p", {"gcs": {"bucket": "ml-runs"}}, CheckStatus.OK, "bucket ml-runs"),
        ("gs://ml-runs/p", {"gcs": {"bucket": "other"}}, CheckStatus.FAILED, "keeps artifacts in bucket other"),
        (
            "gs://ml-runs/p",
            {"s3": {"bucket": "ml-runs"}},
            CheckStatus.FAILED,
            "names no bucket of Google Cloud Storage",
        ),
        ("az://mlruns/runs/p", {"azure": AZURE}, CheckStatus.OK, "container runs"),
        (
            "az://mlruns/runs/p",
            {"azure": {**AZURE, "container": "x"}},
            CheckStatus.FAILED,
            "container x of https://mlr",
        ),
        ("az://other/runs/p", {"azure": AZURE}, CheckStatus.FAILED, "the store of the runs is az://other/runs/p"),
        ("az://mlruns/runs/p", {"azure": "?"}, CheckStatus.FAILED, "names no container of Azure"),
        (
            "az://mlruns/runs/p",
            {"azure": {**AZURE, "keyFormat": "p/control/{{pod.name}}"}},
            CheckStatus.WARNING,
            "below control/",
        ),
    ],
)
def test_the_repository_is_of_the_kind_of_the_store(
    store: str, repository: dict[str, Any], state: CheckStatus, says: str
) -> None:
    declared = {"metadata": {"annotations": {ANNOTATION: "default"}}, "data": {"default": json.dumps(repository)}}

    finding = check(declared, store=store)

    assert finding.state is state
    assert says in finding.sentence


def test_an_artifact_repository_that_may_not_be_read_is_unknown() -> None:
    assert check(None, FORBIDDEN).state is CheckStatus.UNKNOWN
    assert check(config_map(bucket="ml-runs"), FORBIDDEN).state is CheckStatus.OK


def test_a_store_in_a_folder_needs_none() -> None:
    namespace = WorkflowNamespace("team-a", True, frozenset(), frozenset(), {}, {})

    assert list(check_artifact_repository(namespace, {})) == []
