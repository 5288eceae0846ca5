"""`tiphys preflight` on a real API server: access modes, Secrets and rights are told as they are.

| there | said |
|---|---|
| no claim; one that is ReadWriteOnce, mounted by a fan-out | a problem; a warning |
| a Secret | exists, for an account that may get it; not checked for one that may not |
| an account without rights, with them | may not; may |
| a caller who may not create Workflows | said, by the review of its own rights |
"""

from pathlib import Path

import pytest
from cluster.client import Cluster
from cluster.rights import grant, new_account
from support.builders.authored_workflows import plain, step, task
from support.builders.preflights import states, subject_of
from tiphys_controller.doctor import Finding

from hera_pipelines.cli.author.preflight_observation import BoundedReads, observe_cluster_for_preflight
from hera_pipelines.preflight import PreflightSubject, run_preflight_checks
from tiphys.kube import KubeApi, connect_to_cluster
from tiphys.kube.resources import PERSISTENT_VOLUME_CLAIMS, SECRETS

LIMIT_SECONDS = 600.0
AGENT = [
    {"apiGroups": ["argoproj.io"], "resources": ["workflowtasksets"], "verbs": ["list", "watch"]},
    {"apiGroups": ["argoproj.io"], "resources": ["workflowtasksets/status"], "verbs": ["patch"]},
]
CALLER = [{"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["get"]}]


@pytest.fixture
def subject(api: KubeApi) -> PreflightSubject:
    """A fan-out that mounts a claim and needs a Secret, under an account of its own."""
    container = {
        "image": "load:1",
        "env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "corpus"}}]
    load = plain("load") | {"container": container, "volumes": volumes}
    tasks = [task("load", withItems=[1, 2]), task("prep")]
    return subject_of(load, step(), tasks=tasks, account="own", namespace=api.namespace)


def look(api: KubeApi, subject: PreflightSubject) -> list[Finding]:
    observed = observe_cluster_for_preflight(api, subject, BoundedReads(LIMIT_SECONDS))
    return run_preflight_checks(subject, observed)


def claim(api: KubeApi, mode: str) -> None:
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Mi"}}, "storageClassName": "none"}
    api.create(PERSISTENT_VOLUME_CLAIMS, api.namespace, {"metadata": {"name": "corpus"}, "spec": spec})


def test_claims_secrets_and_rights_are_reported_as_they_are(
    cluster: Cluster, api: KubeApi, subject: PreflightSubject, tmp_path: Path
) -> None:
    grant(cluster, api.namespace, "own", [])
    absent = states(look(api, subject))
    assert {absent[check] for check in ("volumes", "secrets", "rights")} == {"failed"}
    assert absent["submit"] == "ok"
    api.create(SECRETS, api.namespace, {"metadata": {"name": "hub"}, "stringData": {"token": "hidden"}})
    claim(api, "ReadWriteOnce")
    grant(cluster, api.namespace, "own", AGENT)
    cluster.wait("the rights are seen", lambda: states(look(api, subject))["rights"] == "ok")
    found = states(look(api, subject))
    assert (found["volumes"], found["secrets"]) == ("warning", "ok")

    caller = connect_to_cluster(new_account(cluster, api.namespace, "caller", CALLER, tmp_path))
    caller.namespace = api.namespace
    try:
        cluster.wait("the claim may be read", lambda: states(look(caller, subject))["volumes"] == "warning")
        seen = states(look(caller, subject))
    finally:
        caller.close()
    assert (seen["submit"], seen["secrets"], seen["rights"]) == ("failed", "unknown", "unknown")
