"""A training hangs, and nobody is there: Prometheus notices, Alertmanager says so, the controller resumes it.

All parts are real but Argo, in whose place the local engine runs the Workflows: Debian's Prometheus and Alertmanager,
the rules as the chart renders them, the controller as a process, plugin, programs and store.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hera.workflows import DAG
from support.checks.chart import CI_VALUES, named, render
from support.fakes.argo_controller import ArgoStandIn
from support.processes.controller import ControllerProcess, kubeconfig
from support.processes.polling import until
from support.servers.kube_server import serving
from support.servers.ports import free_ports
from tiphys_controller import start_run
from tiphys_controller.kubernetes import KubernetesSubmitter

from hera_pipelines import Checkpoints, Pipeline, Train
from tiphys.kube import identify_cluster
from tiphys.lineage.run_history import RunHistory
from tiphys.records import AlertRecord, AttemptEndOutcome
from tiphys.store import DirectoryStore, read_submissions

PROMETHEUS, ALERTMANAGER = shutil.which("prometheus"), shutil.which("prometheus-alertmanager")
TENANTS = next(file for file in CI_VALUES if file.stem == "tenants-values")
RUN, TOKEN = "digits-1", "a-secret-token"
PROGRAM = """
import pathlib, time
from tiphys.checkpoint import session

state = {"step": 0}
with session(total_steps=12) as training:
    restored = training.restore()
    state = restored or state
    while state["step"] < 12:
        state["step"] += 1
        training.step(state["step"], state)
        if state["step"] == 8 and restored is None:
            time.sleep(3600)
"""
PATIENCE = 600.0

pytestmark = pytest.mark.skipif(
    not (PROMETHEUS and ALERTMANAGER),
    reason="the Debian packages prometheus and prometheus-alertmanager are not installed",
)


@contextmanager
def process(folder: Path, *command: object) -> Iterator[None]:
    """A process, whose output is in a file beside its data."""
    with (folder / f"{Path(str(command[0])).name}.log").open("wb") as log:
        started = subprocess.Popen([*map(str, command)], cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            started.kill()
            started.wait()


def pipeline(port: int) -> dict[str, Any]:
    saves = Checkpoints(every="5 steps", metrics=f"port:127.0.0.1:{port}")
    with Pipeline("digits", store="s3://ml-runs/tiphys", entrypoint="main") as made:
        fit = Train(name="fit", image="fit:1", command=["python", "train.py"], checkpoints=saves, grace="2s")
        with DAG(name="main"):
            fit()
    manifest: dict[str, Any] = made.to_dict()
    return manifest


def prometheus_configuration(target: int, alertmanager: int) -> dict[str, Any]:
    """What the PodMonitor of the chart gives the series of a training: namespace, run and step.

    A program has five seconds to answer: without an answer the alert would end, and begin again.
    """
    labels = {"namespace": "ml", "run": RUN, "step": "fit"}
    return {
        "global": {"scrape_interval": "5s", "scrape_timeout": "5s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {"job_name": "trainings", "static_configs": [{"targets": [f"127.0.0.1:{target}"], "labels": labels}]}
        ],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]},
    }


def alertmanager_configuration(webhook: str) -> dict[str, Any]:
    """As docs/auto-resume.md says, without its waits."""
    receiver = {"url": webhook, "http_config": {"authorization": {"credentials": TOKEN}}}
    route = {"receiver": "tiphys", "group_by": ["alertname", "run"], "group_wait": "0s", "group_interval": "1s"}
    return {"route": route, "receivers": [{"name": "tiphys", "webhook_configs": [receiver]}]}


def test_a_training_that_hangs_goes_on_by_itself(tmp_path: Path) -> None:
    metrics, prometheus, alertmanager = free_ports(3)
    rules = named(render("prometheusRule.stalledMinutes=1", file=TENANTS), "PrometheusRule", "ours")["spec"]
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(prometheus_configuration(metrics, alertmanager)))
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "alerts.json").write_text('{"TiphysTrainingStalled": "save-and-restart", "*": "notify"}')
    store = DirectoryStore(tmp_path / "store")
    with ExitStack() as parts:
        server = parts.enter_context(serving())
        api = server.api("ml")
        server.add_namespace("tiphys")
        parts.enter_context(ArgoStandIn(server, "ml", store, tmp_path))
        given = [f"--store={tmp_path / 'store'}", "--namespace=ml", "--auto-resume=on"]
        given += [f"--token-file={tmp_path / 'token'}", f"--alert-rules={tmp_path / 'alerts.json'}"]
        environment = {"KUBECONFIG": str(kubeconfig(server, tmp_path)), "POD_NAME": "controller-1"}
        controller = parts.enter_context(ControllerProcess(given, environment))
        (tmp_path / "alertmanager.yaml").write_text(
            yaml.safe_dump(alertmanager_configuration(f"{controller.url}/v1/alerts"))
        )
        listening = f"--web.listen-address=127.0.0.1:{alertmanager}"
        parts.enter_context(
            process(
                tmp_path,
                ALERTMANAGER,
                listening,
                "--config.file=alertmanager.yaml",
                "--storage.path=alertmanager",
                "--cluster.listen-address=",
            )
        )
        listening = f"--web.listen-address=127.0.0.1:{prometheus}"
        parts.enter_context(
            process(tmp_path, PROMETHEUS, listening, "--config.file=prometheus.yaml", "--storage.tsdb.path=prometheus")
        )
        start_run(store, KubernetesSubmitter(api, identify_cluster(api)), pipeline(metrics), RUN, namespace="ml")

        def ended() -> bool:
            submissions = read_submissions(store, RUN)
            return len(submissions) > 1 and submissions[-1].end is not None

        until(ended, PATIENCE)

    fired = [
        AlertRecord.model_validate_json(store.read(one.key))
        for one in store.list("control/alerts/")
        if "firing" in one.key
    ]
    assert [one.name for one in fired] == ["TiphysTrainingStalled"]
    _, second = read_submissions(store, RUN)
    assert second.end is not None
    assert second.end.status == "Succeeded"
    hung, resumed = RunHistory(store, RUN).attempts["fit"]
    assert (hung.claim.submission, resumed.claim.submission) == (1, 2)
    assert resumed.end is not None
    assert resumed.end.outcome is AttemptEndOutcome.DONE
    assert resumed.claim.starts_from is not None
    assert resumed.claim.starts_from.global_step == 5, "nothing that was saved is trained again"
