"""One alert that arrives a thousand times, out of order and from several connections, and what comes of it.

The controller is a process of its own; the API server is one for tests, S3 a real one. After each delivery comes the
baseline: one plain PUT of the same bytes, since a delivery is answered when it is stored.
"""

import http.client
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from bench.checkpoint.server import BUCKET, S3, STORE, plain_client
from bench.progress import say
from bench.resume.runs import done, items_of, items_pipeline, preempted, put_all
from bench.samples import percentile, seconds, significant, summary
from support.processes.controller import ControllerProcess, kubeconfig
from support.processes.polling import until
from support.servers.kube_server import KubeServer, serving
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
            until(lambda: process.get("/readyz")[0] == 200, seconds=300)
            deliveries = _deliveries(count)
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                parts = [deliveries[number::CONNECTIONS] for number in range(CONNECTIONS)]
                times = list(pool.map(lambda part: _deliver(process.url, part), parts))
            until(lambda: len(read_submissions(store, RUN)) > 1, seconds=300)
            time.sleep(_QUICK_QUIET_SECONDS if quick else _QUIET_SECONDS)  # time for a second one, which must not come
        resumes = len(read_submissions(store, RUN)) - 1
    replies, puts = (list(chain.from_iterable(one[name] for one in times)) for name in ("reply", "put"))
    say(f"webhooks: {resumes} resumes of {count} deliveries, p99 {1000 * percentile(replies, 99):.1f} ms")
    return {
        "deliveries": count,
        "connections": CONNECTIONS,
        "seed": SEED,
        "reply_ms": {"p50": _milliseconds(replies, 50), "p99": _milliseconds(replies, 99)},
        "put_ms": {"p50": _milliseconds(puts, 50), "p99": _milliseconds(puts, 99)},
        "line": {
            "webhook_resumes": resumes,
            "webhook_over_put": summary([percentile(one["reply"], 50) / percentile(one["put"], 50) for one in times]),
            "webhook_p99_over_put": summary(
                [percentile(one["reply"], 99) / percentile(one["put"], 50) for one in times]
            ),
        },
    }


def _milliseconds(values: Sequence[float], percent: float) -> float:
    return significant(1000 * percentile(values, percent))


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


def _deliver(url: str, bodies: Sequence[bytes]) -> dict[str, list[float]]:
    """Seconds from each request of one connection to its answer, and of as many plain PUTs."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    client = plain_client()
    client.list_buckets()  # the connection is made before the clock runs

    def post(body: bytes) -> None:
        connection.request("POST", "/v1/alerts", body, headers)
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status == 202, content

    times: dict[str, list[float]] = {"reply": [], "put": []}
    for number, body in enumerate(bodies):
        times["reply"].append(seconds(partial(post, body)))
        put = partial(client.put_object, Bucket=BUCKET, Key=f"plain/{number}", Body=body)
        times["put"].append(seconds(put))
        time.sleep(PAUSE_SECONDS)
    connection.close()
    return times


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
