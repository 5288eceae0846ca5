"""The runs of a cluster that is gone go on in another one, each once, whoever is interrupted in between.

| run | its last submission | recover |
|---|---|---|
| has begun | on the lost cluster, without an end | resumes it |
| is claimed for the new cluster, never sent | as after a crash of recover | sends it |
| has ended | on the lost cluster | leaves it |
| had done all its steps | on the lost cluster, without an end | records its end |
| has begun | on the cluster itself, where its Workflow is gone | resumes it |
| another tenant's | on the lost cluster | names the namespace |
| elsewhere | on a third cluster, or a local engine | leaves it |
| damaged | on the lost cluster | refuses it, and goes on |
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.fakes.submitter import FakeSubmitter
from support.servers.kube_server import KubeServer, serving
from tiphys_controller import Submitter, start_run
from tiphys_controller.kubernetes import KubernetesSubmitter
from tiphys_controller.submit.recover import list_lost_runs, recover_runs

from tiphys.kube import identify_cluster
from tiphys.kube.resources import WORKFLOWS
from tiphys.records import AttemptEndOutcome, SubmissionEnd
from tiphys.store import DirectoryStore, RunLayout, read_attempt_end, read_submissions

from .conftest import Command

LOST, OTHER = "kubernetes:lost", "kubernetes:other"
PIPELINE = pipeline_of(gated("prep"), gated("fit", depends="prep"))


@pytest.fixture
def server() -> Iterator[KubeServer]:
    with serving() as found:
        found.add_namespace("ml")
        yield found


@pytest.fixture
def kubeconfig(server: KubeServer, tmp_path: Path) -> Path:
    context = {"cluster": "test", "user": "me", "namespace": "ml"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": server.url}}],
        "users": [{"name": "me", "user": {}}],
        "contexts": [{"name": "test", "context": context}],
        "current-context": "test",
    }
    (file := tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    return file


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def begun(store: DirectoryStore, submitter: Submitter, run: str, namespace: str = "ml") -> None:
    """Its first step is done, and its second one runs."""
    start_run(store, submitter, PIPELINE, run, namespace=namespace)
    history = History(store, run)
    history.done("prep")
    history.opened("fit")


def ended(store: DirectoryStore, submitter: Submitter, run: str, phase: str) -> None:
    begun(store, submitter, run)
    end = SubmissionEnd(run=run, submission=1, status=phase)
    store.create(RunLayout(run).submission_end(1), end.to_bytes())


@pytest.fixture
def lost(store: DirectoryStore, tmp_path: Path) -> FakeSubmitter:
    """A store with runs of a lost cluster, and of others."""
    cluster = FakeSubmitter(tmp_path / "lost", LOST)
    for run in ("digits", "digits.2", "ziffern-7"):
        begun(store, cluster, run)
    begun(store, cluster, "speech", namespace="speech")
    ended(store, cluster, "failed", "Failed")
    ended(store, cluster, "succeeded", "Succeeded")
    begun(store, FakeSubmitter(tmp_path / "other", OTHER), "elsewhere")
    begun(store, FakeSubmitter(tmp_path / "local", "local:desk:/state"), "at-the-desk")
    return cluster


def test_recover_lists_the_clusters_of_runs_without_an_end(
    tiphys: Command, lost: FakeSubmitter, store: DirectoryStore, kubeconfig: Path
) -> None:
    answer = tiphys("recover", "--store", store.url, "--kubeconfig", kubeconfig, "-o", "json")
    found = {(one["cluster"], one["namespace"], one["runs"]) for one in json.loads(answer.out)["clusters"]}
    assert found == {(LOST, "ml", 3), (LOST, "speech", 1), (OTHER, "ml", 1)}
    table = tiphys("recover", "--store", store.url, "--kubeconfig", kubeconfig)
    assert (table.code, f"tiphys recover {LOST} -n ml" in table.err) == (0, True)


def test_recover_resumes_the_runs_of_a_lost_cluster_once(
    tiphys: Command, lost: FakeSubmitter, store: DirectoryStore, kubeconfig: Path, server: KubeServer
) -> None:
    arguments = ("recover", LOST, "--store", store.url, "--kubeconfig", kubeconfig)
    planned = tiphys(*arguments, "--dry-run")
    assert (planned.code, server.objects("workflows")) == (0, [])
    answer = tiphys(*arguments)
    assert answer.code == 0
    assert sorted(line.split()[0] for line in answer.out.splitlines()[1:]) == ["digits", "digits.2", "ziffern-7"]
    assert "1 of its runs belong to namespace speech: repeat the command with -n speech" in answer.err
    names = ["digits-2", "digits.2-2", "ziffern-7-2"]
    assert sorted(one["metadata"]["name"] for one in server.objects("workflows")) == names
    end = read_attempt_end(store, "digits", "fit", 1)
    assert end is not None
    assert (end.outcome, end.message) == (
        AttemptEndOutcome.FENCED,
        "lost with its workflow, which recorded no end of it",
    )
    again = tiphys(*arguments)
    assert again.code == 3
    assert "no run in namespace ml without a recorded end" in again.error
    assert len(server.objects("workflows")) == 3


def test_recover_sends_what_a_crash_has_left_unsent(
    lost: FakeSubmitter, store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = FakeSubmitter(tmp_path / "new", "kubernetes:new")
    monkeypatch.setenv("TIPHYS_FAILPOINTS", "resume.after_claim=raise")
    found = list_lost_runs(store, new, LOST)
    [refused] = recover_runs(store, new, found[:1], jobs=1)
    assert "failpoint resume.after_claim is set to raise" in refused.message
    monkeypatch.delenv("TIPHYS_FAILPOINTS")
    assert read_submissions(store, "digits")[-1].claim.cluster == new.cluster
    assert list_lost_runs(store, new, LOST) == found
    recovered = list(recover_runs(store, new, found[:1], jobs=4))
    assert [run.workflow_name for run in recovered] == ["digits-2"]
    assert [submission.claim.submission for submission in read_submissions(store, "digits")] == [1, 2]
    assert list_lost_runs(store, new, LOST) == found[1:]


def test_recover_ends_a_run_that_had_done_all_its_steps(
    lost: FakeSubmitter, store: DirectoryStore, tmp_path: Path
) -> None:
    start_run(store, lost, PIPELINE, "complete", namespace="ml")
    for step in ("prep", "fit"):
        History(store, "complete").done(step)
    new = FakeSubmitter(tmp_path / "new", "kubernetes:new")
    found = [run for run in list_lost_runs(store, new, LOST) if run.run == "complete"]
    assert [run.workflow_name for run in recover_runs(store, new, found, jobs=1)] == [""]
    [submission] = read_submissions(store, "complete")
    assert submission.end is not None
    assert submission.end.status == "Succeeded"
    assert "complete" not in {run.run for run in list_lost_runs(store, new, LOST)}


def test_recover_goes_on_after_a_run_that_is_refused(
    tiphys: Command, lost: FakeSubmitter, store: DirectoryStore, kubeconfig: Path, server: KubeServer
) -> None:
    record = Path(store.url.removeprefix("file://")) / RunLayout("digits").run_record
    record.chmod(0o644)
    record.write_text("{")
    answer = tiphys("recover", LOST, "--store", store.url, "--kubeconfig", kubeconfig)
    assert answer.code == 1
    assert "1 of 3 runs were not resumed, digits for one: " in answer.error
    assert len(server.objects("workflows")) == 2


def test_recover_resumes_runs_whose_workflows_are_gone_from_the_cluster_itself(
    tiphys: Command, store: DirectoryStore, kubeconfig: Path, server: KubeServer
) -> None:
    api = server.api("ml")
    here = KubernetesSubmitter(api, identify_cluster(api))
    for run in ("kept", "gone"):
        begun(store, here, run)
    api.delete(WORKFLOWS, "ml", "gone")
    answer = tiphys("recover", here.cluster, "--store", store.url, "--kubeconfig", kubeconfig)
    assert answer.code == 0
    assert sorted(one["metadata"]["name"] for one in server.objects("workflows")) == ["gone-2", "kept"]
