"""What the controller adds to a recovery: from the moment it sees a failure to the next Workflow, by a real S3 server.

The Workflow goes to an API server for tests, which answers at once. After each recovery comes the baseline: as many
plain requests to the S3 server, one after the other.
"""

import statistics
import time
from typing import Any

from bench.checkpoint.server import BUCKET, S3, STORE, plain_client
from bench.progress import say
from bench.resume.runs import done, items_of, items_pipeline, preempted, put_all
from bench.resume.wire import DELAY_SECONDS, Wire
from bench.samples import percentile, ratio, seconds, significant, summary
from support.servers.kube_server import KubeServer, serving
from tiphys_controller import start_run
from tiphys_controller.auto_resume.act import AutoResumeReconciler
from tiphys_controller.auto_resume.observation_health import ObservationHealth
from tiphys_controller.auto_resume.state import AutoResumeLimits
from tiphys_controller.kubernetes.kubernetes_submitter import KubernetesSubmitter

from hera_pipelines import AutoResume
from tiphys.kube.resources import WORKFLOWS
from tiphys.records import SubmissionEnd
from tiphys.store import RunLayout, Store, claim_record, open_store

ITEMS = 50
RUNS = 50
QUICK_RUNS = 3
NAMESPACE = "ml"
_UNLIMITED = AutoResumeLimits(resumes_per_minute=1e9, resume_burst=1_000_000_000, mass_failure_count=1_000_000)


def measure(server: S3, quick: bool) -> dict[str, Any]:
    wire, requests = Wire(), []
    with server.at(None), serving() as kubernetes:
        store = open_store(STORE)
        runs = iter(_failed_runs(store, kubernetes, QUICK_RUNS if quick else RUNS))
        reconciler, client = _reconciler(store, _submitter(kubernetes)), plain_client()

        def recover() -> None:
            sent = wire.requests
            found = reconciler.reconcile((NAMESPACE, next(runs)))
            requests.append(wire.requests - sent)
            assert found.resumed and found.resumed.submission == 2, found.decision

        def send_as_many() -> None:
            for number in range(requests[-1]):
                client.put_object(Bucket=BUCKET, Key=f"plain/{number}", Body=b"{}")

        client.list_buckets()  # the connection is made before the clock runs
        wire.delay = DELAY_SECONDS
        recoveries, loops = [], []
        with wire.tapped():
            for _ in range(QUICK_RUNS if quick else RUNS):
                recoveries.append(seconds(recover))
                loops.append(seconds(send_as_many))
    over_requests = ratio(recoveries, loops)
    say(f"decide: {max(requests)} requests, {over_requests['median']} times as long as they take alone")
    return {
        "runs": len(recoveries),
        "items_of_a_run": ITEMS,
        "delay_seconds": DELAY_SECONDS,
        "requests": max(requests),
        "seconds": summary(recoveries),
        "p95_seconds": percentile(recoveries, 95),
        "plain_requests_seconds": summary(loops),
        "line": {
            "decide_requests": max(requests),
            "decide_over_requests": over_requests,
            "decide_p95_over_requests": significant(percentile(recoveries, 95) / statistics.median(loops)),
        },
    }


def _submitter(kubernetes: KubeServer) -> KubernetesSubmitter:
    return KubernetesSubmitter(kubernetes.api(NAMESPACE), "bench")


def _reconciler(store: Store, submitter: KubernetesSubmitter) -> AutoResumeReconciler:
    return AutoResumeReconciler(
        stores=lambda _: store,
        submitter=lambda: submitter,
        is_leader=lambda: True,
        observation_health=lambda _: ObservationHealth(running_runs=1),
        monotonic=time.monotonic,
        limits=_UNLIMITED,
    )


def _failed_runs(store: Store, kubernetes: KubeServer, count: int) -> list[str]:
    """Runs that have failed by the loss of a node, with one item left to do."""
    manifest = items_pipeline(ITEMS, auto_resume=AutoResume()).manifest
    submitter, api = _submitter(kubernetes), kubernetes.api(NAMESPACE)
    names = [f"decide-{number}" for number in range(count)]
    for run in names:
        started = start_run(store, submitter, manifest, run, NAMESPACE)
        *finished, last = items_of(items_pipeline(ITEMS))
        objects = [one for item in finished for one in done(run, item).items()]
        put_all([*objects, *preempted(run, last).items()])
        claim_record(store, RunLayout(run).submission_end(1), SubmissionEnd(run=run, submission=1, status="Failed"))
        failed = {"status": {"phase": "Failed", "finishedAt": "2026-03-01T12:00:00Z"}}
        api.patch(WORKFLOWS, NAMESPACE, started.workflow_name, failed)
    return names
