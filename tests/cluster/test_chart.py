"""What the chart renders, in all its forms, and what it refuses. Needs `helm`, and no cluster.

| form | mode | RBAC | extras |
|---|---|---|---|
| sidecar | sidecar | one namespace | none |
| tenants | sidecar | two namespaces | all |
| agent | agent | the cluster | none |
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.checks.chart import (
    CHART,
    CI_VALUES,
    MINIMAL,
    ROOT,
    Object,
    Refused,
    find_helm,
    helm,
    key,
    named,
    of_kind,
    pod_specs,
    render,
)
from support.checks.chart_rights import GUIDE, rights, with_table

from hera_pipelines.compile.container import METRICS_PORT
from tiphys.protocol.gang import GANG_SERVICE, MEMBER_LABEL
from tiphys.protocol.step_spec import STORE_ANNOTATION, STORE_SECRET
from tiphys.service import http_server

pytestmark = pytest.mark.cluster
if not find_helm():
    pytest.skip("there is no helm on PATH, nor in the cache of the test cluster", allow_module_level=True)

FORMS = pytest.mark.parametrize("file", CI_VALUES, ids=lambda file: file.stem.removesuffix("-values"))
SIDECAR, TENANTS, AGENT = (CHART / "ci" / f"{name}-values.yaml" for name in ("sidecar", "tenants", "agent"))
EARLIER_VALUES = sorted((ROOT / "tests" / "cluster" / "values").glob("*.yaml"))
WITHOUT_NAMESPACE = {"ClusterRole", "ClusterRoleBinding"}


@FORMS
def test_helm_finds_nothing_to_complain_about(file: Path) -> None:
    assert "0 chart(s) failed" in helm("lint", CHART, "--strict", "--values", file)


@FORMS
def test_every_object_is_labelled_and_says_where_it_lives(file: Path) -> None:
    for one in render(file=file):
        kind, namespace, _ = key(one)
        assert bool(namespace) is (kind not in WITHOUT_NAMESPACE), key(one)
        assert one["metadata"]["labels"]["app.kubernetes.io/name"] == "tiphys", key(one)
        assert one["metadata"]["labels"]["app.kubernetes.io/instance"] == "ours", key(one)


@FORMS
def test_no_two_objects_have_one_name(file: Path) -> None:
    keys = [key(one) for one in render(file=file)]
    assert len(keys) == len(set(keys))


@FORMS
def test_every_pod_meets_the_restricted_standard(file: Path) -> None:
    """Pod Security Standards, restricted; and beyond: a root that cannot be written, and bounds for memory."""
    for name, spec in pod_specs(render(file=file)):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        for volume in spec.get("volumes", []):
            assert "hostPath" not in volume, name
        for container in spec["containers"]:
            pod, own = spec["securityContext"], container["securityContext"]
            assert (own.get("runAsNonRoot") or pod["runAsNonRoot"]) is True, name
            assert own.get("runAsUser", pod.get("runAsUser")) != 0, name
            assert own.get("seccompProfile", pod["seccompProfile"]) == {"type": "RuntimeDefault"}, name
            assert own["allowPrivilegeEscalation"] is False, name
            assert own["capabilities"] == {"drop": ["ALL"]}, name
            assert own["readOnlyRootFilesystem"] is True, name
            assert "privileged" not in own, name
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name
            assert "memory" in container["resources"]["limits"], name


@FORMS
def test_only_pods_that_call_the_api_server_hold_a_token(file: Path) -> None:
    holders = {name for name, spec in pod_specs(render(file=file)) if spec["automountServiceAccountToken"]}
    assert holders - {"ours-ui-team-a", "ours-ui-team-b"} == {"ours-plugin", "ours-controller"}


@FORMS
def test_every_binding_joins_a_role_and_an_account_that_exist(file: Path) -> None:
    objects = render(file=file)
    keys = {key(one) for one in objects}
    for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding"):
        reference = binding["roleRef"]
        namespace = "" if reference["kind"] == "ClusterRole" else binding["metadata"]["namespace"]
        assert (reference["kind"], namespace, reference["name"]) in keys, key(binding)
        for subject in binding["subjects"]:
            assert ("ServiceAccount", subject["namespace"], subject["name"]) in keys, key(binding)


@FORMS
def test_every_account_that_is_named_exists(file: Path) -> None:
    objects = render(file=file)
    keys = {key(one) for one in objects}
    for one in of_kind(objects, "Deployment"):
        account = one["spec"]["template"]["spec"]["serviceAccountName"]
        assert ("ServiceAccount", one["metadata"]["namespace"], account) in keys
    for secret in of_kind(objects, "Secret"):
        account = secret["metadata"]["annotations"]["kubernetes.io/service-account.name"]
        assert ("ServiceAccount", secret["metadata"]["namespace"], account) in keys
        assert secret["metadata"]["name"] == f"{account}.service-account-token", "Argo looks for this name"


@FORMS
def test_no_secret_value_is_in_a_manifest(file: Path) -> None:
    for secret in of_kind(render(file=file), "Secret"):
        assert secret["type"] == "kubernetes.io/service-account-token"
        assert not {"data", "stringData"} & secret.keys()
    for _, spec in pod_specs(render(file=file)):
        names = {variable["name"] for container in spec["containers"] for variable in container.get("env", [])}
        assert not {name for name in names if re.search("SECRET|PASSWORD|TOKEN$|ACCESS_KEY", name)}


@FORMS
def test_no_rule_is_wider_than_it_looks(file: Path) -> None:
    for role in of_kind(render(file=file), "Role", "ClusterRole"):
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]], key(role)
            assert "secrets" not in rule["resources"], key(role)


def test_the_whole_cluster_is_read_only_if_asked_for() -> None:
    """Kubernetes gives the right to review tokens by a ClusterRole only, and nodes belong to no namespace."""
    reviews = {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]}
    [role] = of_kind(render(*MINIMAL), "ClusterRole")
    assert role["rules"] == [reviews]
    found = {role["metadata"]["name"]: role["rules"] for role in of_kind(render(file=TENANTS), "ClusterRole")}
    nodes = {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "watch"]}
    pages = {"system-ours-ui-nodes": [{**nodes, "verbs": ["list"]}]}
    assert found == {"system-ours-plugin-reviews": [reviews], "system-ours-plugin-nodes": [nodes]} | pages
    wide = {role["metadata"]["name"] for role in of_kind(render(file=AGENT), "ClusterRole")}
    assert wide == {"system-ours-plugin-workflows", "system-ours-controller-workflows"}


def test_lost_nodes_are_detected_by_two_rights_that_can_be_withdrawn() -> None:
    with_rights, without = (set(rights(render(*MINIMAL, f"nodes.detectLoss={switch}"))) for switch in ("true", "false"))
    assert with_rights - without == {
        ("plugin", "kube-node-lease", "leases.coordination.k8s.io", "list"),
        ("plugin", "workflows", "pods/status", "patch"),
    }


def test_the_guide_lists_every_right() -> None:
    expected = with_table(GUIDE.read_text())
    if os.environ.get("TIPHYS_GOLDEN") == "1":
        GUIDE.write_text(expected)
    assert GUIDE.read_text() == expected, "if this is meant, run `make golden` and read the diff"


def test_in_agent_mode_no_tokens_are_reviewed_and_no_sidecar_is_installed() -> None:
    objects = render(*MINIMAL, "mode=agent")
    assert not of_kind(objects, "ClusterRole")
    kinds = ("ConfigMap", "ServiceAccount")
    assert not [one for one in of_kind(objects, *kinds) if "executor-plugin" in one["metadata"]["name"]]
    assert {one["metadata"]["name"] for one in of_kind(objects, "Service")} == {"ours-pods", "tiphys-members"}


@pytest.mark.parametrize("namespace", ["team-a", "team-b"])
def test_a_workflow_namespace_has_what_argo_needs(namespace: str) -> None:
    objects = render(file=TENANTS)
    names = {(kind, name) for kind, where, name in map(key, objects) if where == namespace}
    assert names >= {
        ("ConfigMap", "tiphys-executor-plugin"),
        ("ServiceAccount", "tiphys-executor-plugin"),
        ("Secret", "tiphys-executor-plugin.service-account-token"),
        ("ServiceAccount", "tiphys-workflow"),
        ("Secret", "tiphys-workflow.service-account-token"),
        ("Role", "tiphys-workflow"),
        ("RoleBinding", "tiphys-workflow"),
        ("ServiceAccount", "tiphys-executor"),
        ("Secret", "tiphys-executor.service-account-token"),
        ("Role", "tiphys-executor"),
        ("RoleBinding", "tiphys-executor"),
        ("Service", "tiphys-members"),
    }


def test_without_namespaces_that_of_the_release_is_the_only_one() -> None:
    assert {key(one)[1] for one in render(*MINIMAL)} == {"system", "", "kube-node-lease"}


def test_the_sidecar_is_what_argo_demands() -> None:
    """Without these fields Argo creates no agent pod (``pkg/plugins/spec``), and no step reports why."""
    configuration = named(render(file=TENANTS), "ConfigMap", "tiphys-executor-plugin", "team-a")
    assert configuration["metadata"]["labels"]["workflows.argoproj.io/configmap-type"] == "ExecutorPlugin"
    assert set(configuration["data"]) == {"sidecar.automountServiceAccountToken", "sidecar.container"}
    assert configuration["data"]["sidecar.automountServiceAccountToken"] == "true"
    container = yaml.safe_load(configuration["data"]["sidecar.container"])
    assert container["ports"]
    assert container["resources"].keys() == {"requests", "limits"}
    assert "runAsUser" not in container["securityContext"], "Argo's token is readable by Argo's user only"


def test_the_sidecar_calls_the_service_by_its_name_and_port() -> None:
    objects = render(file=TENANTS)
    service = named(objects, "Service", "ours-plugin")
    assert _sidecar_env(objects)["TIPHYS_SERVICE_URL"] == f"https://ours-plugin.system.svc:{_port(service)}"
    assert _sidecar_env(render(*MINIMAL))["TIPHYS_SERVICE_URL"] == f"http://ours-plugin.system.svc:{_port(service)}"


def test_sidecar_and_service_agree_on_the_audience_of_tokens() -> None:
    objects = render(*MINIMAL, "sidecar.tokenAudience=mine")
    assert _sidecar_env(objects)["TIPHYS_TOKEN_AUDIENCE"] == "mine"
    assert "--token-audience=mine" in _arguments(objects, "plugin")
    without = render(*MINIMAL, "sidecar.tokenAudience=")
    assert "TIPHYS_TOKEN_AUDIENCE" not in _sidecar_env(without)
    assert not [one for one in _arguments(without, "plugin") if "audience" in one]
    assert not [one for one in of_kind(without, "Role") if one["metadata"]["name"] == "tiphys-executor-plugin"]
    assert not [one for one in _arguments(render(*MINIMAL, "mode=agent"), "plugin") if "audience" in one]


def test_sidecar_gets_the_authority_of_the_service() -> None:
    """Argo gives it no volume, so as a variable."""
    [given] = [one for one in _sidecar(render(file=TENANTS))["env"] if one["name"] == "TIPHYS_SERVICE_CA"]
    assert given["valueFrom"] == {"configMapKeyRef": {"name": "internal-ca", "key": "ca.crt"}}
    pem = "-----BEGIN CERTIFICATE-----"
    assert _sidecar_env(render(*MINIMAL, "tls.secret=own", f"tls.ca={pem}"))["TIPHYS_SERVICE_CA"] == pem
    assert "TIPHYS_SERVICE_CA" not in _sidecar_env(render(*MINIMAL, "tls.secret=own"))


@pytest.mark.parametrize("mode", ["sidecar", "agent"])
def test_tls_is_the_same_for_services_probes_and_scrapers(mode: str) -> None:
    objects = render(*MINIMAL, f"mode={mode}", "tls.secret=own", "serviceMonitor.enabled=true")
    for component in ("plugin", "controller"):
        files = {"--tls-cert=/etc/tiphys/tls/tls.crt", "--tls-key=/etc/tiphys/tls/tls.key"}
        assert files <= set(_arguments(objects, component))
        spec = named(objects, "Deployment", f"ours-{component}")["spec"]["template"]["spec"]
        [volume] = [one for one in spec["volumes"] if one["name"] == "certificate"]
        assert volume["secret"]["secretName"] == "own"
        [container] = spec["containers"]
        assert "/etc/tiphys/tls" in [mount["mountPath"] for mount in container["volumeMounts"]]
        for probe in ("livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    [endpoint] = named(objects, "ServiceMonitor", "ours")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["serverName"] == "ours-pods.system.svc"
    assert named(objects, "Pod", "ours-test")["spec"]["containers"][0]["args"][-1] == "https"
    assert not of_kind(objects, "Certificate")


def test_certificate_of_an_issuer_names_every_service() -> None:
    objects = render(file=TENANTS)
    certificate = named(objects, "Certificate", "ours")["spec"]
    assert certificate["issuerRef"] == {"name": "internal", "kind": "ClusterIssuer"}
    services = {
        f"{one['metadata']['name']}.system.svc" for one in of_kind(objects, "Service") if key(one)[1] == "system"
    }
    plain = {"ours-ui-team-a.system.svc", "ours-ui-team-b.system.svc"}  # the proxy before them speaks TLS
    assert services - plain == set(certificate["dnsNames"])
    volumes = named(objects, "Deployment", "ours-plugin")["spec"]["template"]["spec"]["volumes"]
    assert certificate["secretName"] in [volume.get("secret", {}).get("secretName") for volume in volumes]


def test_without_a_certificate_nothing_speaks_of_tls() -> None:
    text = json.dumps([one for one in render(*MINIMAL) if one["kind"] in ("Deployment", "ConfigMap")])
    assert "https" not in text.lower().replace("https_proxy", "")
    assert "tls" not in text


@FORMS
def test_services_select_the_pods_that_they_are_for(file: Path) -> None:
    objects = render(file=file)
    pods = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"] for one in of_kind(objects, "Deployment")
    }
    pods["ours-test"] = named(objects, "Pod", "ours-test")["metadata"]["labels"]
    chosen = {
        one["metadata"]["name"]: {
            pod for pod, labels in pods.items() if one["spec"]["selector"].items() <= labels.items()
        }
        for one in of_kind(objects, "Service")
    }
    assert chosen.pop("ours-pods") == {"ours-plugin", "ours-controller"}
    assert chosen.pop("tiphys-members") == set(), "these are the pods of workflows"
    assert all(chosen[name] == {name} for name in chosen)
    assert set(chosen) <= {"ours-plugin", "ours-controller", "ours-ui-team-a", "ours-ui-team-b"}


def test_members_of_a_gang_have_host_names_before_they_are_ready() -> None:
    service = named(render(*MINIMAL), "Service", GANG_SERVICE, "system")["spec"]
    assert service == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {MEMBER_LABEL: "true"},
    }


def test_selectors_never_change_between_versions() -> None:
    """A Deployment's selector cannot be changed: an upgrade would fail."""
    for component in ("plugin", "controller"):
        deployment = named(render(file=TENANTS), "Deployment", f"ours-{component}")
        assert deployment["spec"]["selector"]["matchLabels"] == {
            "app.kubernetes.io/name": "tiphys",
            "app.kubernetes.io/instance": "ours",
            "app.kubernetes.io/component": component,
        }


def test_an_update_leaves_no_gap() -> None:
    deployment = named(render(file=TENANTS), "Deployment", "ours-plugin")
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    pod = deployment["spec"]["template"]["spec"]
    pause = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pause > 0, "calls arrive until every node has heard that the pod ends"
    assert pod["terminationGracePeriodSeconds"] > pause + http_server._DRAIN_SECONDS


@pytest.mark.parametrize("change", ["store.url=s3://other/x", "image.tag=v2", "plugin.env[0].name=A", "namespaces={x}"])
def test_a_change_of_settings_starts_new_pods(change: str) -> None:
    before, after = (named(render(*MINIMAL, *more), "Deployment", "ours-plugin") for more in ((), (change,)))
    assert before["spec"]["template"] != after["spec"]["template"]


@pytest.mark.parametrize(
    ("values", "secret"), [((), "tiphys-control"), (("store.controlSecret=from-vault",), "from-vault")]
)
def test_the_services_have_a_secret_of_their_own_that_may_be_missing(values: tuple[str, ...], secret: str) -> None:
    """With workload identity there is none."""
    for name in ("ours-plugin", "ours-controller"):
        container = named(render(*MINIMAL, *values), "Deployment", name)["spec"]["template"]["spec"]["containers"][0]
        assert container["envFrom"] == [{"secretRef": {"name": secret, "optional": True}}]


def test_the_services_cannot_have_the_secret_of_training_programs() -> None:
    with pytest.raises(Refused, match="controlSecret"):
        render(*MINIMAL, f"store.controlSecret={STORE_SECRET}")


def test_pod_settings_of_the_values_reach_the_deployment() -> None:
    template = named(render(file=TENANTS), "Deployment", "ours-plugin")["spec"]["template"]
    spec, wanted = template["spec"], yaml.safe_load(TENANTS.read_text())["plugin"]
    for field in ("nodeSelector", "affinity", "priorityClassName"):
        assert spec[field] == wanted[field]
    assert spec["tolerations"][: len(wanted["tolerations"])] == wanted["tolerations"]
    assert template["metadata"]["annotations"] == wanted["podAnnotations"]
    assert template["metadata"]["labels"].items() >= wanted["podLabels"].items()
    assert spec["containers"][0]["env"][-1] == wanted["env"][0]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["containers"][0]["image"].startswith("registry.example.com:5000/tiphys@sha256:0123")
    assert spec["containers"][0]["imagePullPolicy"] == "Always"


@pytest.mark.parametrize(
    ("own", "added"),
    [
        ({}, ["not-ready", "unreachable"]),
        ({"key": "spot", "operator": "Exists"}, ["not-ready", "unreachable"]),
        ({"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 900}, ["not-ready"]),
        ({"operator": "Exists"}, []),
    ],
)
@pytest.mark.parametrize("name", ["plugin", "controller"])
def test_pods_leave_a_lost_node_after_half_a_minute_unless_the_values_say_otherwise(
    name: str, own: dict[str, str], added: list[str]
) -> None:
    values = [f"{name}.tolerations[0].{field}={value}" for field, value in own.items()]
    found = named(render(*MINIMAL, *values), "Deployment", f"ours-{name}")["spec"]["template"]["spec"]["tolerations"]
    wanted = [
        {"key": f"node.kubernetes.io/{condition}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
        for condition in added
    ]
    assert found == [*([own] if own else []), *wanted]


def test_a_label_of_a_user_cannot_replace_one_that_is_selected_by() -> None:
    labels = {"app.kubernetes.io/component": "mine", "tiphys.dev/pods": "mine"}
    values = [f"plugin.podLabels.{name.replace('.', chr(92) + '.')}={value}" for name, value in labels.items()]
    deployment = named(render(*MINIMAL, *values), "Deployment", "ours-plugin")
    found = deployment["spec"]["template"]["metadata"]["labels"]
    assert found.items() >= deployment["spec"]["selector"]["matchLabels"].items()
    assert found["tiphys.dev/pods"] == "ours"


@pytest.mark.parametrize(("replicas", "budgets"), [(1, 0), (2, 1)])
def test_a_single_pod_has_no_budget_that_would_block_drains(replicas: int, budgets: int) -> None:
    objects = render(*MINIMAL, f"plugin.replicas={replicas}")
    assert len(of_kind(objects, "PodDisruptionBudget")) == budgets


def controller_pod(objects: Sequence[Object]) -> Any:
    return named(objects, "Deployment", "ours-controller")["spec"]["template"]


def test_runs_go_on_by_themselves_unless_that_is_switched_off() -> None:
    def said(*values: str) -> list[str]:
        arguments = controller_pod(render(*MINIMAL, *values))["spec"]["containers"][0]["args"]
        return [one for one in arguments if one.startswith(("--auto-resume", "--resumes", "--absent"))]

    assert said() == ["--auto-resume=on", "--resumes-per-minute=10", "--absent-seconds=60"]
    assert said("autoResume.dryRun=true", "autoResume.perMinute=2")[:2] == [
        "--auto-resume=dry-run",
        "--resumes-per-minute=2",
    ]
    assert said("autoResume.enabled=false")[0] == "--auto-resume=off"


@pytest.mark.parametrize(
    ("values", "may"),
    [((), True), (("autoResume.enabled=false",), False), (("autoResume.enabled=false", "api.tokenSecret=t"), True)],
)
def test_the_controller_may_make_workflows_only_where_something_has_it_do_so(
    values: tuple[str, ...], may: bool
) -> None:
    rules = named(render(*MINIMAL, *values), "Role", "ours-controller-workflows")["rules"]
    verbs = {verb for rule in rules if "workflows" in rule["resources"] for verb in rule["verbs"]}
    assert ("create" in verbs) is ("get" in verbs) is may


def test_triggers_are_off_until_the_administrator_says_where_they_may_look() -> None:
    for values, on in (((), False), (("triggers.sources={s3://raw}", "autoResume.enabled=false"), True)):
        objects = render(*MINIMAL, *values)
        rules = named(objects, "Role", "ours-controller-workflows")["rules"]
        rights_of = {resource: set(rule["verbs"]) for rule in rules for resource in rule["resources"]}
        assert rights_of.get("workflowtemplates") == ({"get", "list"} if on else None)
        assert {"get", "create"} <= {
            verb for rule in rules if "workflows" in rule["resources"] for verb in rule["verbs"]
        }
        [container] = controller_pod(objects)["spec"]["containers"]
        given = [one for one in container["args"] if one.startswith("--trigger")]
        expected = ["--trigger-source=s3://raw", "--trigger-interval-seconds=60", "--triggered-runs-per-minute=60"]
        assert given == (expected if on else [])
    with pytest.raises(Refused, match="sources"):
        render(*MINIMAL, "triggers.sources={raw}")


def test_token_and_rules_for_alerts_are_files_and_new_rules_make_new_pods() -> None:
    objects = render(file=TENANTS)
    [container] = controller_pod(objects)["spec"]["containers"]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in controller_pod(objects)["spec"]["volumes"]}
    assert volumes["api-token"]["secret"]["secretName"] == "tiphys-api"
    for name, file in (("api-token", "--token-file"), ("alert-rules", "--alert-rules")):
        assert any(one.startswith(f"{file}={mounts[name]}/") for one in container["args"])
    rules = json.loads(named(objects, "ConfigMap", "ours-alert-rules")["data"]["rules.json"])
    assert rules == {"*": "notify", "TrainingStalled": "save-and-restart"}
    given = (*MINIMAL, "api.tokenSecret=t")
    before, after = (controller_pod(render(*given, *more)) for more in ((), ("alerts.rules.A=resume",)))
    assert before["metadata"]["annotations"] != after["metadata"]["annotations"]
    assert not of_kind(render(*MINIMAL), "ConfigMap")[0]["metadata"]["name"].endswith("alert-rules")


@pytest.mark.parametrize("api", [(), ("api.tokenSecret=t",)], ids=["alone", "beside the API"])
def test_senders_of_storage_events_have_a_token_of_their_own(api: tuple[str, ...]) -> None:
    objects = render(*MINIMAL, "triggers.sources={s3://raw}", "triggers.tokenSecret=senders", *api)
    [container] = controller_pod(objects)["spec"]["containers"]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in controller_pod(objects)["spec"]["volumes"]}
    assert volumes["storage-events-token"]["secret"]["secretName"] == "senders"
    [file] = [one for one in container["args"] if one.startswith("--storage-events-token-file=")]
    assert file == f"--storage-events-token-file={mounts['storage-events-token']}/token"
    assert any(one.startswith("--token-file=") for one in container["args"]) is bool(api)
    assert named(objects, "Service", "ours-controller")["spec"]["ports"][0]["port"] == 7243
    without = controller_pod(render(*MINIMAL, *api))["spec"]["containers"][0]["args"]
    assert not [one for one in without if "storage-events" in one]


def test_network_policies_admit_only_the_callers_of_a_component() -> None:
    objects = render(file=TENANTS)
    plugin, controller = (named(objects, "NetworkPolicy", f"ours-{name}")["spec"] for name in ("plugin", "controller"))
    test, agents, scrapers = plugin["ingress"][0]["from"]
    assert test["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "test"
    assert agents["podSelector"]["matchLabels"] == {"workflows.argoproj.io/component": "agent"}
    assert agents["namespaceSelector"]["matchExpressions"][0]["values"] == ["team-a", "team-b"]
    assert scrapers["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}
    callers = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "alertmanager"}}}
    assert controller["ingress"][0]["from"] == [test, scrapers, callers]
    for policy in (plugin, controller):
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert policy["egress"][1]["to"] == [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    assert "egress" not in named(render(*MINIMAL), "NetworkPolicy", "ours-plugin")["spec"]
    assert len(named(render(*MINIMAL, "mode=agent"), "NetworkPolicy", "ours-plugin")["spec"]["ingress"][0]["from"]) == 2


@FORMS
def test_every_pod_of_tiphys_has_a_network_policy(file: Path) -> None:
    objects = render(file=file)
    chosen = [one["spec"]["podSelector"]["matchLabels"].items() for one in of_kind(objects, "NetworkPolicy")]
    for one in of_kind(objects, "Deployment"):
        labels = one["spec"]["template"]["metadata"]["labels"].items()
        assert len([labels for selector in chosen if selector <= labels]) == 1, one["metadata"]["name"]


def test_pods_of_a_gang_are_reached_by_each_other_only() -> None:
    """Their rendezvous authenticates nobody. All ports, because NCCL and Gloo choose theirs."""
    for namespace in ("team-a", "team-b"):
        policy = named(render(file=TENANTS), "NetworkPolicy", "tiphys-members", namespace)["spec"]
        members = {"matchLabels": {MEMBER_LABEL: "true"}}
        assert policy["podSelector"] == members
        [rule] = policy["ingress"]
        assert "ports" not in rule
        assert rule["from"][0] == {"podSelector": members}
        assert [list(one) for one in rule["from"][1:]] == [["namespaceSelector"]]
    without = render(*MINIMAL, "networkPolicy.gangs.enabled=false")
    assert len(of_kind(without, "NetworkPolicy")) == 2


def test_optional_objects_of_the_chart_can_be_left_out() -> None:
    kinds = {
        one["kind"] for one in render(*MINIMAL, "networkPolicy.enabled=false", "podDisruptionBudget.enabled=false")
    }
    assert not kinds & {"NetworkPolicy", "PodDisruptionBudget", "ServiceMonitor", "PrometheusRule", "WorkflowTemplate"}


def test_monitoring_finds_what_it_watches() -> None:
    objects = render(file=TENANTS)
    monitor = named(objects, "ServiceMonitor", "ours")
    service = named(objects, "Service", "ours-pods")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    rules = named(objects, "PrometheusRule", "ours")["spec"]["groups"][0]["rules"]
    for rule in rules:
        of_trainings = 'run!=""' in rule["expr"]
        assert of_trainings or 'namespace="system", service="ours-pods"' in rule["expr"], rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
    trainings = named(render("trainingMonitor.enabled=true", file=TENANTS), "PodMonitor", "ours-trainings")["spec"]
    assert trainings["namespaceSelector"]["matchNames"] == ["team-a", "team-b"]
    assert [one["port"] for one in trainings["podMetricsEndpoints"]] == [METRICS_PORT]
    dashboards = named(objects, "ConfigMap", "ours-dashboard")["data"]
    files = {path.name: json.loads(path.read_text()) for path in (CHART / "dashboards").glob("*.json")}
    assert {name: json.loads(text) for name, text in dashboards.items()} == files


@pytest.mark.parametrize("namespace", ["team-a", "team-b"])
def test_workflow_templates_are_made_for_their_namespace(namespace: str) -> None:
    objects = render(file=TENANTS)
    template = named(objects, "WorkflowTemplate", "train", namespace)
    nightly = named(objects, "CronWorkflow", "train-nightly", namespace)
    for spec in (template["spec"], nightly["spec"]["workflowSpec"]):
        assert spec["serviceAccountName"] == "tiphys-workflow"
    for one in (template, nightly):
        stores = set(re.findall(r"s3://ml-runs[^\s\"'`]*", json.dumps(one)))
        assert stores == {f"s3://ml-runs/{namespace}/tiphys"}
        assert one["metadata"]["annotations"][STORE_ANNOTATION] == f"s3://ml-runs/{namespace}/tiphys"


def test_a_workflow_template_is_otherwise_as_it_was_compiled() -> None:
    objects = render(*MINIMAL, "workflows.templates.enabled=true", "workflows.templates.sweep=true")
    for name in ("train", "sweep"):
        installed = named(objects, "WorkflowTemplate", name)
        compiled = yaml.safe_load((ROOT / "templates" / f"{name}.yaml").read_text())
        assert installed["spec"] == {**compiled["spec"], "serviceAccountName": "tiphys-workflow"}


def test_a_workflow_template_starts_the_image_that_was_chosen() -> None:
    objects = render(file=TENANTS)
    template = named(objects, "WorkflowTemplate", "train", "team-a")
    nightly = named(objects, "CronWorkflow", "train-nightly", "team-a")
    for spec in (template["spec"], nightly["spec"]["workflowSpec"]):
        parameters = {one["name"]: one["value"] for one in spec["arguments"]["parameters"]}
        assert parameters["image"] == "registry.example.com/digits:2.0"
        images = {one["container"]["image"] for one in spec["templates"] if "container" in one}
        assert images == {"{{workflow.parameters.image}}"}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (["mode=side"], "at '/mode': value must be one of 'sidecar', 'agent'"),
        (["plugin.replica=3"], "at '/plugin': additional properties 'replica' not allowed"),
        (["plugin.replicas=-1"], "at '/plugin/replicas'"),
        (["netwrokPolicy.enabled=true"], "additional properties 'netwrokPolicy' not allowed"),
        (["store.url=hdfs://ml/tiphys"], "at '/store/url'"),
        (["store.url=/data"], "at '/store/url'"),
        (["image.repository=a/b:latest"], "at '/image/repository'"),
        (["image.digest=0123"], "at '/image/digest'"),
        (["namespaces={Team_A}"], "at '/namespaces/0'"),
        (["sidecar.resources.limits=null"], "at '/sidecar/resources': missing property 'limits'"),
        (["store.url="], "store.url is not set: give the URL"),
        (["image.repository="], "image.repository is not set: give the image"),
        (
            ["namespaces={a,b}"],
            "with namespaces a, b it must hold {namespace}, such as s3://ml-runs/{namespace}/tiphys",
        ),
        (["clusterWide=true"], "with clusterWide: true it must hold {namespace}"),
        (["ledger.kind=slurm"], "at '/ledger/kind'"),
    ],
    ids=lambda value: value if isinstance(value, str) and "=" in value else None,
)
def test_wrong_values_are_refused_with_the_field_and_the_remedy(values: list[str], sentence: str) -> None:
    with pytest.raises(Refused) as refused:
        render(*MINIMAL, *values)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("url", ["gs://ml-runs/{namespace}/tiphys", "az://account/runs/tiphys"])
def test_a_store_in_another_cloud_reaches_every_process(url: str) -> None:
    objects = render("image.repository=registry.example.com/tiphys", "namespaces={ml}", f"store.url={url}")
    for component in ("plugin", "controller"):
        assert f"--store={url}" in _arguments(objects, component)


def test_kueue_takes_the_place_of_the_ledger_in_arguments_and_rights() -> None:
    ours, kueue = (render(*MINIMAL, f"ledger.kind={kind}") for kind in ("tiphys", "kueue"))
    assert "--ledger-kind=kueue" in _arguments(kueue, "plugin")
    assert not [one for one in _arguments(ours, "plugin") if "ledger-kind" in one]
    gained = {right for right in set(rights(kueue)) - set(rights(ours)) if right.account == "plugin"}
    assert {(right.where, right.resource, right.verbs) for right in gained} == {
        ("workflows", "workloads.kueue.x-k8s.io", "get, list, create, patch, delete"),
        ("workflows", "workloads.kueue.x-k8s.io/status", "update"),
        ("workflows", "localqueues.kueue.x-k8s.io", "get, list"),
        ("workflows", "localqueues.visibility.kueue.x-k8s.io/pendingworkloads", "get"),
        ("cluster", "resourceflavors.kueue.x-k8s.io", "get, list"),
    }
    assert not [right for right in rights(kueue) if right.account == "plugin" and "gpuledgers" in right.resource]


def test_the_pages_of_a_namespace_only_read_its_own_store() -> None:
    objects = render(file=TENANTS)
    for namespace in ("team-a", "team-b"):
        name = f"ours-ui-{namespace}"
        template = named(objects, "Deployment", name)["spec"]["template"]
        (container,) = template["spec"]["containers"]
        arguments = [
            f"s3://ml-runs/{namespace}/tiphys",
            "--host=0.0.0.0",
            "--port=8321",
            *(f"--allow-host={name}{end}" for end in ("", ".system", ".system.svc", ".system.svc.cluster.local")),
            "--allow-host=runs.example.com",
            "--cluster",
            "--namespace=system",
        ]
        assert container["args"] == ["hera_pipelines.cli", "ui", *arguments]
        assert container["envFrom"] == [{"secretRef": {"name": "pages", "optional": True}}]
        selector = named(objects, "Service", name)["spec"]["selector"]
        assert selector.items() <= template["metadata"]["labels"].items()
        assert selector["tiphys.dev/shows"] == namespace
    assert {right.verbs for right in rights(objects) if right.account == "ui"} <= {"get", "list", "get, list"}


def test_pages_answer_to_the_names_that_the_chart_knows_and_probes_use_one_of_them() -> None:
    names = ("ui.url=https://runs.example.org:8443/tiphys", "ui.allowedHosts={ml.internal}")
    pod = named(render(*MINIMAL, "ui.enabled=true", *names), "Deployment", "ours-ui-system")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    allowed = {word.removeprefix("--allow-host=") for word in container["args"] if word.startswith("--allow-host=")}
    assert {"ours-ui-system", "ours-ui-system.system.svc", "runs.example.org", "ml.internal"} <= allowed
    assert "*" not in allowed
    for probe in ("livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["httpHeaders"] == [{"name": "Host", "value": "localhost"}]


def test_pages_are_reachable_from_the_named_proxy_only() -> None:
    given = named(render(file=TENANTS), "NetworkPolicy", "ours-ui")["spec"]
    proxy = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "oauth2-proxy"}}}
    assert [rule["from"] for rule in given["ingress"]] == [[proxy]]
    alone = named(render(*MINIMAL, "ui.enabled=true"), "NetworkPolicy", "ours-ui")["spec"]
    assert (alone["policyTypes"], alone["ingress"]) == (["Ingress"], [])


def test_pages_of_the_store_alone_have_no_right_and_no_token() -> None:
    objects = render(*MINIMAL, "ui.enabled=true", "ui.cluster=false", "nodes.observe=true")
    pod = named(objects, "Deployment", "ours-ui-system")["spec"]["template"]["spec"]
    assert not pod["automountServiceAccountToken"]
    assert "--cluster" not in pod["containers"][0]["args"]
    assert not [right for right in rights(objects) if right.account == "ui"]
    assert not [one for one in render(*MINIMAL) if one["metadata"]["name"].startswith("ours-ui")]


def test_the_notes_begin_with_what_costs_most_time() -> None:
    notes = _notes("--values", SIDECAR)
    assert notes.startswith("First of all: set DEFAULT_REQUEUE_TIME=1s")
    assert "tiphys doctor --cluster -n system" in notes
    assert "ARGO_EXECUTOR_PLUGINS=true" in notes
    assert "argo submit -n system" in notes


def test_the_notes_say_how_argo_links_to_the_pages_of_a_run() -> None:
    assert "workflow-controller-configmap has" not in _notes("--values", SIDECAR)
    notes = _notes("--values", SIDECAR, "--set", "ui.url=https://tiphys.example.com/")
    links = yaml.safe_load(notes.partition("links: |\n")[2].partition("\n\n")[0])
    assert links == [
        {"name": "Tiphys", "scope": "workflow", "url": "https://tiphys.example.com/workflows/${metadata.name}"}
    ]


def test_the_notes_of_agent_mode_say_what_it_means_for_others() -> None:
    notes = _notes("--values", AGENT)
    assert "disableAgentPodCreation" in notes
    assert "HTTP templates stay Pending" in notes
    assert "ARGO_EXECUTOR_PLUGINS" not in notes


@pytest.mark.parametrize("file", EARLIER_VALUES, ids=lambda file: file.stem)
def test_values_of_an_earlier_version_still_install(file: Path) -> None:
    assert of_kind(render(file=file), "Deployment")


def test_the_chart_has_stored_values_of_its_own_version() -> None:
    """Whoever raises the version leaves the values of the one before."""
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    assert f"values-{version}" in {file.stem for file in EARLIER_VALUES}


def _notes(*arguments: str | Path) -> str:
    text = helm("install", "ours", CHART, "--namespace", "system", "--dry-run=client", *arguments)
    return text.partition("NOTES:\n")[2]


def _sidecar_env(objects: Sequence[Object]) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in _sidecar(objects)["env"]}


def _arguments(objects: Sequence[Object], component: str) -> list[str]:
    spec = named(objects, "Deployment", f"ours-{component}")["spec"]["template"]["spec"]
    arguments: list[str] = spec["containers"][0]["args"]
    return arguments


def _port(service: Object) -> int:
    return int(service["spec"]["ports"][0]["port"])


def _sidecar(objects: Sequence[Object]) -> Any:
    return dict(pod_specs(objects))["sidecar"]["containers"][0]
