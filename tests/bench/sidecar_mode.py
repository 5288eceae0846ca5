"""The same load through the chart's sidecar mode: an agent pod for each workflow, its sidecar, the service."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from bench.latency import Answers
from bench.place import Place
from bench.progress import say
from bench.samples import percentile
from support.builders.admissions import live_workflow, open_task_set
from support.checks.chart import CHART, helm
from support.processes.polling import until

from tiphys.kube import Object
from tiphys.kube.resources import CONFIG_MAPS, PODS, WORKFLOW_TASK_SETS, WORKFLOWS

POD_AGENT = Path(__file__).with_name("pod_agent.py")
PATIENCE = "20m"
LONGEST_SECONDS = 1200.0
SIDECAR = "tiphys"
_LOOK = "import pathlib; print(pathlib.Path('/proc/1/status').read_text(), pathlib.Path('/proc/1/stat').read_text())"


@dataclass(frozen=True)
class Release:
    place: Place
    name: str
    image: str
    install_seconds: float


@contextmanager
def installed(here: Place, image: str, mode: str) -> Iterator[Release]:
    """The chart in the namespace of the benchmark, which is release and workflow namespace in one."""
    credentials: Object = {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "tiphys-control"}}
    here.cluster.apply({**credentials, "stringData": here.store.environment}, namespace=here.namespace)
    repository, _, tag = image.rpartition(":")
    given = {
        "mode": mode,
        "namespaces": [here.namespace],
        "store": {"url": here.store.url},
        "image": {"repository": repository, "tag": tag},
    }
    where = [f"--kubeconfig={here.cluster.kubeconfig}", "--namespace", here.namespace]
    began = time.monotonic()
    settings = ["--set-json", *(",".join(f"{name}={json.dumps(value)}" for name, value in given.items()),)]
    helm("install", "bench", CHART, "--wait", f"--timeout={PATIENCE}", *settings, *where, timeout=3000)
    seconds = round(time.monotonic() - began, 1)
    say(f"installed in {mode} mode in {seconds} s")
    try:
        yield Release(here, "bench", image, seconds)
    finally:
        helm("uninstall", "bench", "--wait", f"--timeout={PATIENCE}", *where, timeout=3000)


def sidecar_mode(release: Release, loads: dict[int, int]) -> dict[str, Any]:
    """Latencies with the agent pod's start in them and after it, and what sidecar and service cost."""
    here = release.place
    here.api.create(
        CONFIG_MAPS, here.namespace, {"metadata": {"name": "pod-agent"}, "data": {"main.py": POD_AGENT.read_text()}}
    )
    result: dict[str, Any] = {"loads": {}}
    result |= {f"{one}_at_rest": _cost(here, _pod_of(here, one), one) for one in ("plugin", "controller")}
    with Answers(here) as answers:
        for count, rounds in loads.items():
            times = [one for number in range(rounds) for one in _round(release, answers, count, number)]
            result["loads"][str(count)] = {
                "rounds": rounds,
                "p50_ms": percentile(times, 50),
                "p99_ms": percentile(times, 99),
                "most_ms": round(max(times), 1),
            }
            say(f"{count} open steps in sidecar mode: {json.dumps(result['loads'][str(count)])}")
        result |= _steady(release, answers)
    return result | {f"{one}_after_load": _cost(here, _pod_of(here, one), one) for one in ("plugin", "controller")}


def _round(release: Release, answers: Answers, count: int, number: int) -> list[float]:
    """A workflow whose steps are all open when its agent pod is made."""
    name = f"sidecar-{count}-{number}"
    began, nodes = _open(release, name, count)
    until(lambda: nodes <= answers.seen_at.keys(), LONGEST_SECONDS)
    assert not answers.failed, answers.failed[0]
    _close(release.place, name)
    return [1000 * (answers.seen_at[node] - began) for node in nodes]


def _steady(release: Release, answers: Answers) -> dict[str, Any]:
    """Steps that open one after the other in a workflow whose agent pod runs; and what its sidecar costs then."""
    here, name, steps = release.place, "sidecar-steady", 30
    _, nodes = _open(release, name, 1, steps)
    until(lambda: nodes <= answers.seen_at.keys(), LONGEST_SECONDS)
    at_rest = _cost(here, f"{name}-agent", SIDECAR)
    times = []
    uid = here.api.get(WORKFLOWS, here.namespace, name) or {}
    tasks = open_task_set(name, here.namespace, uid["metadata"]["uid"], steps)["spec"]["tasks"]
    for node in list(tasks)[1:]:
        began = time.monotonic()
        here.api.patch(WORKFLOW_TASK_SETS, here.namespace, name, {"spec": {"tasks": {node: tasks[node]}}})
        until(lambda node=node: node in answers.seen_at, LONGEST_SECONDS)  # type: ignore[misc]
        times.append(1000 * (answers.seen_at[node] - began))
    after = _cost(here, f"{name}-agent", SIDECAR)
    _close(here, name)
    steady = {"steps": len(times), "p50_ms": percentile(times, 50), "p99_ms": percentile(times, 99)}
    return {"pod_runs_already": steady, "sidecar_at_rest": at_rest, "sidecar_after_load": after}


def _open(release: Release, name: str, count: int, steps: int = 0) -> tuple[float, set[str]]:
    here = release.place
    made = here.api.create(
        WORKFLOWS, here.namespace, live_workflow(name, here.namespace, here.store.url, steps or count)
    )
    uid = made["metadata"]["uid"]
    task_set, pod = open_task_set(name, here.namespace, uid, count), _pod(release, name, uid)
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(here.api.create, PODS, here.namespace, pod)
        here.api.create(WORKFLOW_TASK_SETS, here.namespace, task_set)
    return began, set(task_set["spec"]["tasks"])


def _close(here: Place, name: str) -> None:
    here.api.delete(PODS, here.namespace, f"{name}-agent", grace_seconds=0)
    here.api.delete(WORKFLOW_TASK_SETS, here.namespace, name)
    here.api.delete(WORKFLOWS, here.namespace, name)


def _pod(release: Release, name: str, uid: str) -> Object:
    """The agent pod as Argo makes it: its user, the token for the sidecar, the accounts of sidecar and main."""
    config = release.place.api.get(CONFIG_MAPS, release.place.namespace, "tiphys-executor-plugin") or {}
    sidecar = yaml.safe_load(config["data"]["sidecar.container"])
    plain = {"securityContext": sidecar["securityContext"], "image": release.image}
    token = {"name": "token", "mountPath": "/var/run/argo"}
    account = {"mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": True}
    write = "import secrets; open('/var/run/argo/token', 'w').write(secrets.token_hex(16))"
    environment = [{"name": "ARGO_WORKFLOW_NAME", "value": name}, {"name": "ARGO_WORKFLOW_UID", "value": uid}]
    containers = [
        {**sidecar, "volumeMounts": [token, {"name": "sidecar-account", **account}]},
        {
            **plain,
            "name": "main",
            "command": ["python", "/main/main.py"],
            "env": environment,
            "volumeMounts": [token, {"name": "main-account", **account}, {"name": "main", "mountPath": "/main"}],
        },
    ]
    secrets = {"sidecar-account": "tiphys-executor-plugin", "main-account": "tiphys-workflow"}
    volumes: list[Object] = [
        {"name": volume, "secret": {"secretName": f"{one}.service-account-token"}} for volume, one in secrets.items()
    ]
    return {
        "metadata": {"name": f"{name}-agent"},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": {"runAsUser": 8737, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "initContainers": [{**plain, "name": "init", "command": ["python", "-c", write], "volumeMounts": [token]}],
            "containers": containers,
            "volumes": [
                *volumes,
                {"name": "token", "emptyDir": {}},
                {"name": "main", "configMap": {"name": "pod-agent"}},
            ],
        },
    }


def _pod_of(here: Place, component: str) -> str:
    label = f"--selector=app.kubernetes.io/component={component}"
    return here.cluster.kubectl("get", "pods", "-n", here.namespace, label, "-o", "name").split()[0]


def _cost(here: Place, pod: str, container: str) -> dict[str, float]:
    """Memory and CPU of the first process of a container."""
    seen = here.cluster.kubectl("exec", "-n", here.namespace, pod, "-c", container, "--", "python", "-c", _LOOK)
    status = dict(line.split(":", 1) for line in seen.splitlines() if ":" in line)
    ticks = seen.strip().splitlines()[-1].rpartition(")")[2].split()
    return {
        "rss_mib": round(int(status["VmRSS"].split()[0]) / 1024, 1),
        "peak_rss_mib": round(int(status["VmHWM"].split()[0]) / 1024, 1),
        "cpu_seconds": (int(ticks[11]) + int(ticks[12])) / 100,
    }
