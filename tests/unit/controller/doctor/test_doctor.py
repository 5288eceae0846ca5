"""Each check of `tiphys doctor --cluster`: what is seen, how bad it is, and what to do.

| seen | state |
|---|---|
| what may not be read | unknown |
| DEFAULT_REQUEUE_TIME unset, or over 2 s | warning |
| Argo's kinds missing | failed |
| Argo before 4.1 | warning; failed in agent mode |
| executor plugins off (sidecar mode) | failed |
| plugins only from Workflows | warning |
| mode and disableAgentPodCreation disagree | failed |
| Tiphys' kinds, plugin or controller missing or not ready | failed |
| namespace, account, token, right or plugin missing | failed |
| store secret missing | warning |
| a clock off by a minute, ten minutes | warning, failed |
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tiphys_controller.doctor import Finding, State, examine, usable
from tiphys_controller.doctor.checks_argo import duration_seconds
from tiphys_controller.doctor.checks_namespace import AGENT_RIGHTS, EXECUTOR_RIGHTS, GANG_RIGHTS
from tiphys_controller.doctor.observe import clocks_of, settings_of
from tiphys_controller.doctor.observed import Clock, Deployments, Observed, PodSeen, Right, Unknown, WorkflowNamespace
from tiphys_controller.doctor.pod_readiness import complaints, is_ready, readiness_path, runs, said, trouble

from tiphys.kube import Object

GOOD_ENV = {
    "DEFAULT_REQUEUE_TIME": "500ms",
    "ARGO_EXECUTOR_PLUGINS": "true",
    "ARGO_POD_STATUS_CAPTURE_FINALIZER": "true",
}
RIGHTS: Mapping[Right, bool] = dict.fromkeys(EXECUTOR_RIGHTS + AGENT_RIGHTS + GANG_RIGHTS, True)
SECRETS: Mapping[str, frozenset[str] | Unknown] = {
    "tiphys-store": frozenset({"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}),
    "tiphys-workflow.service-account-token": frozenset({"token", "ca.crt"}),
    "tiphys-executor-plugin.service-account-token": frozenset({"token", "ca.crt"}),
}
NAMESPACE = WorkflowNamespace(
    name="ml",
    exists=True,
    accounts=frozenset({"tiphys-workflow", "tiphys-executor-plugin"}),
    config_maps=frozenset({"tiphys-executor-plugin"}),
    secrets=SECRETS,
    rights=RIGHTS,
)
FORBIDDEN = Unknown("the API server refused: nodes is forbidden")


def deployment(name: str, container: Object, namespace: str = "argo", **labels: str) -> Object:
    spec = {"template": {"spec": {"containers": [container]}}}
    return {"metadata": {"name": name, "namespace": namespace, "labels": labels}, "spec": spec}


def argo(env: Mapping[str, str] | None = None, tag: str = "v4.1.2", args: list[str] | None = None) -> Deployments:
    variables = [{"name": name, "value": value} for name, value in (GOOD_ENV if env is None else env).items()]
    image = f"example.org/argoproj/workflow-controller:{tag}" if tag else "example.org/argo@sha256:00"
    container = {"image": image, "command": ["workflow-controller"], "args": args or [], "env": variables}
    return Deployments((deployment("workflow-controller", container),))


def tiphys(mode: str = "serve") -> Deployments:
    parts = {"plugin": ["tiphys_plugin", mode], "controller": ["tiphys_controller"]}
    return Deployments(
        tuple(
            deployment(f"tiphys-{name}", {"args": args}, "tiphys", **{"app.kubernetes.io/component": name})
            for name, args in parts.items()
        )
    )


GOOD = Observed(
    server="https://east",
    version="v1.34.1",
    argo_kinds=frozenset({"workflows", "workflowtasksets", "workflowtaskresults", "workflowtemplates"}),
    tiphys_kinds=frozenset({"gpuledgers"}),
    argo=argo(),
    argo_settings={},
    tiphys=tiphys(),
    pods=(PodSeen("plugin", "tiphys", "tiphys-plugin-1"), PodSeen("controller", "tiphys", "tiphys-controller-1")),
    namespaces=(NAMESPACE,),
    clocks=(Clock("node-1", 0.4),),
)
AGENT = replace(GOOD, tiphys=tiphys("agent"), argo_settings={"disableAgentPodCreation": "true"})


def bad(observed: Observed) -> dict[str, Finding]:
    """Findings that are not ok, by name."""
    return {one.name: one for one in examine(observed) if one.state is not State.OK}


def only(observed: Observed) -> Finding:
    """The one finding that is not ok."""
    [found] = bad(observed).values()
    return found


@pytest.mark.parametrize("observed", [GOOD, AGENT], ids=["sidecar mode", "agent mode"])
def test_a_good_cluster_has_nothing_to_complain_about(observed: Observed) -> None:
    assert bad(observed) == {}
    assert usable(examine(observed))


def test_what_costs_time_at_each_step_is_said_first() -> None:
    assert examine(GOOD)[0].name == "requeue-time"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "is not set, which means 10 s: each plugin step takes 20 s for nothing"),
        ("5s", "is 5 s: each plugin step takes 10 s for nothing"),
    ],
)
def test_a_slow_controller_of_argo(value: str | None, sentence: str) -> None:
    env = {name: text for name, text in GOOD_ENV.items() if name != "DEFAULT_REQUEUE_TIME"}
    found = only(replace(GOOD, argo=argo(env | ({"DEFAULT_REQUEUE_TIME": value} if value else {}))))
    assert (found.name, found.state) == ("requeue-time", State.WARNING)
    assert sentence in found.sentence
    assert found.remedy == "kubectl set env -n argo deployment/workflow-controller DEFAULT_REQUEUE_TIME=500ms"


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("2s", 2), ("1m30s", 90), ("1h", 3600), ("", None), ("10", None), ("s", None)]
)
def test_durations_of_go(text: str, seconds: float | None) -> None:
    assert duration_seconds(text) == seconds


def test_a_requeue_time_from_elsewhere_is_not_guessed() -> None:
    assert only(replace(GOOD, argo=argo({**GOOD_ENV, "DEFAULT_REQUEUE_TIME": ""}))).state is State.UNKNOWN


def test_a_cluster_without_argo() -> None:
    found = bad(replace(GOOD, argo_kinds=frozenset(), argo=Deployments(()), argo_settings=Unknown("no Deployment")))
    assert found["argo-kinds"].state is State.FAILED
    assert "Argo Workflows is not installed" in found["argo-kinds"].sentence
    assert "helm install argo" in found["argo-kinds"].remedy
    assert {one.state for name, one in found.items() if name != "argo-kinds"} == {State.UNKNOWN}


@pytest.mark.parametrize(
    ("observed", "state"), [(GOOD, State.WARNING), (AGENT, State.FAILED)], ids=["sidecar", "agent"]
)
def test_an_old_argo_says_what_is_not_available(observed: Observed, state: State) -> None:
    found = only(replace(observed, argo=argo(tag="v3.7.2")))
    assert (found.name, found.state) == ("argo-version", state)
    assert "before 4.1 there is no shared agent (mode=agent), and no Workflow can bring its executor plugin" in (
        found.sentence
    )


def test_an_image_by_digest_has_no_version() -> None:
    assert only(replace(GOOD, argo=argo(tag=""))).state is State.UNKNOWN


def test_executor_plugins_that_are_switched_off() -> None:
    env = {name: text for name, text in GOOD_ENV.items() if name != "ARGO_EXECUTOR_PLUGINS"}
    found = only(replace(GOOD, argo=argo(env)))
    assert (found.name, found.state) == ("executor-plugins", State.FAILED)
    assert found.remedy.endswith("deployment/workflow-controller ARGO_EXECUTOR_PLUGINS=true")
    assert bad(replace(AGENT, argo=argo(env))) == {}


@pytest.mark.parametrize(
    ("env", "args", "state"),
    [
        ({}, ["--executor-plugins"], None),
        ({"ARGO_WORKFLOW_LEVEL_EXECUTOR_PLUGINS": "true"}, [], State.WARNING),
        ({}, ["--workflow-level-executor-plugins=true"], State.WARNING),
        ({"ARGO_EXECUTOR_PLUGINS": "false"}, [], State.FAILED),
    ],
)
def test_the_ways_to_switch_executor_plugins_on(env: dict[str, str], args: list[str], state: State | None) -> None:
    given = {**GOOD_ENV, "ARGO_EXECUTOR_PLUGINS": "", **env}
    found = bad(replace(GOOD, argo=argo(given, args=args))).get("executor-plugins")
    assert (found.state if found else None) == state


@pytest.mark.parametrize(
    ("observed", "sentence", "remedy"),
    [
        (
            replace(GOOD, argo_settings={"disableAgentPodCreation": "true"}),
            "Argo makes no agent pods (disableAgentPodCreation), and Tiphys runs in sidecar mode",
            '{"data":{"disableAgentPodCreation":"false"}}',
        ),
        (
            replace(AGENT, argo_settings={}),
            "Tiphys runs its shared agent, and Argo makes agent pods, too",
            '{"data":{"disableAgentPodCreation":"true"}}',
        ),
    ],
    ids=["nobody answers", "both answer"],
)
def test_argo_and_tiphys_must_agree_who_answers(observed: Observed, sentence: str, remedy: str) -> None:
    found = only(observed)
    assert (found.name, found.state) == ("agent-pods", State.FAILED)
    assert sentence in found.sentence
    assert remedy in found.remedy
    assert "configmap workflow-controller-configmap -n argo" in found.remedy


def test_exit_codes_that_get_lost() -> None:
    env = {name: text for name, text in GOOD_ENV.items() if "FINALIZER" not in name}
    found = only(replace(GOOD, argo=argo(env)))
    assert (found.name, found.state) == ("exit-codes", State.WARNING)
    assert found.remedy.endswith("ARGO_POD_STATUS_CAPTURE_FINALIZER=true")


def test_kinds_of_tiphys_that_are_missing() -> None:
    found = only(replace(GOOD, tiphys_kinds=frozenset()))
    assert (found.name, found.state) == ("tiphys-kinds", State.FAILED)
    assert found.remedy == "kubectl apply --server-side -f charts/tiphys/crds"


def test_tiphys_that_is_not_installed() -> None:
    found = bad(replace(GOOD, tiphys=Deployments(()), pods=()))
    assert {name: one.state for name, one in found.items()} == {"plugin": State.FAILED, "controller": State.FAILED}
    assert "helm install tiphys" in found["plugin"].remedy


def test_a_plugin_that_is_not_ready_with_its_reason() -> None:
    pods = (PodSeen("plugin", "tiphys", "p-1", "s3://ml/tiphys: no credentials"), PodSeen("controller", "tiphys", "c"))
    found = only(replace(GOOD, pods=pods))
    assert (found.name, found.state) == ("plugin", State.FAILED)
    assert "the plugin is not ready: s3://ml/tiphys: no credentials; until then every plugin step" in found.sentence
    assert found.remedy == "kubectl logs -n tiphys p-1"


def test_one_pod_of_two_is_enough_to_go_on() -> None:
    pods = (*(GOOD.pods if isinstance(GOOD.pods, tuple) else ()), PodSeen("plugin", "tiphys", "p-2", "Unschedulable"))
    found = only(replace(GOOD, pods=pods))
    assert (found.name, found.state) == ("plugin", State.WARNING)
    assert "1 of 2 pods of the plugin" in found.sentence


def test_a_ready_pod_that_cannot_serve_everybody_is_named() -> None:
    said = ("the GPU ledger: gone", "namespace ml: s3://ml/tiphys: no credentials")
    pods = (PodSeen("plugin", "tiphys", "p-1", complaints=said), PodSeen("controller", "tiphys", "c"))
    found = only(replace(GOOD, pods=pods))
    assert (found.name, found.state) == ("plugin", State.WARNING)
    assert found.sentence.endswith(
        "but not for all: the GPU ledger: gone; namespace ml: s3://ml/tiphys: no credentials"
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"ledger": {"error": ""}, "tenants": [{"namespace": "ml", "error": ""}]}', ()),
        (
            '{"ledger": {"error": "gone"}, "tenants": [{"namespace": "ml", "error": "403"}, {"namespace": "b"}]}',
            ("the GPU ledger: gone", "namespace ml: 403"),
        ),
        ("ok", ()),
        ("[1]", ()),
        ('{"tenants": [3]}', ()),
    ],
)
def test_what_a_ready_process_complains_of_is_read_from_its_answer(body: str, expected: tuple[str, ...]) -> None:
    assert complaints(body) == expected


def test_a_plugin_without_pods() -> None:
    found = only(replace(GOOD, pods=(PodSeen("controller", "tiphys", "c"),)))
    assert "it has no pods" in found.sentence
    assert found.remedy == "kubectl describe -n tiphys deployment/tiphys-plugin"


CASES: list[tuple[str, dict[str, Any], str, State, str]] = [
    ("namespace", {"exists": False}, "ml/exists", State.FAILED, "there is no namespace ml"),
    (
        "account of workflows",
        {"accounts": frozenset({"tiphys-executor-plugin"})},
        "ml/accounts",
        State.FAILED,
        "no service account tiphys-workflow: no pod of a workflow is made",
    ),
    (
        "account of the plugin",
        {"accounts": frozenset({"tiphys-workflow"})},
        "ml/accounts",
        State.FAILED,
        "no service account tiphys-executor-plugin: every plugin step ends in Error",
    ),
    (
        "token secret",
        {"secrets": {**SECRETS, "tiphys-workflow.service-account-token": frozenset()}},
        "ml/tokens",
        State.FAILED,
        "there is no Secret tiphys-workflow.service-account-token",
    ),
    (
        "token in its secret",
        {"secrets": {**SECRETS, "tiphys-executor-plugin.service-account-token": frozenset({"ca.crt"})}},
        "ml/tokens",
        State.FAILED,
        "Secret tiphys-executor-plugin.service-account-token holds no token",
    ),
    (
        "right of the agent",
        {"rights": {**RIGHTS, Right("patch", "workflowtasksets/status"): False}},
        "ml/rights",
        State.FAILED,
        "account tiphys-workflow may not patch workflowtasksets/status: the agent pod crashes",
    ),
    (
        "right to make Jobs",
        {"rights": {**RIGHTS, Right("create", "jobs", "batch"): False}},
        "ml/jobs",
        State.WARNING,
        "account tiphys-workflow may not create jobs: a training on several nodes ends in Error",
    ),
    ("plugin", {"config_maps": frozenset()}, "ml/plugin", State.FAILED, "there is no ConfigMap tiphys-executor-plugin"),
    (
        "store secret",
        {"secrets": {**SECRETS, "tiphys-store": frozenset()}},
        "ml/store",
        State.WARNING,
        "there is no Secret tiphys-store: training pods cannot save, unless",
    ),
]


@pytest.mark.parametrize(
    ("lacking", "name", "state", "sentence"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_what_is_missing_in_a_namespace(lacking: dict[str, Any], name: str, state: State, sentence: str) -> None:
    found = only(replace(GOOD, namespaces=(replace(NAMESPACE, **lacking),)))
    assert (found.name, found.state) == (name, state)
    assert sentence in found.sentence
    assert found.remedy


def test_agent_mode_needs_less_in_a_namespace() -> None:
    lean = replace(
        NAMESPACE,
        accounts=frozenset({"tiphys-workflow"}),
        config_maps=frozenset(),
        secrets={"tiphys-store": SECRETS["tiphys-store"]},
        rights=dict.fromkeys(EXECUTOR_RIGHTS + GANG_RIGHTS, True),
    )
    assert bad(replace(AGENT, namespaces=(lean,))) == {}
    found = only(replace(AGENT, namespaces=(replace(lean, rights=dict.fromkeys(GANG_RIGHTS, True)),)))
    assert "may not create workflowtaskresults, patch workflowtaskresults: steps end in Error" in found.sentence


@pytest.mark.parametrize(
    ("ahead", "state", "words"),
    [(70.0, State.WARNING, "70 s ahead of"), (-650.0, State.FAILED, "650 s behind"), (59.0, None, "")],
)
def test_the_clock_of_a_node(ahead: float, state: State | None, words: str) -> None:
    found = bad(replace(GOOD, clocks=(Clock("node-1", ahead), Clock("node-2", 0.1)))).get("clocks")
    assert (found.state if found else None) == state
    assert found is None or f"the clock of node node-1 is {words} the API server's" in found.sentence


def test_partial_rights_are_no_failure() -> None:
    nothing = Observed(
        server="https://east",
        version=FORBIDDEN,
        argo_kinds=FORBIDDEN,
        tiphys_kinds=FORBIDDEN,
        argo=Deployments((), "forbidden"),
        argo_settings=FORBIDDEN,
        tiphys=Deployments((), "forbidden"),
        pods=FORBIDDEN,
        namespaces=(
            WorkflowNamespace("ml", FORBIDDEN, FORBIDDEN, FORBIDDEN, dict.fromkeys(SECRETS, FORBIDDEN), FORBIDDEN),
        ),
        clocks=FORBIDDEN,
    )
    findings = examine(nothing)
    assert {one.state for one in findings} == {State.UNKNOWN}
    assert all(one.sentence.startswith("cannot tell, because ") for one in findings)
    assert usable(findings)


def test_clocks_are_told_from_the_times_of_one_write() -> None:
    lease = {
        "metadata": {"name": "node-1", "managedFields": [{"manager": "kubelet", "time": "2026-05-04T12:00:00Z"}]},
        "spec": {"renewTime": "2026-05-04T12:02:00.500000Z"},
    }
    unwritten = {"metadata": {"name": "node-2"}, "spec": {"renewTime": "2026-05-04T12:02:00.500000Z"}}
    assert list(clocks_of([lease, unwritten])) == [Clock("node-1", 120.5)]


@pytest.mark.parametrize(
    ("data", "value"),
    [
        ({"disableAgentPodCreation": "true"}, "true"),
        ({"config": "disableAgentPodCreation: true\nparallelism: 5\n"}, "true"),
        ({"config": "- no: mapping"}, None),
        ({"config": "a: b: c"}, None),
        ({}, None),
    ],
)
def test_settings_of_argo_stand_in_either_form(data: dict[str, str], value: str | None) -> None:
    assert settings_of({"data": data}).get("disableAgentPodCreation") == value


def pod(**status: Any) -> Object:
    return {"metadata": {"name": "p", "namespace": "tiphys"}, "status": status}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]},
            "ImagePullBackOff: no such image",
        ),
        (
            {
                "containerStatuses": [
                    {
                        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                        "lastState": {"terminated": {"exitCode": 2}},
                    }
                ]
            },
            "CrashLoopBackOff: it ended before with exit code 2",
        ),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1"}]},
            "Unschedulable: 0/1",
        ),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, "Evicted: low on memory"),
        ({}, "Kubernetes gives no reason"),
    ],
)
def test_what_kubernetes_says_of_a_pod_that_is_not_ready(status: Any, reason: str) -> None:
    assert trouble(pod(**status)) == reason


def test_a_pod_that_runs_can_be_asked_itself() -> None:
    running = pod(containerStatuses=[{"state": {"running": {}}}], conditions=[{"type": "Ready", "status": "False"}])
    assert (runs(running), is_ready(running)) == (True, False)
    assert readiness_path(running) == "/api/v1/namespaces/tiphys/pods/p:7243/proxy/readyz"
    assert said('{"error": "no bucket"}') == "no bucket"
    assert said("plain\ntext") == "plain text"
