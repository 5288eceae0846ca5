"""What the credentials of programs open, on a real S3 server with real users and the policies that ship.

| what | must hold |
|---|---|
| a training on four nodes that is interrupted | saves, resumes and hands over its output with the key of programs |
| that key, while the training runs | creates, overwrites and deletes no record of Tiphys |
| that key, and another tenant | reads, lists, creates, overwrites and deletes nothing |
| `tiphys doctor` | tells the key of programs from that of the services, by variables and by the Secret of a namespace |
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError
from cluster.client import Cluster, Store
from cluster.fixtures import StoreUser
from cluster.test_gangs import TRAINER, Training, training
from cluster.test_install import Release, release

from hera_pipelines.cli import main
from tiphys.store import Store as RunStore
from tiphys.store.credentials import CredentialsHolder
from tiphys.store.incarnations import crash_key
from tiphys.store.layout import FORMAT_MARKER, LineageLayout, RunLayout, alert_key, idempotency_record_key, memo_key

__all__ = ["release", "training"]

RUN = RunLayout("digits")
DIGEST = "ab" * 32
RECORDS = [
    FORMAT_MARKER,
    RUN.run_record,
    RUN.workflow(DIGEST),
    RUN.submission(1),
    RUN.submission(2),
    RUN.submission_binding(1),
    RUN.submission_binding(2),
    RUN.submission_end(1),
    RUN.auto_resume(2),
    RUN.manual_stop(1),
    RUN.item(1, "fit"),
    RUN.reused(1, "fit"),
    RUN.attempt("fit", 1),
    RUN.attempt("fit", 2),
    RUN.attempt_end("fit", 1),
    RUN.done_marker("fit", 1, DIGEST),
    f"{RUN.events}000000001.json",
    memo_key(DIGEST),
    idempotency_record_key(DIGEST),
    *(alert_key("ab" * 16, kind) for kind in ("firing", "resolved", "claim", "result")),
]
OF_PROGRAMS = [
    RUN.outputs("fit", 1) + "artifacts/weights.npy",
    crash_key(RUN, "fit", 1),
    LineageLayout("digits/fit").manifest(1, 10),
]


@pytest.fixture(autouse=True)
def users(cluster: Cluster) -> None:
    if not cluster.own:
        pytest.skip("only the S3 server of `make cluster` can be given users")


def is_refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except ClientError as error:
        return bool(error.response["Error"]["Code"] == "AccessDenied")
    return False


def accepted(user: Store, key: str, *, reading: bool = False) -> Iterator[str]:
    """What the server lets this user do with a key of the bucket."""
    client = user.client()
    source = {"Bucket": user.bucket, "Key": f"{user.prefix}/{FORMAT_MARKER}"}
    calls: dict[str, Callable[..., Any]] = {
        "create": lambda **place: client.put_object(**place, Body=b"{}", IfNoneMatch="*"),
        "overwrite": lambda **place: client.put_object(**place, Body=b"{}"),
        "copy": lambda **place: client.copy_object(**place, CopySource=source),
        "upload": lambda **place: client.create_multipart_upload(**place),
        "delete": lambda **place: client.delete_object(**place),
    }
    if reading:
        calls["read"] = lambda **place: client.get_object(**place)
        calls["list"] = lambda Bucket, Key: client.list_objects_v2(Bucket=Bucket, Prefix=Key)  # noqa: N803
    for name, call in calls.items():
        if not is_refused(lambda call=call: call(Bucket=user.bucket, Key=key)):  # type: ignore[misc]
            yield f"{name} {key}"
    with contextlib.suppress(ClientError):
        if client.delete_objects(Bucket=user.bucket, Delete={"Objects": [{"Key": key}]}).get("Deleted"):
            yield f"delete among others {key}"


def contents(store: Store) -> dict[str, str]:
    pages = store.client().get_paginator("list_objects_v2").paginate(Bucket=store.bucket)
    return {one["Key"]: one["ETag"] for page in pages for one in page.get("Contents", [])}


@pytest.mark.parametrize("training", [TRAINER], indirect=True, ids=["trainer"])
def test_the_key_of_programs_is_enough_for_a_training_and_writes_no_record_of_it(
    training: Training, cluster_store: Store, program_store: Store
) -> None:
    training.begin()
    control = f"{cluster_store.prefix}/control/"
    before = {key: tag for key, tag in contents(cluster_store).items() if key.startswith(control)}
    assert f"{cluster_store.prefix}/{RUN.attempt('fit', 1)}" in before
    done = [what for key in RECORDS for what in accepted(program_store, f"{cluster_store.prefix}/{key}")]
    assert done == []
    assert before == {key: tag for key, tag in contents(cluster_store).items() if key.startswith(control)}

    training.delete(2)
    training.watched("failed")
    assert "attempt 2 resumes from step" in training.end_try("Failed")
    training.begin(retry=1)
    training.watched("succeeded")
    training.end_try("Succeeded", retry=1, expected="Succeeded")
    assert f"{cluster_store.prefix}/{RUN.outputs('fit', 2)}artifacts/weights.npy" in contents(cluster_store)


def test_the_key_of_programs_opens_nothing_of_another_tenant(cluster_store: Store, program_store: Store) -> None:
    there = [f"other/{key}" for key in (*RECORDS, *OF_PROGRAMS)]
    for key in there:
        cluster_store.client().put_object(Bucket=cluster_store.bucket, Key=key, Body=b"theirs")
    before = contents(cluster_store)
    new = ["other/control/runs/new/run.json", "other/data/runs/new/outputs/fit/000000001/artifacts/x", "elsewhere"]
    assert [what for key in (*there, *new) for what in accepted(program_store, key, reading=True)] == []
    assert contents(cluster_store) == before


@pytest.fixture
def findings(
    cluster_store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, str]]:
    """What `tiphys doctor` finds of the store with the key of a user."""

    def examine(user: Store, *options: str) -> dict[str, str]:
        for name, value in user.environment.items():
            monkeypatch.setenv(name, value)
        main(["doctor", cluster_store.url, "-o", "json", *options])
        found = json.loads(capsys.readouterr().out)["findings"]
        return {one["check"]: one["state"] for one in found}

    return examine


def test_doctor_distinguishes_the_keys_and_leaves_no_objects(
    run_store: RunStore,
    cluster_store: Store,
    program_store: Store,
    services_store: Store,
    findings: Callable[..., dict[str, str]],
) -> None:
    assert "failed" not in findings(services_store).values()
    of_programs = findings(program_store, "--as-program")
    assert {name for name, state in of_programs.items() if state == "ok"} >= {
        "data",
        "control-read",
        "control-write",
        "other-tenants",
    }
    assert "failed" not in of_programs.values()
    assert findings(services_store, "--as-program") == {
        "data": "ok",
        "control-read": "ok",
        "control-write": "failed",
        "other-tenants": "ok",
    }
    assert findings(cluster_store, "--as-program")["other-tenants"] == "failed", "an administrator reaches everything"
    assert findings(program_store)["create-only"] == "failed"
    assert not [key for key in contents(cluster_store) if "/probe/" in key]


def test_doctor_tries_out_the_secret_of_a_namespace(
    release: Release, store_user: StoreUser, cluster_store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = release.tenants
    both = store_user(CredentialsHolder.SERVICES, f"s3://{cluster_store.bucket}/{{namespace}}/tiphys")
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tiphys-store"}}
    release.cluster.apply({**secret, "stringData": both.environment}, namespace=theirs)
    release.apply("install")

    options = ["-n", ours, "-n", theirs, "--kubeconfig", str(release.cluster.kubeconfig), "-o", "json"]
    main(["doctor", "--cluster", *options])

    found = json.loads(capsys.readouterr().out)["findings"]
    of_access = [one for one in found if one["check"] == "store-access"]
    states = {name: [one for one in of_access if one["place"] == name] for name in release.tenants}
    assert [one["state"] for one in states[ours]] == ["ok"]
    assert {one["state"] for one in states[theirs]} == {"failed"}
    said = " ".join(one["sentence"] for one in states[theirs])
    assert "below control/" in said and f"/{ours}/tiphys/control/, which belongs to another tenant" in said
    assert not [key for key in contents(cluster_store) if "/probe/" in key]
