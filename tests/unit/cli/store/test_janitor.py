"""``tiphys janitor``: what one round by hand finds, removes and tells.

| found | with ``--dry-run`` | without |
|---|---|---|
| an upload that died, an alert done with long ago | would be removed | removed |
| a failed agent pod of a Workflow that goes on | would be removed | removed |
| a run whose Workflow is gone, a claim never sent | left | left |
| a lease of an attempt that is over | left | left |
"""

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from support.builders.argo_objects import put, put_agent, workflow
from support.builders.compiled_workflows import gated, pipeline_of
from support.builders.ledger import ask, queues, spec
from support.fakes.submitter import FakeSubmitter
from support.processes.failpoints import dying_at
from support.servers.kube_server import serving
from support.stories.kubeconfig_folder import Desk
from tiphys_controller import start_run

from hera_pipelines.cli import main
from hera_pipelines.cli.store import janitor
from tiphys.kube import identify_cluster
from tiphys.kube.resources import GPU_LEDGERS
from tiphys.records import AlertResultRecord, utc_now
from tiphys.store import DirectoryStore
from tiphys.store.layout import alert_key

MANIFEST = pipeline_of(gated("fit"))
ALERT = "a" * 32


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    """With an upload that died two days ago, and an alert that was done with as long as the tests look back."""
    made = DirectoryStore(tmp_path / "store")
    made.create("x", b"")
    half = made.temporary_folder / "half"
    half.write_bytes(b"half")
    os.utime(half, (half.stat().st_mtime - 48 * 3600,) * 2)
    made.create(alert_key(ALERT, "result"), AlertResultRecord(outcome="told", message="").to_bytes())
    return made


@pytest.fixture
def desk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store: DirectoryStore
) -> Iterator[Desk]:
    """A month after everything in the store was written, with one thing of each kind on the cluster."""
    monkeypatch.setattr(janitor, "utc_now", lambda: utc_now() + timedelta(days=30))
    with serving() as server:
        here = Desk(server, tmp_path, capsys)
        here.server.add_namespace("tiphys")
        owner = put(here.api, workflow("goes-on"))
        put_agent(here.api, owner)
        here.server.api("tiphys").create(
            GPU_LEDGERS, "tiphys", {"metadata": {"name": "default"}, "spec": spec(queues(research={"A100": 8}))}
        )
        for uid, gpus in ((owner["metadata"]["uid"], 2), ("gone", 1)):
            here.ledger("tiphys").request(ask(gpus, uid))
        submitter = FakeSubmitter(tmp_path / "cluster", identify_cluster(here.api))
        start_run(store, submitter, MANIFEST, "lost", "ml")
        with dying_at("start.after_claim"):
            start_run(store, submitter, MANIFEST, "unsent", "ml")
        yield here


def left(store: DirectoryStore, desk: Desk) -> tuple[bool, bool, int]:
    """Whether there are the upload and the alert, and how many agent pods."""
    return (
        (store.temporary_folder / "half").exists(),
        bool(list(store.list("control/alerts/"))),
        len(desk.server.objects("pods")),
    )


def test_the_janitor_reports_every_finding_and_removes_garbage(desk: Desk, store: DirectoryStore) -> None:
    asked = ("janitor", store.url, "-n", "ml", "--ledger-namespace", "tiphys")
    code, out, err = desk.tiphys(*asked, "--dry-run", "-o", "json")
    document = json.loads(out)
    assert (code, document["kind"], document["dry_run"]) == (0, "JanitorRound", True)
    assert [(one["what"], one["state"]) for one in document["items"]] == [
        ("agent", "would_be_removed"),
        ("lease", "left"),
        ("upload", "would_be_removed"),
        ("alert", "would_be_removed"),
        ("gone", "left"),
        ("unsent", "left"),
    ]
    assert left(store, desk) == (True, True, 1)

    code, out, err = desk.tiphys(*asked)

    assert (code, left(store, desk)) == (0, (False, False, 0))
    assert "3 of 6 removed, 3 left for other commands" in err
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert "the node was low on resource" in rows["agent"].lower()
    assert "run-gone/fit/1" in rows["lease"]
    assert "its Workflow has finished or is gone, and it holds 1 GPU; they are released" in rows["lease"]
    assert "begun 2d ago and never finished" in rows["upload"]
    assert "handled 30d ago (told)" in rows["alert"]
    assert "Workflow ml/lost was deleted before it ended; `tiphys resume lost` continues the run" in rows["gone"]
    assert "submission 1 was claimed 30d ago and never sent; `tiphys resume unsent` sends it" in rows["unsent"]

    code, out, err = desk.tiphys(*asked)
    assert [line.split()[0] for line in out.splitlines()] == ["WHAT", "lease", "gone", "unsent"]


def test_a_store_that_cannot_be_read_does_not_keep_the_others_from_being_cleaned(
    desk: Desk, store: DirectoryStore, tmp_path: Path
) -> None:
    damaged = DirectoryStore(tmp_path / "damaged")
    damaged.create(alert_key(ALERT, "result"), b"no record")

    code, _, err = desk.tiphys("janitor", damaged.url, store.url)

    assert code != 0
    assert [line for line in err.splitlines() if line.startswith("tiphys: ")]
    assert left(store, desk) == (False, False, 0)


def test_storage_alone_needs_no_cluster(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    start_run(store, FakeSubmitter(tmp_path / "cluster"), MANIFEST, "lost")

    assert main(["janitor", "store"]) == 0

    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["WHAT", "upload"]
    assert "no cluster was checked" in err
    assert main(["janitor", "store"]) == 0
    assert "nothing to clean up" in capsys.readouterr().err
