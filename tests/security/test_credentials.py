"""The credentials of a tenant's programs open what programs write, and nothing that Tiphys acts on.

| what | must hold |
|---|---|
| a key of the layout | lies in one half, in one row of the table of who may write what, and the policies say the same |
| the policies of the guide | are those that `tiphys doctor --policy` prints |
| `tiphys doctor` | says what credentials of programs may do too much, and which action they lack |
"""

import base64
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.checks.chart import ROOT
from support.servers.bucket_policies import Policy, allows, enforces
from support.servers.kube_server import KubeServer, serving, write_kubeconfig
from support.servers.s3_proxy import Reply, Request, S3Proxy, is_read, refuses, s3_proxy
from tiphys_controller.doctor.store_credentials import probe_program_credentials

from hera_pipelines.cli import main
from tiphys.kube import KubeApi
from tiphys.kube.resources import DEPLOYMENTS, SECRETS
from tiphys.records import CheckpointRef
from tiphys.store import S3Store, layout, workflow_layout
from tiphys.store.credentials import CredentialsHolder, bucket_policy
from tiphys.store.format import STORE_FORMAT
from tiphys.store.layout import CONTROL, DATA, LineageLayout, RankStepTime, RunLayout
from tiphys.store.workflow_layout import OutputOrigin

URL = "s3://ml-runs/{namespace}/tiphys"
PROGRAM = bucket_policy("s3://ml-runs/team-a/tiphys", CredentialsHolder.PROGRAM)
SERVICES = bucket_policy(URL, CredentialsHolder.SERVICES)
WRITES = ("s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload")

RUN, LINEAGE = RunLayout("digits"), LineageLayout("digits/fit")
ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "alert": ("ab" * 16,),
    "attempt": (3,),
    "digest": ("ab" * 32,),
    "global_step": (1200,),
    "half": (CONTROL, DATA),
    "incarnation": (1,),
    "index": (0,),
    "key_digest": ("ab" * 32,),
    "kind": ("firing", "resolved", "claim", "result"),
    "listing_digest": ("ab" * 32,),
    "measured": (RankStepTime(1, 0, 0, 0.5),),
    "milliseconds": (1_700_000_000_000,),
    "modified_seconds": (None, 1_700_000_000),
    "name": ("release",),
    "nonce": ("abcd",),
    "number": (7,),
    "origin": (OutputOrigin("digits-prep-1", "digits", "prep", 1),),
    "pod": ("digits-prep-1",),
    "prefix": (RUN.events, RUN.program_events),
    "rank": (1,),
    "ref": (CheckpointRef(lineage="digits/fit", attempt=3, global_step=1200),),
    "seconds": (1_700_000_000,),
    "sha256": ("ab" * 32,),
    "step": ("fit",),
    "step_key": ("ab" * 32,),
    "submission": (2,),
    "suffix": ("npy",),
    "template": ("on-object",),
    "uid": ("5a3c1f80-0000-4000-8000-000000000000",),
    "workflow_digest": ("ab" * 32,),
}
"""Examples of what keys are made of. A key function with another argument needs one here."""


class TableRow(NamedTuple):
    """One row of the table in docs/architecture.md."""

    prefixes: tuple[re.Pattern[str], ...]
    writers: str

    @property
    def is_written_in_workflow_namespaces(self) -> bool:
        return any(word in self.writers for word in ("programs", "argoexec", "members"))


def table_rows() -> list[TableRow]:
    text = (ROOT / "docs" / "architecture.md").read_text()
    text = text.split("## Writers and readers of the store")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return [TableRow(tuple(prefixes(cells[1])), cells[2]) for cells in rows[1:]]


def prefixes(cell: str) -> Iterator[re.Pattern[str]]:
    """A prefix that names no half lies in the folder of the one before."""
    folder = ""
    for path in re.findall(r"`([^`]+)`", cell):
        full = path if path.startswith((CONTROL, DATA)) else folder + path
        folder = full.rstrip("/").rpartition("/")[0] + "/"
        yield re.compile(re.sub(r"<\w+>", "[^/]+", re.escape(full).replace(r"\<", "<").replace(r"\>", ">")))


def key_functions() -> Iterator[tuple[str, Callable[..., object] | object]]:
    for place in (RUN, LINEAGE):
        for name in dir(type(place)):
            if not name.startswith(("_", "parse_")) and name not in ("run", "lineage"):
                yield f"{type(place).__name__}.{name}", getattr(place, name)
    for module in (layout, workflow_layout):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith(("_", "parse_", "lineage_name")):
                yield name, function
    yield "FORMAT_MARKER", layout.FORMAT_MARKER


def keys_of(made: Callable[..., object] | object) -> Iterator[str]:
    if callable(made):
        names = list(inspect.signature(made).parameters)
        for values in itertools.product(*(ARGUMENTS[name] for name in names)):
            yield from keys_of(_call(made, dict(zip(names, values, strict=True))))
    elif isinstance(made, tuple):
        yield from made
    else:
        assert isinstance(made, str)
        yield made


def _call(function: Callable[..., object], values: dict[str, Any]) -> object:
    return function(**values)


KEYS = [pytest.param(key, id=f"{name}: {key}") for name, made in key_functions() for key in keys_of(made)]


def test_the_layout_has_more_than_fifty_keys() -> None:
    assert len(KEYS) > 50


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_in_one_row_of_the_table_and_the_policies_name_its_writer(key: str) -> None:
    assert key.startswith((CONTROL, DATA))
    rows = [row for row in table_rows() if any(prefix.match(key) for prefix in row.prefixes)]
    whole_run_or_lineage = key in (RUN.control, RUN.data, RUN.lineages, LINEAGE.prefix)
    assert len(rows) == 1 or whole_run_or_lineage, "docs/architecture.md needs one row for it"

    is_data = rows[0].is_written_in_workflow_namespaces if rows else key.startswith(DATA)
    place = f"team-a/tiphys/{key}"
    assert is_data == key.startswith(DATA)
    assert all(allows(PROGRAM, action, "ml-runs", place) is is_data for action in WRITES)
    assert all(allows(SERVICES, action, "ml-runs", place) for action in WRITES)
    assert all(allows(one, "s3:GetObject", "ml-runs", place) for one in (PROGRAM, SERVICES))
    assert all(allows(one, "s3:ListBucket", "ml-runs", prefix=place) for one in (PROGRAM, SERVICES))
    elsewhere = f"team-b/tiphys/{key}"
    assert not any(allows(PROGRAM, action, "ml-runs", elsewhere) for action in (*WRITES, "s3:GetObject"))
    assert not allows(PROGRAM, "s3:ListBucket", "ml-runs", prefix=elsewhere)


def test_the_policies_grant_nothing_else() -> None:
    granted = {action for one in PROGRAM["Statement"] for action in one["Action"]}
    assert granted == {*WRITES, "s3:GetObject", "s3:ListBucket"}
    assert {action for one in SERVICES["Statement"] for action in one["Action"]} == {
        *granted,
        "s3:ListBucketMultipartUploads",
    }
    for key in ("team-a/other", "team-a/tiphys", "team-a/tiphys2/control/format.json", "control/format.json"):
        assert not any(allows(one, "s3:PutObject", "ml-runs", key) for one in (PROGRAM, SERVICES))
    assert not any(
        allows(one, "s3:ListBucket", "ml-runs", prefix=prefix) for one in (PROGRAM, SERVICES) for prefix in "/t"
    )


def test_the_policies_of_the_guide_are_those_that_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (ROOT / "docs" / "install.md").read_text()
    shown = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", guide, re.DOTALL)]
    asked = re.findall(r"^tiphys doctor '([^']+)'(.* --policy .*?)(?: >.*)?$", guide, re.MULTILINE)
    printed = []
    for url, options in asked:
        assert main(["doctor", url, *options.split()]) == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert [one for one in shown if "Statement" in one] == [PROGRAM, SERVICES]
    assert printed[:2] == [PROGRAM, SERVICES]


def test_a_policy_of_a_bucket_names_its_users(capsys: pytest.CaptureFixture[str]) -> None:
    principals = ("--principal", "a", "--principal", "b")
    assert main(["doctor", "s3://ml-runs/team-a/tiphys", "--policy", "program", *principals]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [one.pop("Principal") for one in printed["Statement"]] == [{"AWS": ["a", "b"]}] * 3
    assert printed == PROGRAM


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["s3://ml-runs/{namespace}/tiphys", "--policy", "program"], "name it by --namespace"),
        (["s3://ml-runs/{namespace}/tiphys", "--as-program"], "by --namespace"),
        (["./store", "--as-program"], "a folder knows no users"),
        (["gs://ml-runs/tiphys", "--as-program"], "are for S3 only"),
        (["az://mlruns/runs", "--policy", "program"], "are for S3 only"),
        (["./store", "--policy", "program"], "a folder knows no users"),
        (["s3://ml-runs/*/tiphys", "--policy", "program"], "without * and $"),
        (["s3://ml-runs/tiphys", "-n", "team-a", "--as-program"], "--namespace gives the one namespace"),
        (["s3://ml-runs/{namespace}/x", "-n", "a", "-n", "b", "--as-program"], "--namespace gives the one namespace"),
        (["s3://ml-runs/tiphys", "--principal", "a"], "add --policy"),
        (["--cluster", "--as-program"], "give its URL instead of --cluster"),
        (["--cluster", "--policy", "services"], "give its URL instead of --cluster"),
    ],
)
def test_an_invalid_combination_of_options_is_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    assert sentence in capsys.readouterr().err


class Answer(NamedTuple):
    code: int
    findings: Mapping[str, tuple[str, str, str]]
    """State, sentence and remedy by check."""
    error: str


@pytest.fixture
def server(bucket: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    with s3_proxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        yield proxy


class Tenants:
    """Two tenants with a run each in one bucket, and what a user may do there."""

    def __init__(self, server: S3Proxy, bucket: str, endpoint: str) -> None:
        self.server, self.bucket, self.url = server, bucket, f"s3://{bucket}/{{namespace}}/tiphys"
        for namespace in ("team-a", "team-b"):
            self.store(namespace).create(layout.FORMAT_MARKER, f'{{"format": {STORE_FORMAT}}}'.encode())
        self.before = self.stored()

    def store(self, namespace: str) -> S3Store:
        return S3Store(self.bucket, f"{namespace}/tiphys")

    def stored(self) -> list[str]:
        return [one.key for one in S3Store(self.bucket).list("")]

    def of(self, holder: CredentialsHolder) -> dict[str, Any]:
        return bucket_policy(self.url.replace("{namespace}", "team-a"), holder)

    def doctor(self, capsys: pytest.CaptureFixture[str], policy: Policy, *options: str) -> Answer:
        self.server.behaviour = enforces({"test": policy})
        code = main(["doctor", self.url, "-n", "team-a", "-o", "json", *options])
        out, error = capsys.readouterr()
        self.server.behaviour = lambda request, forward: forward(request)
        found = json.loads(out)["findings"]
        return Answer(code, {one["check"]: (one["state"], one["sentence"], one["remedy"]) for one in found}, error)


@pytest.fixture
def tenants(server: S3Proxy, bucket: str, s3_endpoint: str) -> Tenants:
    return Tenants(server, bucket, s3_endpoint)


def allow(bucket: str, actions: list[str], *patterns: str) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": actions, "Resource": [f"arn:aws:s3:::{bucket}{one}" for one in patterns]}


def test_credentials_with_the_policy_of_programs_pass(tenants: Tenants, capsys: pytest.CaptureFixture[str]) -> None:
    answer = tenants.doctor(capsys, tenants.of(CredentialsHolder.PROGRAM), "--as-program")

    assert answer.code == 0
    assert {name for name, (state, *_) in answer.findings.items() if state == "ok"} >= {
        "data",
        "control-read",
        "control-write",
        "other-tenants",
        "create-only",
        "race",
        "listing",
        "clean-up",
    }
    assert tenants.stored() == tenants.before


def test_credentials_with_the_policy_of_services_pass_for_these_alone(
    tenants: Tenants, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tenants.of(CredentialsHolder.SERVICES)

    assert tenants.doctor(capsys, policy).code == 0
    answer = tenants.doctor(capsys, policy, "--as-program")
    assert answer.code == 75
    assert "control-write failed; each finding says what to do" in answer.error
    assert "give the credentials no other policy than that of tiphys doctor" in answer.findings["control-write"][2]
    assert tenants.stored() == tenants.before


def test_credentials_of_programs_do_not_pass_for_those_of_services(
    tenants: Tenants, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = tenants.doctor(capsys, tenants.of(CredentialsHolder.PROGRAM))

    assert answer.code == 75
    assert "may not create control/probe/" in answer.findings["create-only"][1]


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        (["s3:PutObject"], "may use s3:PutObject below control/: any program of the namespace"),
        (["s3:DeleteObject"], "may use s3:DeleteObject below control/: any program of the namespace"),
    ],
    ids=["create", "delete"],
)
def test_a_program_that_may_write_control_is_a_failure(
    extra: list[str], found: str, tenants: Tenants, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tenants.of(CredentialsHolder.PROGRAM)
    policy["Statement"].append(allow(tenants.bucket, extra, "/team-a/tiphys/control/*"))

    answer = tenants.doctor(capsys, policy, "--as-program")

    state, sentence, _ = answer.findings["control-write"]
    assert (answer.code, state) == (75, "failed")
    assert found in sentence
    left = [key for key in tenants.stored() if key not in tenants.before]
    assert all(f"s3://{tenants.bucket}/{key}" in sentence for key in left), "what cannot be removed is named"
    assert bool(left) == (extra == ["s3:PutObject"])


@pytest.mark.parametrize("action", ["s3:GetObject", "s3:ListBucket", "s3:PutObject", "s3:DeleteObject"])
@pytest.mark.parametrize("half", [CONTROL, DATA])
def test_a_program_that_reaches_another_tenant_is_a_failure(
    half: str, action: str, tenants: Tenants, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a policy with the prefix `*` instead of that of the tenant."""
    policy = tenants.of(CredentialsHolder.PROGRAM)
    wrong = allow(tenants.bucket, [action], "" if action == "s3:ListBucket" else f"/*/tiphys/{half}*")
    if action == "s3:ListBucket":
        wrong["Condition"] = {"StringLike": {"s3:prefix": [f"*/tiphys/{half}*"]}}
    policy["Statement"].append(wrong)

    answer = tenants.doctor(capsys, policy, "--as-program")

    state, sentence, _ = answer.findings["other-tenants"]
    assert (answer.code, state) == (75, "failed")
    assert action in sentence
    assert f"/{half}, which belongs to another tenant" in sentence


@pytest.mark.parametrize(
    ("action", "place", "name"),
    [
        ("s3:PutObject", DATA, "data"),
        ("s3:DeleteObject", DATA, "data"),
        ("s3:AbortMultipartUpload", DATA, "data"),
        ("s3:GetObject", DATA, "data"),
        ("s3:GetObject", CONTROL, "control-read"),
        ("s3:ListBucket", "", "control-read"),
    ],
)
def test_an_action_that_a_program_lacks_is_named(
    action: str, place: str, name: str, tenants: Tenants, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tenants.of(CredentialsHolder.PROGRAM)
    for statement in policy["Statement"]:
        if action in statement["Action"]:
            if len(statement["Action"]) == 1:
                statement["Resource"] = [one for one in statement["Resource"] if place not in one]
            else:
                statement["Action"] = [one for one in statement["Action"] if one != action]

    answer = tenants.doctor(capsys, policy, "--as-program")

    state, sentence, _ = answer.findings[name]
    assert (answer.code, state) == (75, "failed")
    assert sentence.startswith(f"may not use {action} below")


def test_a_promise_that_cannot_be_tried_before_the_first_run_is_a_warning(
    tenants: Tenants, server: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 may answer 403 for a missing object."""
    tenants.store("team-a").delete(layout.FORMAT_MARKER)
    honest = server.forward

    def hides(request: Request) -> Reply:
        reply = honest(request)
        return refuses(403, "AccessDenied")(request, honest) if is_read(request) and reply.status == 404 else reply

    monkeypatch.setattr(server, "forward", hides)
    server.behaviour = enforces({"test": tenants.of(CredentialsHolder.PROGRAM)})

    found = {one.check: one for one in probe_program_credentials(tenants.url, "team-a")}

    assert {name: one.state for name, one in found.items()} == {
        "data": "ok",
        "control-read": "warning",
        "control-write": "ok",
        "other-tenants": "ok",
    }
    assert "cannot be tried before the first run" in found["control-read"].sentence


class TestCluster:
    """`tiphys doctor --cluster` with the Secret of a workflow namespace."""

    @pytest.fixture
    def cluster(self) -> Iterator[KubeServer]:
        with serving() as found:
            yield found

    @pytest.fixture
    def api(self, cluster: KubeServer, server: S3Proxy, tenants: Tenants) -> KubeApi:
        """Tiphys serves two tenants, and team-a has the credentials of its programs."""
        api = cluster.api("team-a")
        for namespace in ("tiphys", "team-b"):
            cluster.add_namespace(namespace)
        labels = {"app.kubernetes.io/name": "tiphys", "app.kubernetes.io/component": "plugin"}
        arguments = ["serve", f"--store={tenants.url}", "--namespace=team-a", "--namespace=team-b"]
        spec = {"template": {"spec": {"containers": [{"args": arguments}]}}}
        api.create(DEPLOYMENTS, "tiphys", {"metadata": {"name": "tiphys-plugin", "labels": labels}, "spec": spec})
        variables = {
            "AWS_ACCESS_KEY_ID": "user-a",
            "AWS_SECRET_ACCESS_KEY": "secret-of-user-a",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": server.url,
        }
        data = {name: base64.b64encode(value.encode()).decode() for name, value in variables.items()}
        api.create(SECRETS, "team-a", {"metadata": {"name": "tiphys-store"}, "data": data})
        return api

    @pytest.fixture
    def examine(
        self, api: KubeApi, cluster: KubeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> Callable[[], list[dict[str, str]]]:
        """The findings about the credentials of team-a."""
        file = write_kubeconfig(tmp_path, cluster.url, "team-a")

        def run() -> list[dict[str, str]]:
            main(["doctor", "--cluster", "-n", "team-a", "--kubeconfig", str(file), "-o", "json"])
            out, err = capsys.readouterr()
            assert "secret-of-user-a" not in out + err
            found = json.loads(out)["findings"]
            return [one for one in found if (one["place"], one["check"]) == ("team-a", "store-access")]

        return run

    def test_credentials_of_programs_pass(
        self, tenants: Tenants, server: S3Proxy, examine: Callable[[], list[dict[str, str]]]
    ) -> None:
        server.behaviour = enforces({"user-a": tenants.of(CredentialsHolder.PROGRAM)})

        [found] = examine()

        assert found["state"] == "ok"
        server.behaviour = lambda request, forward: forward(request)
        assert tenants.stored() == tenants.before

    def test_credentials_that_reach_too_far_fail_with_the_remedy(
        self, tenants: Tenants, server: S3Proxy, examine: Callable[[], list[dict[str, str]]]
    ) -> None:
        """The Secret of the services in a workflow namespace."""
        server.behaviour = enforces({"user-a": bucket_policy(tenants.url, CredentialsHolder.SERVICES)})

        found = examine()

        assert {one["state"] for one in found} == {"failed"}
        assert len(found) == 3
        assert "below control/" in found[0]["sentence"]
        assert f"s3://{tenants.bucket}/team-b/tiphys/control/" in found[1]["sentence"]
        assert found[0]["remedy"].endswith(f"s3://{tenants.bucket}/team-a/tiphys --policy program")

    def test_a_user_shared_by_two_tenants_is_found(
        self, tenants: Tenants, server: S3Proxy, examine: Callable[[], list[dict[str, str]]]
    ) -> None:
        both = [
            bucket_policy(tenants.url.replace("{namespace}", f"team-{one}"), CredentialsHolder.PROGRAM) for one in "ab"
        ]
        server.behaviour = enforces({"user-a": {"Statement": [rule for one in both for rule in one["Statement"]]}})

        [found] = examine()

        assert found["state"] == "failed"
        assert "team-b/tiphys/control/, which belongs to another tenant" in found["sentence"]

    def test_credentials_that_cannot_be_tried_are_unknown_with_a_reason(
        self, cluster: KubeServer, server: S3Proxy, examine: Callable[[], list[dict[str, str]]]
    ) -> None:
        server.behaviour = enforces({})
        [invalid] = examine()
        cluster.authorize = lambda request: request.plural != "secrets"
        [unreadable] = examine()

        assert (invalid["state"], unreadable["state"]) == ("unknown", "unknown")
        assert "InvalidAccessKeyId" in invalid["sentence"]
        assert "secrets" in unreadable["sentence"]
        assert "tiphys doctor URL --as-program" in unreadable["remedy"]
