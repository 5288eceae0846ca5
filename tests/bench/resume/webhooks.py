"""One alert that arrives a thousand times, out of order and from several connections, and what comes of it.

The controller is a process of its own; the API server is one for tests, S3 a real one.
"""

import http.client
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.checkpoint.server import S3, STORE
from bench.progress import say
from bench.resume.runs import done, items_of, items_pipeline, preempted, put_all
from bench.samples import significant
from support.controller_process import ControllerProcess, kubeconfig
from support.kube_server import KubeServer, serving
from support.polling import until
from tiphys_controller import start_run
from tiphys_controller.kubernetes.kubernetes_submitter import KubernetesSubmitter

from tiphys.kube import identify_cluster
from tiphys.kube.resources import WORKFLOWS
from tiphys.store import Store, open_store, read_submissions

DELIVERIES = 1000
QUICK_DELIVERIES = 100
CONNECTIONS = 4
PAUSE_SECONDS = 0.1
"""Between two deliveries of one connection, so that all stay below the 50 calls a second that are let in."""
SEED = 11
RUN, NAMESPACE, TOKEN = "alerted-1", "ml", "a-token-of-the-benchmark"
ITEMS = 10
_QUIET_SECONDS, _QUICK_QUIET_SECONDS = 5.0, 2.0


def measure(server: S3, quick: bool) -> dict[str, Any]:
    count = QUICK_DELIVERIES if quick else DELIVERIES
    with server.at(None) as leads, serving() as kubernetes, tempfile.TemporaryDirectory() as folder:
        store = open_store(STORE)
        _failed_run(store, kubernetes)
        environment = {**leads, "KUBECONFIG": str(kubeconfig(kubernetes, Path(folder))), "POD_NAME": "controller-1"}
        with ControllerProcess(_arguments(Path(folder)), environment) as process:
            until(lambda: process.get("/readyz")[0] == 200)
            deliveries = _deliveries(count)
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                parts = [deliveries[number::CONNECTIONS] for number in range(CONNECTIONS)]
                seconds = sorted(one for part in pool.map(lambda part: _post(process.url, part), parts) for one in part)
            until(lambda: len(read_submissions(store, RUN)) > 1, seconds=180)
            time.sleep(_QUICK_QUIET_SECONDS if quick else _QUIET_SECONDS)  # time for a second one, which must not come
        resumes = len(read_submissions(store, RUN)) - 1
    p99 = seconds[min(len(seconds) - 1, round(0.99 * len(seconds)))]
    say(f"webhooks: {resumes} resumes of {count} deliveries, p99 {1000 * p99:.1f} ms")
    return {
        "deliveries": count,
        "connections": CONNECTIONS,
        "seed": SEED,
        "answer_ms": {"p50": significant(1000 * seconds[len(seconds) // 2]), "p99": significant(1000 * p99)},
        "line": {"webhook_resumes": resumes},
    }


def _deliveries(count: int) -> list[bytes]:
    """The same alert, firing and resolved, alone and in groups with others, in any order."""
    chance = random.Random(SEED)
    return [_delivery(chance) for _ in range(count)]


def _delivery(chance: random.Random) -> bytes:
    status = chance.choice(["firing", "firing", "resolved"])
    labels = {"alertname": "RunFailed", "namespace": NAMESPACE, "tiphys_run": RUN}
    stamp = {"startsAt": "2026-05-04T11:00:00.000Z", "endsAt": "0001-01-01T00:00:00Z", "fingerprint": "ab12"}
    other = {"alertname": "Watchdog", "namespace": NAMESPACE}
    alerts: list[Mapping[str, Any]] = [{"status": status, "labels": labels, "annotations": {}, **stamp}]
    if chance.random() < 0.3:
        alerts.append({"status": "firing", "labels": other, "annotations": {}, **stamp, "fingerprint": "cd34"})
        chance.shuffle(alerts)
    document = {"version": "4", "groupKey": "{}", "status": status, "receiver": "tiphys", "alerts": alerts}
    return json.dumps(document).encode()


def _post(url: str, bodies: Sequence[bytes]) -> list[float]:
    """Seconds from each request to its answer."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    found = []
    for body in bodies:
        begin = time.perf_counter()
        connection.request("POST", "/v1/alerts", body, headers)
        answer = connection.getresponse()
        told = answer.read()
        found.append(time.perf_counter() - begin)
        assert answer.status == 202, told
        time.sleep(PAUSE_SECONDS)
    connection.close()
    return found


def _arguments(folder: Path) -> list[str]:
    (folder / "token").write_text(TOKEN)
    (folder / "rules.json").write_text(json.dumps({"RunFailed": "resume"}))
    return [
        f"--store={STORE}",
        f"--namespace={NAMESPACE}",
        "--auto-resume=on",
        f"--token-file={folder / 'token'}",
        f"--alert-rules={folder / 'rules.json'}",
    ]


def _failed_run(store: Store, kubernetes: KubeServer) -> None:
    kubernetes.add_namespace("tiphys")
    api = kubernetes.api(NAMESPACE)
    pipeline = items_pipeline(ITEMS)
    started = start_run(store, KubernetesSubmitter(api, identify_cluster(api)), pipeline.manifest, RUN, NAMESPACE)
    *finished, last = items_of(pipeline)
    put_all([*(one for item in finished for one in done(RUN, item).items()), *preempted(RUN, last).items()])
    api.patch(WORKFLOWS, NAMESPACE, started.workflow_name, {"status": {"phase": "Failed"}})
