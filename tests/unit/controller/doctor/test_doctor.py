"""Each check of `tiphys doctor --cluster`: what is seen, how bad it is, and what to do.

| seen | state |
|---|---|
| what may not be read | unknown |
| DEFAULT_REQUEUE_TIME unset, or over 2 s | warning |
| a controller of Argo that may not delete the answers of plugin steps | warning |
| Argo's kinds missing | failed |
| Argo before 4.1 that writes its updates back to its cache | failed |
| Argo without what compiled Workflows need, or before 4.1 in agent mode | failed |
| executor plugins off (sidecar mode) | failed |
| plugins only from Workflows | warning |
| mode and disableAgentPodCreation disagree | failed |
| Tiphys' kinds, plugin or controller missing or not ready | failed |
| namespace, account, token, right or plugin missing | failed |
| store secret missing | warning |
| a Workflow that cannot go on | failed |
| a clock off by a minute, ten minutes | warning, failed |
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from support.servers import kube_server
from support.stories.installed_cluster import install
from tiphys_controller.doctor import CheckStatus, Finding, UnknownValue, check_cluster, failed_checks
from tiphys_controller.doctor.check import failed, passed
from tiphys_controller.doctor.checks_namespace import PERMISSIONS
from tiphys_controller.doctor.observe import observe_cluster, parse_argo_settings, read_node_clocks
from tiphys_controller.doctor.observed import (
    ClusterObservation,
    DeploymentSearch,
    NodeClock,
    Permission,
    PodReadiness,
    UnreadSecret,
    WorkflowNamespace,
)
from tiphys_controller.doctor.obstacles import Obstacle
from tiphys_controller.doctor.pod_readiness import (
    build_readiness_path,
    describe_not_ready,
    has_running_container,
    is_pod_ready,
    parse_ledger_failure,
    parse_partial_failures,
    parse_readiness_reason,
)

from tiphys.kube import Object

GOOD_ENV = {
    "DEFAULT_REQUEUE_TIME": "500ms",
    "ARGO_AGENT_PATCH_RATE": "200ms",
    "ARGO_EXECUTOR_PLUGINS": "true",
    "ARGO_POD_STATUS_CAPTURE_FINALIZER": "true",
}
RIGHTS: Mapping[tuple[str, Permission], bool] = {
    (account, right): True for account, rights in PERMISSIONS.items() for right in rights
}
SECRETS: Mapping[str, frozenset[str] | UnknownValue] = {
    "tiphys-store": frozenset({"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}),
    **{
        f"{account}.service-account-token": frozenset({"token", "ca.crt"})
        for account in ("tiphys-workflow", "tiphys-executor", "tiphys-gang", "tiphys-executor-plugin")
    },
}
ACCOUNTS = frozenset({"tiphys-workflow", "tiphys-executor", "tiphys-gang", "tiphys-executor-plugin"})
NAMESPACE = WorkflowNamespace(
    name="ml",
    exists=True,
    accounts=ACCOUNTS,
    config_maps=frozenset({"tiphys-executor-plugin"}),
    secrets=SECRETS,
    permissions=RIGHTS,
)
FORBIDDEN = UnknownValue("the API server refused: nodes is forbidden")


def deployment(name: str, container: Object, namespace: str = "argo", **labels: str) -> Object:
    spec = {"template": {"spec": {"containers": [container]}}}
    return {"metadata": {"name": name, "namespace": namespace, "labels": labels}, "spec": spec}


def argo(env: Mapping[str, str] | None = None, tag: str = "v4.1.2", args: list[str] | None = None) -> DeploymentSearch:
    variables = [{"name": name, "value": value} for name, value in (GOOD_ENV if env is None else env).items()]
    image = f"example.org/argoproj/workflow-controller:{tag}" if tag else "example.org/argo@sha256:00"
    container = {"image": image, "command": ["workflow-controller"], "args": args or [], "env": variables}
    return DeploymentSearch((deployment("workflow-controller", container),))


def tiphys(mode: str = "serve") -> DeploymentSearch:
    parts = {"plugin": ["tiphys_plugin", mode], "controller": ["tiphys_controller"]}
    return DeploymentSearch(
        tuple(
            deployment(f"tiphys-{name}", {"args": args}, "tiphys", **{"app.kubernetes.io/component": name})
            for name, args in parts.items()
        )
    )


GOOD = ClusterObservation(
    server="https://east",
    version="v1.34.1",
    argo_kinds=frozenset({"workflows", "workflowtasksets", "workflowtaskresults", "workflowtemplates"}),
    tiphys_kinds=frozenset({"gpuledgers", "gpuledgerrecords"}),
    argo=argo(),
    argo_settings={},
    tiphys=tiphys(),
    pods=(
        PodReadiness("plugin", "tiphys", "tiphys-plugin-1"),
        PodReadiness("controller", "tiphys", "tiphys-controller-1"),
    ),
    namespaces=(NAMESPACE,),
    clocks=(NodeClock("node-1", 0.4),),
)
AGENT = replace(GOOD, tiphys=tiphys("agent"), argo_settings={"disableAgentPodCreation": "true"})


def bad(observed: ClusterObservation) -> dict[str, Finding]:
    """Findings that are not ok, by name."""
    return {one.name: one for one in check_cluster(observed) if one.state is not CheckStatus.OK}


def only(observed: ClusterObservation) -> Finding:
    """The one finding that is not ok."""
    [found] = bad(observed).values()
    return found


@pytest.mark.parametrize("observed", [GOOD, AGENT], ids=["sidecar mode", "agent mode"])
def test_a_good_cluster_has_nothing_to_complain_about(observed: ClusterObservation) -> None:
    assert bad(observed) == {}
    assert not failed_checks(check_cluster(observed))


def test_secrets_that_exist_are_in_order_where_their_content_is_not_read() -> None:
    unread = {name: UnreadSecret() for name in SECRETS}
    found = check_cluster(replace(GOOD, namespaces=(replace(NAMESPACE, secrets=unread),)))
    assert {one.state for one in found if one.name in ("ml/tokens", "ml/store", "ml/gangs")} == {CheckStatus.OK}
    assert "Secret tiphys-store exists" in [one.sentence for one in found]


def test_the_check_of_the_requeue_time_comes_first() -> None:
    assert check_cluster(GOOD)[0].name == "requeue-time"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "is not set, which means 10 s: each step waits up to 10 s for nothing, a training 20 s for each late"),
        ("5s", "is 5 s: each step waits up to 5 s for nothing, a training 10 s for each late answer of the plugin"),
    ],
)
def test_a_slow_controller_of_argo(value: str | None, sentence: str) -> None:
    env = {name: text for name, text in GOOD_ENV.items() if name != "DEFAULT_REQUEUE_TIME"}
    found = only(replace(GOOD, argo=argo(env | ({"DEFAULT_REQUEUE_TIME": value} if value else {}))))
    assert (found.name, found.state) == ("requeue-time", CheckStatus.WARNING)
    assert sentence in found.sentence
    assert found.remedy == "kubectl set env -n argo deployment/workflow-controller DEFAULT_REQUEUE_TIME=1s"


@pytest.mark.parametrize(
    ("value", "state", "sentence"),
    [
        (None, CheckStatus.WARNING, "DEFAULT_REQUEUE_TIME, since ARGO_AGENT_PATCH_RATE is not set"),
        ("2s", CheckStatus.WARNING, "only once per 2 s: each plugin step waits for it"),
        ("soon", CheckStatus.UNKNOWN, "is no plain duration ('soon')"),
    ],
)
def test_agent_pods_that_keep_answers_back(value: str | None, state: CheckStatus, sentence: str) -> None:
    env = {name: text for name, text in GOOD_ENV.items() if name != "ARGO_AGENT_PATCH_RATE"}
    there = argo(env | ({"ARGO_AGENT_PATCH_RATE": value} if value else {}))
    found = only(replace(GOOD, argo=there))
    assert (found.name, found.state) == ("patch-rate", state)
    assert sentence in found.sentence
    if state is CheckStatus.WARNING:
        remedy = "kubectl set env -n argo deployment/workflow-controller ARGO_AGENT_PATCH_RATE=200ms"
        assert found.remedy == remedy
    assert "patch-rate" not in {one.name for one in check_cluster(replace(GOOD, argo=there, tiphys=tiphys("agent")))}


def test_a_controller_of_argo_that_cannot_delete_answers() -> None:
    there = argo(GOOD_ENV)
    there.found[0]["spec"]["template"]["spec"]["serviceAccountName"] = "argo-controller"
    found = only(replace(GOOD, argo=there, keeps_answers=frozenset({"ml", "speech"})))
    assert (found.name, found.state) == ("task-set-rights", CheckStatus.WARNING)
    assert "may not patch workflowtasksets/status in ml, speech" in found.sentence
    assert found.remedy.endswith("--serviceaccount=argo:argo-controller")
    unknown = only(replace(GOOD, keeps_answers=UnknownValue("reviews are forbidden")))
    assert (unknown.name, unknown.state) == ("task-set-rights", CheckStatus.UNKNOWN)


def test_a_plugin_that_cannot_end_the_trainings_of_lost_nodes_is_found_by_its_rights() -> None:
    missing = ("list leases in kube-node-lease", "patch pods/status in ml")
    found = only(replace(GOOD, missing_loss_rights=missing))
    assert (found.name, found.state) == ("lost-nodes", CheckStatus.WARNING)
    assert "may not list leases in kube-node-lease, patch pods/status in ml:" in found.sentence
    assert found.remedy.endswith("--set nodes.detectLoss=true")
    with kube_server.serving() as server:
        api = install(server)
        server.authorize = lambda request: (request.verb, request.plural) != ("list", "leases")
        assert observe_cluster(api, ("ml",)).missing_loss_rights == missing[:1]
        server.authorize = lambda request: (request.plural, request.subresource) != ("pods", "status")
        assert observe_cluster(api, ("ml",)).missing_loss_rights == missing[1:]
        server.authorize = lambda _: True
        assert observe_cluster(api, ("ml",)).missing_loss_rights == ()


@pytest.mark.parametrize("value", ["", "10", "s"])
def test_a_requeue_time_that_cannot_be_read_is_not_guessed(value: str) -> None:
    assert only(replace(GOOD, argo=argo({**GOOD_ENV, "DEFAULT_REQUEUE_TIME": value}))).state is CheckStatus.UNKNOWN


def test_a_cluster_without_argo() -> None:
    found = bad(
        replace(GOOD, argo_kinds=frozenset(), argo=DeploymentSearch(()), argo_settings=UnknownValue("no Deployment"))
    )
    assert found["argo-kinds"].state is CheckStatus.FAILED
    assert "Argo Workflows is not installed" in found["argo-kinds"].sentence
    assert "helm install argo" in found["argo-kinds"].remedy
    assert {one.state for name, one in found.items() if name != "argo-kinds"} == {CheckStatus.UNKNOWN}


@pytest.mark.parametrize(
    ("tag", "value", "state"),
    [
        ("v3.7.18", None, CheckStatus.FAILED),
        ("v3.7.18", "true", CheckStatus.FAILED),
        ("v3.7.18", "false", CheckStatus.OK),
        ("v4.0.10", None, CheckStatus.OK),
        ("v4.0.10", "true", CheckStatus.FAILED),
        ("v4.1.2", "true", None),
        ("", "true", None),
    ],
)
def test_a_controller_that_does_not_see_its_own_updates(tag: str, value: str | None, state: CheckStatus | None) -> None:
    env = GOOD_ENV | ({"INFORMER_WRITE_BACK": value} if value else {})
    found = [one for one in check_cluster(replace(GOOD, argo=argo(env, tag))) if one.name == "write-back"]
    assert [one.state for one in found] == ([state] if state else [])
    if state is CheckStatus.FAILED:
        assert found[0].remedy == "kubectl set env -n argo deployment/workflow-controller INFORMER_WRITE_BACK=false"


@pytest.mark.parametrize("tag", ["v3.7.16", "3.7.18", "v4.0.7", "v4.0.10", "v4.1.0", "v4.1.2-nonroot"])
def test_the_versions_of_argo_that_sidecar_mode_works_with(tag: str) -> None:
    assert bad(replace(GOOD, argo=argo(GOOD_ENV | {"INFORMER_WRITE_BACK": "false"}, tag))) == {}


@pytest.mark.parametrize("tag", ["v3.6.19", "v3.7.15", "v3.8.0", "v4.0.6"])
def test_an_argo_that_lacks_what_compiled_workflows_need(tag: str) -> None:
    found = bad(replace(GOOD, argo=argo(tag=tag)))["argo-version"]
    assert found.state is CheckStatus.FAILED
    assert found.sentence == f"Argo Workflows is {tag[1:]}: Tiphys needs at least 3.7.16, 4.0.7 or 4.1.0"
    assert found.remedy == "upgrade Argo Workflows"


@pytest.mark.parametrize("settings", [{}, {"disableAgentPodCreation": "true"}])
def test_the_shared_agent_needs_a_newer_argo(settings: dict[str, str]) -> None:
    found = only(replace(AGENT, argo=argo(tag="v4.0.10"), argo_settings=settings))
    assert (found.name, found.state) == ("argo-version", CheckStatus.FAILED)
    assert found.sentence == "Argo Workflows is 4.0.10: the shared agent (mode=agent) needs 4.1.0 or newer"
    assert found.remedy == "upgrade Argo Workflows, or set mode=sidecar in the chart"


@pytest.mark.parametrize("observed", [GOOD, AGENT], ids=["sidecar mode", "agent mode"])
def test_an_argo_newer_than_the_tested_versions_is_named_so(observed: ClusterObservation) -> None:
    newer = replace(observed, argo=argo(tag="v4.2.0"))
    assert bad(newer) == {}
    assert "Argo Workflows 4.2.0, newer than the tested versions" in [one.sentence for one in check_cluster(newer)]


def test_an_image_by_digest_has_no_version() -> None:
    assert only(replace(GOOD, argo=argo(tag=""))).state is CheckStatus.UNKNOWN


def test_an_image_by_digest_has_the_version_of_its_label() -> None:
    [by_digest] = argo(tag="").found
    by_digest["metadata"]["labels"]["app.kubernetes.io/version"] = "v3.7.2"
    found = bad(replace(GOOD, argo=DeploymentSearch((by_digest,))))["argo-version"]
    assert found.sentence.startswith("Argo Workflows is 3.7.2: ")


def test_executor_plugins_that_are_switched_off() -> None:
    env = {name: text for name, text in GOOD_ENV.items() if name != "ARGO_EXECUTOR_PLUGINS"}
    found = only(replace(GOOD, argo=argo(env)))
    assert (found.name, found.state) == ("executor-plugins", CheckStatus.FAILED)
    assert found.remedy.endswith("deployment/workflow-controller ARGO_EXECUTOR_PLUGINS=true")
    assert bad(replace(AGENT, argo=argo(env))) == {}


@pytest.mark.parametrize(
    ("env", "args", "state"),
    [
        ({}, ["--executor-plugins"], None),
        ({"ARGO_WORKFLOW_LEVEL_EXECUTOR_PLUGINS": "true"}, [], CheckStatus.WARNING),
        ({}, ["--workflow-level-executor-plugins=true"], CheckStatus.WARNING),
        ({"ARGO_EXECUTOR_PLUGINS": "false"}, [], CheckStatus.FAILED),
    ],
)
def test_the_ways_to_switch_executor_plugins_on(
    env: dict[str, str], args: list[str], state: CheckStatus | None
) -> None:
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
def test_argo_and_tiphys_must_agree_on_the_answering_process(
    observed: ClusterObservation, sentence: str, remedy: str
) -> None:
    found = only(observed)
    assert (found.name, found.state) == ("agent-pods", CheckStatus.FAILED)
    assert sentence in found.sentence
    assert remedy in found.remedy
    assert "configmap workflow-controller-configmap -n argo" in found.remedy


def test_exit_codes_that_get_lost() -> None:
    env = {name: text for name, text in GOOD_ENV.items() if "FINALIZER" not in name}
    found = only(replace(GOOD, argo=argo(env)))
    assert (found.name, found.state) == ("exit-codes", CheckStatus.WARNING)
    assert found.remedy.endswith("ARGO_POD_STATUS_CAPTURE_FINALIZER=true")


def test_kinds_of_tiphys_that_are_missing() -> None:
    found = only(replace(GOOD, tiphys_kinds=frozenset()))
    assert (found.name, found.state) == ("tiphys-kinds", CheckStatus.FAILED)
    assert found.remedy == "kubectl apply --server-side -f charts/tiphys/crds"


def test_tiphys_that_is_not_installed() -> None:
    found = bad(replace(GOOD, tiphys=DeploymentSearch(()), pods=()))
    assert {name: one.state for name, one in found.items()} == {
        "plugin": CheckStatus.FAILED,
        "controller": CheckStatus.FAILED,
    }
    assert "helm install tiphys" in found["plugin"].remedy


def test_a_plugin_that_is_not_ready_with_its_reason() -> None:
    pods = (
        PodReadiness("plugin", "tiphys", "p-1", "s3://ml-runs/tiphys: no credentials"),
        PodReadiness("controller", "tiphys", "c"),
    )
    found = only(replace(GOOD, pods=pods))
    assert (found.name, found.state) == ("plugin", CheckStatus.FAILED)
    assert "the plugin is not ready: s3://ml-runs/tiphys: no credentials; until then every plugin" in found.sentence
    assert found.remedy == "kubectl logs -n tiphys p-1"


def test_a_ready_pod_of_two_is_enough_to_go_on() -> None:
    pods = (
        *(GOOD.pods if isinstance(GOOD.pods, tuple) else ()),
        PodReadiness("plugin", "tiphys", "p-2", "Unschedulable"),
    )
    found = only(replace(GOOD, pods=pods))
    assert (found.name, found.state) == ("plugin", CheckStatus.WARNING)
    assert "1 of 2 pods of the plugin" in found.sentence


def test_a_ready_pod_that_cannot_serve_everybody_is_named() -> None:
    said = ("namespace ml: s3://ml-runs/tiphys: no credentials",)
    pods = (PodReadiness("plugin", "tiphys", "p-1", partial_failures=said), PodReadiness("controller", "tiphys", "c"))
    found = only(replace(GOOD, pods=pods))
    assert (found.name, found.state) == ("plugin", CheckStatus.WARNING)
    assert found.sentence.endswith("but not for all: namespace ml: s3://ml-runs/tiphys: no credentials")


def test_a_service_without_its_ledger_fails_the_check_with_the_remedy() -> None:
    lost = PodReadiness("plugin", "tiphys", "p-1", ledger_failure="GPULedger tiphys/default was deleted")
    pods = (lost, PodReadiness("controller", "tiphys", "c"))
    found = only(replace(GOOD, pods=pods))
    assert (found.name, found.state) == ("gpu-ledger", CheckStatus.FAILED)
    assert "GPULedger tiphys/default was deleted" in found.sentence
    assert found.remedy == "tiphys queues apply -f FILE -n tiphys"


def test_gap_in_the_log_of_the_ledger_fails_the_check_although_the_services_are_well() -> None:
    found = only(replace(GOOD, ledger_damage="GPULedgerRecord tiphys/default.ab.000000000001 is missing"))
    assert (found.name, found.state) == ("gpu-ledger", CheckStatus.FAILED)
    assert "default.ab.000000000001 is missing" in found.sentence
    assert found.remedy == "kubectl logs -n tiphys -l app.kubernetes.io/component=plugin"


def test_a_service_that_cannot_use_kueue_has_another_remedy() -> None:
    lost = PodReadiness("plugin", "tiphys", "p-1", ledger_failure="GPUs are kept by Kueue")
    deployments = DeploymentSearch(
        tuple(
            deployment(
                one["metadata"]["name"], {"args": ["--ledger-kind=kueue"]}, "tiphys", **one["metadata"]["labels"]
            )
            for one in tiphys().found
        )
    )
    pods = (lost, PodReadiness("controller", "tiphys", "c"))
    assert "kubectl get crd workloads.kueue.x-k8s.io" in only(replace(GOOD, tiphys=deployments, pods=pods)).remedy


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"ledger": {"error": ""}, "tenants": {"failing": 0}}', ()),
        (
            '{"ledger": {"error": "gone"}, "tenants": {"failing": 2}}',
            ("stores that do not answer: 2; the log names them (tenant.store_unavailable)",),
        ),
        ("ok", ()),
        ("[1]", ()),
        ('{"tenants": [3]}', ()),
        ('{"tenants": {"failing": "x"}}', ()),
    ],
)
def test_partial_failures_are_read_from_the_answer_of_a_ready_process(body: str, expected: tuple[str, ...]) -> None:
    assert parse_partial_failures(body) == expected
    assert parse_ledger_failure(body) == ("gone" if "gone" in body else "")


def test_a_plugin_without_pods() -> None:
    found = only(replace(GOOD, pods=(PodReadiness("controller", "tiphys", "c"),)))
    assert "it has no pods" in found.sentence
    assert found.remedy == "kubectl describe -n tiphys deployment/tiphys-plugin"


CASES: list[tuple[str, dict[str, Any], str, CheckStatus, str]] = [
    ("namespace", {"exists": False}, "ml/exists", CheckStatus.FAILED, "there is no namespace ml"),
    (
        "account of workflows",
        {"accounts": ACCOUNTS - {"tiphys-workflow"}},
        "ml/accounts",
        CheckStatus.FAILED,
        "no service account tiphys-workflow: no pod of a workflow is made",
    ),
    (
        "account of the plugin",
        {"accounts": ACCOUNTS - {"tiphys-executor-plugin"}},
        "ml/accounts",
        CheckStatus.FAILED,
        "no service account tiphys-executor-plugin: every plugin step ends in Error",
    ),
    (
        "account of the executor",
        {"accounts": ACCOUNTS - {"tiphys-executor"}},
        "ml/accounts",
        CheckStatus.FAILED,
        "no service account tiphys-executor: every step ends in Error",
    ),
    (
        "token of the executor",
        {"secrets": {**SECRETS, "tiphys-executor.service-account-token": frozenset()}},
        "ml/tokens",
        CheckStatus.FAILED,
        "there is no Secret tiphys-executor.service-account-token, from which Argo mounts the account's token: no pod",
    ),
    (
        "token of those who create gangs",
        {"secrets": {**SECRETS, "tiphys-gang.service-account-token": frozenset()}},
        "ml/gangs",
        CheckStatus.WARNING,
        "there is no Secret tiphys-gang.service-account-token",
    ),
    (
        "right of the executor",
        {"permissions": {**RIGHTS, ("tiphys-executor", Permission("create", "workflowtaskresults")): False}},
        "ml/rights",
        CheckStatus.FAILED,
        "account tiphys-executor may not create workflowtaskresults: steps end in Error",
    ),
    (
        "token secret",
        {"secrets": {**SECRETS, "tiphys-workflow.service-account-token": frozenset()}},
        "ml/tokens",
        CheckStatus.FAILED,
        "there is no Secret tiphys-workflow.service-account-token",
    ),
    (
        "token in its secret",
        {"secrets": {**SECRETS, "tiphys-executor-plugin.service-account-token": frozenset({"ca.crt"})}},
        "ml/tokens",
        CheckStatus.FAILED,
        "Secret tiphys-executor-plugin.service-account-token holds no token",
    ),
    (
        "right of the agent",
        {"permissions": {**RIGHTS, ("tiphys-workflow", Permission("patch", "workflowtasksets/status")): False}},
        "ml/rights",
        CheckStatus.FAILED,
        "account tiphys-workflow may not patch workflowtasksets/status: the agent pod crashes",
    ),
    (
        "right to make Jobs",
        {"permissions": {**RIGHTS, ("tiphys-gang", Permission("create", "jobs", "batch")): False}},
        "ml/gangs",
        CheckStatus.WARNING,
        "account tiphys-gang may not create jobs: a training on several nodes with backend=job ends in Error",
    ),
    (
        "plugin",
        {"config_maps": frozenset()},
        "ml/plugin",
        CheckStatus.FAILED,
        "there is no ConfigMap tiphys-executor-plugin",
    ),
    (
        "store secret",
        {"secrets": {**SECRETS, "tiphys-store": frozenset()}},
        "ml/store",
        CheckStatus.WARNING,
        "there is no Secret tiphys-store: training pods cannot save, unless",
    ),
]


@pytest.mark.parametrize(
    ("lacking", "name", "state", "sentence"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_missing_part_of_a_namespace_is_found_with_its_remedy(
    lacking: dict[str, Any], name: str, state: CheckStatus, sentence: str
) -> None:
    found = only(replace(GOOD, namespaces=(replace(NAMESPACE, **lacking),)))
    assert (found.name, found.state) == (name, state)
    assert sentence in found.sentence
    assert found.remedy


def test_agent_mode_needs_less_in_a_namespace() -> None:
    lean = replace(
        NAMESPACE,
        accounts=frozenset({"tiphys-workflow", "tiphys-executor"}),
        config_maps=frozenset(),
        secrets={name: SECRETS[name] for name in ("tiphys-store", "tiphys-executor.service-account-token")},
        permissions={held: True for held in RIGHTS if held[0] == "tiphys-executor"},
    )
    assert bad(replace(AGENT, namespaces=(lean,))) == {}
    found = only(replace(AGENT, namespaces=(replace(lean, permissions={}),)))
    assert "may not create workflowtaskresults, patch workflowtaskresults: steps end in Error" in found.sentence


def test_a_namespace_without_gangs_lacks_nothing() -> None:
    single = replace(
        NAMESPACE,
        accounts=ACCOUNTS - {"tiphys-gang"},
        permissions={held: held[0] != "tiphys-gang" for held in RIGHTS},
    )
    assert bad(replace(GOOD, namespaces=(single,))) == {}


@pytest.mark.parametrize(
    ("ahead", "state", "words"),
    [(70.0, CheckStatus.WARNING, "70 s ahead of"), (-650.0, CheckStatus.FAILED, "650 s behind"), (59.0, None, "")],
)
def test_the_clock_of_a_node(ahead: float, state: CheckStatus | None, words: str) -> None:
    found = bad(replace(GOOD, clocks=(NodeClock("node-1", ahead), NodeClock("node-2", 0.1)))).get("clocks")
    assert (found.state if found else None) == state
    assert found is None or f"the clock of node node-1 is {words} the API server's" in found.sentence


def test_a_workflow_that_cannot_go_on_is_a_failure_with_its_remedy() -> None:
    stuck = [
        Obstacle(f"digits-{n}", "ml", "fit.run", "no node takes its pod: 0/1 nodes", "add nodes") for n in range(12)
    ]
    found = [one for one in check_cluster(replace(GOOD, obstacles=tuple(stuck))) if one.name == "workflows"]
    assert {one.state for one in found} == {CheckStatus.FAILED}
    assert (found[0].sentence, found[0].remedy) == (
        "ml/digits-0, fit.run: no node takes its pod: 0/1 nodes",
        "add nodes",
    )
    assert len(found) == 11
    assert found[-1].sentence == "and 2 more"
    assert failed_checks(found)


def test_partial_rights_are_no_failure() -> None:
    nothing = ClusterObservation(
        server="https://east",
        version=FORBIDDEN,
        argo_kinds=FORBIDDEN,
        tiphys_kinds=FORBIDDEN,
        argo=DeploymentSearch((), "forbidden"),
        argo_settings=FORBIDDEN,
        tiphys=DeploymentSearch((), "forbidden"),
        pods=FORBIDDEN,
        namespaces=(
            WorkflowNamespace("ml", FORBIDDEN, FORBIDDEN, FORBIDDEN, dict.fromkeys(SECRETS, FORBIDDEN), FORBIDDEN),
        ),
        clocks=FORBIDDEN,
        obstacles=FORBIDDEN,
    )
    findings = check_cluster(nothing)
    assert {one.state for one in findings} == {CheckStatus.UNKNOWN}
    assert all(one.sentence.startswith("not checked: ") for one in findings)
    assert not failed_checks(findings)


def test_clocks_are_compared_by_the_times_of_one_write() -> None:
    lease = {
        "metadata": {"name": "node-1", "managedFields": [{"manager": "kubelet", "time": "2026-05-04T12:00:00Z"}]},
        "spec": {"renewTime": "2026-05-04T12:02:00.500000Z"},
    }
    unwritten = {"metadata": {"name": "node-2"}, "spec": {"renewTime": "2026-05-04T12:02:00.500000Z"}}
    assert list(read_node_clocks([lease, unwritten])) == [NodeClock("node-1", 120.5)]


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
    assert parse_argo_settings({"data": data}).get("disableAgentPodCreation") == value


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
def test_a_pod_that_is_not_ready_shows_the_reason_of_kubernetes(status: Any, reason: str) -> None:
    assert describe_not_ready(pod(**status)) == reason


def test_a_pod_that_runs_can_be_asked_itself() -> None:
    running = pod(containerStatuses=[{"state": {"running": {}}}], conditions=[{"type": "Ready", "status": "False"}])
    assert (has_running_container(running), is_pod_ready(running)) == (True, False)
    assert build_readiness_path(running) == "/api/v1/namespaces/tiphys/pods/p:7243/proxy/readyz"
    secured = {**running, "spec": {"containers": [{"readinessProbe": {"httpGet": {"scheme": "HTTPS"}}}]}}
    assert build_readiness_path(secured) == "/api/v1/namespaces/tiphys/pods/https:p:7243/proxy/readyz"
    assert parse_readiness_reason('{"error": "no bucket"}') == "no bucket"
    assert parse_readiness_reason("plain\ntext") == "plain text"


def test_workflows_in_the_namespace_of_the_services_are_a_warning() -> None:
    """Their pods can mount the Secret of the services."""
    found = only(replace(GOOD, namespaces=(NAMESPACE, replace(NAMESPACE, name="tiphys"))))
    assert (found.name, found.state) == ("tiphys/release", CheckStatus.WARNING)
    assert "can mount the Secret of the services" in found.sentence
    assert "a namespace of its own" in found.remedy


def test_credentials_that_reach_too_far_are_a_failure_each() -> None:
    remedy = "give the credentials the policy of tiphys doctor s3://ml-runs/team-a --policy program"
    access = [passed("may read"), failed("may use s3:PutObject", remedy)]
    found = only(replace(GOOD, namespaces=(replace(NAMESPACE, store_access=access),)))
    assert (found.name, found.state) == ("ml/store-access", CheckStatus.FAILED)
    assert found.sentence == "the credentials in Secret tiphys-store may use s3:PutObject"
    assert found.remedy == remedy
