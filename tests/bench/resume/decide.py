"""What the controller adds to a recovery: from the moment it sees a failure to the next Workflow, by a real S3 server.

The Workflow goes to an API server for tests, which answers at once.
"""

import time
from typing import Any

from bench.checkpoint.server import S3, STORE
from bench.progress import say
from bench.resume.runs import done, items_of, items_pipeline, preempted, put_all
from bench.resume.wire import DELAY_SECONDS, Wire
from bench.samples import significant
from support.kube_server import KubeServer, serving
from tiphys_controller import start_run
from tiphys_controller.auto_resume.act import AutoResumeReconciler, ReconcilerDependencies
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
    wire, seconds, requests = Wire(), [], []
    with server.at(None), serving() as kubernetes:
        store = open_store(STORE)
        runs = _failed_runs(store, kubernetes, QUICK_RUNS if quick else RUNS)
        attendant = _attendant(store, _submitter(kubernetes))
        wire.delay = DELAY_SECONDS
        with wire.tapped():
            for run in runs:
                sent, begin = wire.requests, time.perf_counter()
                attended = attendant.reconcile((NAMESPACE, run))
                seconds.append(time.perf_counter() - begin)
                requests.append(wire.requests - sent)
                assert attended.resumed and attended.resumed.submission == 2, attended.decision
    seconds.sort()
    p95 = seconds[min(len(seconds) - 1, round(0.95 * len(seconds)))]
    say(f"decide: p95 {p95:.3f} s of {len(seconds)} runs")
    return {
        "runs": len(runs),
        "items_of_a_run": ITEMS,
        "delay_seconds": DELAY_SECONDS,
        "requests": max(requests),
        "seconds": {"p50": significant(seconds[len(seconds) // 2]), "most": significant(seconds[-1])},
        "line": {"decide_p95_seconds": significant(p95)},
    }


def _submitter(kubernetes: KubeServer) -> KubernetesSubmitter:
    return KubernetesSubmitter(kubernetes.api(NAMESPACE), "bench")


def _attendant(store: Store, submitter: KubernetesSubmitter) -> AutoResumeReconciler:
    given = ReconcilerDependencies(
        stores=lambda _: store,
        submitter=lambda: submitter,
        is_leader=lambda: True,
        observation_health=lambda _: ObservationHealth(running_runs=1),
        monotonic=time.monotonic,
    )
    return AutoResumeReconciler(given, _UNLIMITED)


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
