"""Workflow objects through an argo-server: found, created, ended, watched; and which cluster it belongs to."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.builders.argo_objects import put, workflow
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.processes.failpoints import dying_at
from support.servers import argo_rest, kube_server
from support.servers.argo_rest import ArgoRest
from support.servers.certificates import authority
from support.servers.kube_server import KubeServer
from tiphys_controller import (
    LiveWorkflow,
    RunPhase,
    ShutdownStrategy,
    describe_run,
    is_stable_cluster_name,
    resume_run,
    start_run,
)
from tiphys_controller.argo_server import ArgoServerSubmitter, connect_argo_server
from tiphys_controller.kubernetes import KubernetesSubmitter

from tiphys.errors import (
    ConflictError,
    ForbiddenError,
    NotFoundError,
    ObjectExistsError,
    StoreError,
    TiphysError,
    UsageError,
)
from tiphys.kube import KubeApi, identify_cluster
from tiphys.kube.resources import WORKFLOWS
from tiphys.lineage.run_history import RunHistory
from tiphys.records import SubmissionBinding
from tiphys.store import RunLayout, Store, read_submissions

RUN = "digits-1"
PIPELINE = pipeline_of(gated("prep"), gated("fit", depends="prep"))
TOKEN = "Bearer of-the-test"


@pytest.fixture
def argo(api: KubeApi) -> Iterator[ArgoRest]:
    with argo_rest.serving(api) as server:
        server.token = TOKEN
        yield server


@pytest.fixture
def alone(argo: ArgoRest) -> ArgoServerSubmitter:
    """Of somebody who reaches no API server."""
    return ArgoServerSubmitter(connect_argo_server(argo.url, {"ARGO_TOKEN": TOKEN}))


@pytest.fixture
def witnessed(argo: ArgoRest, api: KubeApi) -> ArgoServerSubmitter:
    """Of somebody who has a kubeconfig of its cluster, too."""
    return ArgoServerSubmitter(connect_argo_server(argo.url, {}, lambda: TOKEN), identify_cluster(api), api)


@pytest.fixture(params=["alone", "witnessed"])
def submitter(request: pytest.FixtureRequest) -> ArgoServerSubmitter:
    found: ArgoServerSubmitter = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def elsewhere() -> Iterator[KubeApi]:
    """The API server of another cluster."""
    with kube_server.serving() as server:
        yield server.api("ml")


class Impatient(threading.Event):
    """Waits for nothing."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def named(name: str = RUN) -> dict[str, object]:
    return {"metadata": {"name": name, "namespace": "ml"}, "spec": {"entrypoint": "main"}}


def test_a_workflow_is_created_and_found(submitter: ArgoServerSubmitter, api: KubeApi) -> None:
    created = submitter.create(named())
    assert (created.name, created.namespace, created.phase, created.running) == (RUN, "ml", "Pending", True)
    assert submitter.find("ml", RUN) == created
    assert submitter.find("ml", "digits-2") is None
    assert (submitter.read("ml", RUN) or {})["metadata"]["uid"] == created.uid
    assert submitter.read("ml", "digits-2") is None
    assert (api.get(WORKFLOWS, "ml", RUN) or {})["metadata"]["uid"] == created.uid


def test_a_name_is_taken_once(submitter: ArgoServerSubmitter) -> None:
    submitter.create(named())
    with pytest.raises(ObjectExistsError, match=RUN):
        submitter.create(named())


def test_a_workflow_that_is_only_archived_counts_as_gone(alone: ArgoServerSubmitter, argo: ArgoRest) -> None:
    document = workflow(phase="Failed")
    document["metadata"]["labels"] = {"workflows.argoproj.io/workflow-archiving-status": "Persisted"}
    argo.archived["ml/digits-1"] = document
    assert alone.find("ml", RUN) is None


@pytest.mark.parametrize("status", [0, 502, 504])
def test_a_create_whose_answer_was_lost_is_looked_up_by_its_name(
    submitter: ArgoServerSubmitter, argo: ArgoRest, server: KubeServer, status: int
) -> None:
    argo.fail_next("POST", status, done=True)
    created = submitter.create(named())
    [found] = server.objects("workflows")
    assert created.uid == found["metadata"]["uid"]


def test_a_create_that_did_not_arrive_is_reported(submitter: ArgoServerSubmitter, argo: ArgoRest) -> None:
    argo.fail_next("POST", 503, "upstream is away")
    with pytest.raises(StoreError, match="answered 503: upstream is away"):
        submitter.create(named())


@pytest.mark.parametrize("how", list(ShutdownStrategy))
def test_a_workflow_is_ended_and_a_namesake_is_not(
    how: ShutdownStrategy, submitter: ArgoServerSubmitter, server: KubeServer
) -> None:
    created = submitter.create(named())
    with pytest.raises(ConflictError, match="another Workflow has the name ml/digits-1"):
        submitter.stop(created._replace(uid="uid-of-before"), how)
    assert "shutdown" not in server.objects("workflows")[0]["spec"]
    submitter.stop(created, how)
    assert server.objects("workflows")[0]["spec"]["shutdown"] == how.value
    with pytest.raises(NotFoundError, match="ml/digits-2 is gone"):
        submitter.stop(created._replace(name="digits-2"), how)


def test_a_workflow_is_watched_until_it_is_over_whatever_happens_to_the_line(
    alone: ArgoServerSubmitter, argo: ArgoRest, server: KubeServer, api: KubeApi
) -> None:
    created = alone.create(named())
    phases, lost = [], []
    for document in alone.watch(created, Impatient(), lost.append):
        phases.append(phase := (document.get("status") or {}).get("phase", ""))
        if phase == "Running":
            server.drop_watches()
            argo.fail_next("GET", 503, "away")
        if following := {"": "Pending", "Pending": "Running", "Running": "Succeeded"}.get(phase):
            api.patch(WORKFLOWS, "ml", RUN, {"status": {"phase": following}})
    assert phases == ["", "Pending", "Running", "Succeeded"]
    assert all("answered 503: away" in str(error) for error in lost)


def test_a_workflow_that_is_deleted_meanwhile_is_said(alone: ArgoServerSubmitter, api: KubeApi) -> None:
    seen = alone.watch(alone.create(named()), Impatient())
    next(seen)
    api.delete(WORKFLOWS, "ml", RUN)
    with pytest.raises(NotFoundError, match="ml/digits-1 was deleted"):
        next(seen)


def test_a_watch_that_is_stopped_ends(alone: ArgoServerSubmitter) -> None:
    stop = threading.Event()
    seen = alone.watch(alone.create(named()), stop)
    next(seen)
    stop.set()
    assert list(seen) == []


def test_an_argo_server_of_another_cluster_is_found_out(
    argo: ArgoRest, server: KubeServer, elsewhere: KubeApi, store: Store
) -> None:
    wrong = ArgoServerSubmitter(
        connect_argo_server(argo.url, {"ARGO_TOKEN": TOKEN}), identify_cluster(elsewhere), elsewhere
    )
    with pytest.raises(UsageError, match=r"belongs to another cluster than API server .* is deleted again"):
        start_run(store, wrong, PIPELINE, RUN, namespace="ml")
    assert not server.objects("workflows")
    [first] = read_submissions(store, RUN)
    assert first.binding is None

    put(elsewhere, workflow(name="digits-1"))
    with pytest.raises(UsageError, match="they return different objects"):
        wrong.find("ml", RUN)


@pytest.mark.parametrize(
    ("path", "environ", "status", "body", "kind", "message"),
    [
        ("", {}, None, "", ForbiddenError, r"does not accept these credentials: token not valid; set ARGO_TOKEN"),
        ("", {}, 403, '{"code": 7, "message": "no"}', ForbiddenError, r"refused: no; let the account of ARGO_TOKEN"),
        ("/argo", {"ARGO_TOKEN": TOKEN}, None, "", UsageError, r"with a web page; where it lies .*ARGO_BASE_HREF"),
        ("", {}, 404, "404 page not found", UsageError, r"does not serve /api/v1/.*ARGO_BASE_HREF"),
        ("", {}, 302, "", UsageError, r"sends /api/v1/\S+ elsewhere \(302\): a log-in"),
        (
            "",
            {},
            400,
            "Client sent an HTTP request to an HTTPS server.",
            UsageError,
            r"leave ARGO_SECURE=false out, or write https://",
        ),
    ],
)
def test_a_refused_request_is_reported_with_what_to_do(
    argo: ArgoRest,
    path: str,
    environ: dict[str, str],
    status: int | None,
    body: str,
    kind: type[TiphysError],
    message: str,
) -> None:
    if status:
        argo.fail_next("GET", status, body)
    with pytest.raises(kind, match=message):
        ArgoServerSubmitter(connect_argo_server(f"{argo.url}{path}", environ)).find("ml", RUN)


def test_a_server_behind_a_path_is_found(argo: ArgoRest) -> None:
    argo.base = "/argo"
    address = argo.url.removeprefix("http://")
    environ = {"ARGO_TOKEN": TOKEN, "ARGO_SECURE": "false", "ARGO_BASE_HREF": "/argo/"}
    assert ArgoServerSubmitter(connect_argo_server(address, environ)).find("ml", RUN) is None
    assert argo.requests[-1] == ("GET", "/argo/api/v1/workflows/ml/digits-1")


def test_a_server_without_tls_is_reported_with_the_variables_to_set(argo: ArgoRest) -> None:
    with pytest.raises(StoreError, match=r"SSL_CERT_FILE.* set ARGO_SECURE=false"):
        ArgoServerSubmitter(connect_argo_server(argo.url.removeprefix("http://"), {})).find("ml", RUN)


def test_a_certificate_is_trusted_by_its_authority_or_by_request(
    api: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, tls = authority(tmp_path)
    with argo_rest.serving(api, tls) as argo:
        with pytest.raises(StoreError, match=r"CERTIFICATE_VERIFY_FAILED.*SSL_CERT_FILE"):
            ArgoServerSubmitter(connect_argo_server(argo.url, {})).find("ml", RUN)
        untrusted = {"ARGO_INSECURE_SKIP_VERIFY": "true"}
        assert ArgoServerSubmitter(connect_argo_server(argo.url, untrusted)).find("ml", RUN) is None
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert ArgoServerSubmitter(connect_argo_server(argo.url, {})).find("ml", RUN) is None


@pytest.mark.parametrize(
    ("given", "environ", "address"),
    [
        ("argo.example:2746", {}, "https://argo.example:2746"),
        ("argo.example:2746", {"ARGO_SECURE": "false", "ARGO_BASE_HREF": "argo"}, "http://argo.example:2746/argo"),
        ("http://argo.example/ours/", {"ARGO_BASE_HREF": "argo"}, "http://argo.example/ours"),
    ],
)
def test_an_address_is_as_argos_own_command_takes_it_or_a_url(
    given: str, environ: dict[str, str], address: str
) -> None:
    assert connect_argo_server(given, environ).address == address


@pytest.mark.parametrize("given", ["", "ftp://argo.example", "argo.example:port", "https://me:pw@argo.example"])
def test_an_invalid_server_address_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="give host:port"):
        connect_argo_server(given, {})


def bound_by_its_first_admit(store: Store, uid: str) -> None:
    bound = SubmissionBinding(
        run=RUN, submission=1, cluster="kubernetes:real", namespace="ml", workflow_name=RUN, uid=uid
    )
    store.create(RunLayout(RUN).submission_binding(1), bound.to_bytes())


@pytest.mark.parametrize("phase", ["Running", "Failed"])
def test_without_a_name_of_its_cluster_a_uid_decides(
    alone: ArgoServerSubmitter, api: KubeApi, store: Store, phase: str
) -> None:
    started = start_run(store, alone, PIPELINE, RUN, namespace="ml")
    History(store, RUN).done("prep")
    [first] = read_submissions(store, RUN)
    assert (first.binding, is_stable_cluster_name(first.claim.cluster)) == (None, False), (
        "only its first admit knows the cluster"
    )
    bound_by_its_first_admit(store, started.uid)
    api.patch(WORKFLOWS, "ml", RUN, {"status": {"phase": phase}})
    assert describe_run(RunHistory(store, RUN), alone).summary.phase is RunPhase(phase)
    if phase == "Running":
        with pytest.raises(ConflictError, match="is still running"):
            resume_run(store, alone, RUN)
    else:
        assert resume_run(store, alone, RUN).submission == 2
        assert [(one["metadata"]["name"]) for one in api.list(WORKFLOWS, "ml").items] == [RUN, f"{RUN}-2"]


@pytest.mark.parametrize("bound", [True, False], ids=["admitted", "never admitted"])
def test_without_a_name_of_its_cluster_what_is_not_shown_may_be_running(
    alone: ArgoServerSubmitter, api: KubeApi, store: Store, bound: bool
) -> None:
    started = start_run(store, alone, PIPELINE, RUN, namespace="ml")
    History(store, RUN).done("prep")
    if bound:
        bound_by_its_first_admit(store, started.uid)
    api.delete(WORKFLOWS, "ml", RUN)
    assert describe_run(RunHistory(store, RUN), alone).summary.phase is RunPhase.UNKNOWN
    with pytest.raises(ConflictError, match="--force"):
        resume_run(store, alone, RUN)
    assert resume_run(store, alone, RUN, force=True, namespace="ml").submission == 2


def test_a_start_that_died_is_followed_up_without_a_name_of_its_cluster(
    alone: ArgoServerSubmitter, server: KubeServer, store: Store
) -> None:
    with dying_at("start.after_create"):
        start_run(store, alone, PIPELINE, RUN, namespace="ml")
    assert resume_run(store, alone, RUN).submission == 1
    assert len(server.objects("workflows")) == 1


def test_a_run_sent_through_an_argo_server_goes_on_at_the_api_server(
    alone: ArgoServerSubmitter, witnessed: ArgoServerSubmitter, api: KubeApi, store: Store
) -> None:
    started = start_run(store, alone, PIPELINE, RUN, namespace="ml")
    History(store, RUN).done("prep")
    bound_by_its_first_admit(store, started.uid)
    direct = KubernetesSubmitter(api, identify_cluster(api))
    for submitter in (direct, witnessed):
        with pytest.raises(ConflictError, match="is still running"):
            resume_run(store, submitter, RUN)
    api.patch(WORKFLOWS, "ml", RUN, {"status": {"phase": "Failed"}})
    assert resume_run(store, direct, RUN).submission == 2


def test_a_live_workflow_is_what_the_api_server_says_it_is(
    witnessed: ArgoServerSubmitter, api: KubeApi, store: Store
) -> None:
    start_run(store, witnessed, PIPELINE, RUN, namespace="ml")
    [first] = read_submissions(store, RUN)
    assert first.binding is not None
    assert first.binding.cluster == identify_cluster(api)
    found = KubernetesSubmitter(api, identify_cluster(api)).find("ml", RUN)
    assert isinstance(found, LiveWorkflow)
    assert witnessed.find("ml", RUN) == found
