"""Resuming one run from inside of a Workflow: what it says, and with which exit code it ends."""

from pathlib import Path

import pytest
import yaml
from support.builders.compiled_workflows import gated, pipeline_of
from support.servers.kube_server import KubeServer
from tiphys_controller import start_run
from tiphys_controller.kubernetes import KubernetesSubmitter
from tiphys_controller.kubernetes.resume_once import main

from tiphys.kube import KubeApi, identify_cluster
from tiphys.kube.resources import WORKFLOWS
from tiphys.store import Store

RUN = "digits-1"
ACCOUNT = Path(__file__).parents[4] / "templates" / "events" / "account.yaml"


def test_a_run_is_resumed_once_for_each_key(
    server: KubeServer, api: KubeApi, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    start_run(store, KubernetesSubmitter(api, identify_cluster(api)), pipeline_of(gated("fit")), RUN, namespace="ml")

    def resumed(key: str) -> int:
        return main([RUN, "--store=s3://ml-runs", f"--key={key}"], lambda: api, lambda _: store)

    assert resumed("a") == 4, "it runs"
    api.patch(WORKFLOWS, "ml", RUN, {"status": {"phase": "Failed"}})
    assert [resumed("a"), resumed("a")] == [0, 0]
    assert len(server.objects("workflows")) == 2
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["submission 2 of run digits-1 is Workflow digits-1-2"] * 2
    assert "is still running" in printed.err


def test_a_run_that_is_not_there_is_named(api: KubeApi, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nobody", "--store=s3://ml-runs"], lambda: api, lambda _: store) == 3
    assert "no run 'nobody'" in capsys.readouterr().err


def test_the_account_that_is_given_may_do_what_a_resume_asks_for(
    server: KubeServer, api: KubeApi, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing else: Argo's own containers have an account of their own."""
    start_run(store, KubernetesSubmitter(api, identify_cluster(api)), pipeline_of(gated("fit")), RUN, namespace="ml")
    api.patch(WORKFLOWS, "ml", RUN, {"status": {"phase": "Failed"}})
    server.requests.clear()
    assert main([RUN, "--store=s3://ml-runs"], lambda: api, lambda _: store) == 0, capsys.readouterr().err
    roles = [one for one in yaml.safe_load_all(ACCOUNT.read_text()) if one["kind"] == "Role"]
    rules = [rule for role in roles for rule in role["rules"]]
    allowed = {(verb, plural) for rule in rules for plural in rule["resources"] for verb in rule["verbs"]}
    asked = {(request.verb, request.plural) for request in server.requests}
    assert asked == allowed
