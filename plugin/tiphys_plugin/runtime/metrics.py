"""The metrics of the plugin, declared in one place so that their names and labels can be reviewed together.

No label holds a run, workflow, step or user, because their number is unbounded.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiphys.errors import StoreError
from tiphys.records import Preemption, utc_now
from tiphys_plugin.quota.lease import LedgerState
from tiphys_plugin.quota.ledger import room
from tiphys_plugin.quota.ledger.usage import compute_queue_usage
from tiphys_plugin.quota.queues import Queues

_FINISHED_PHASES = ("Succeeded", "Failed", "Error")
_SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 20, 30)


class PluginMetrics:
    """Metrics of one core in a registry of their own, so that one process can have several cores."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.answers = counter(
            "tiphys_plugin_answers",
            "Answered calls by operation and answer: pending, succeeded, failed, foreign, unavailable.",
            ("op", "answer"),
        )
        self.answer_seconds = histogram(
            "tiphys_plugin_answer_seconds", "Time to answer one call.", ("op",), buckets=_SECONDS
        )
        self.reused_steps = counter(
            "tiphys_steps_adopted",
            "Steps that were not run because a finished result existed, by its source: run, shared.",
            ("source",),
        )
        self.attempts_ended = counter(
            "tiphys_attempts_ended", "Ended attempts by cause; done means finished with all outputs.", ("cause",)
        )
        self.submissions_ended = counter(
            "tiphys_submissions_ended", "Ended Workflows of runs by their phase: Succeeded, Failed, Error.", ("phase",)
        )
        for phase in _FINISHED_PHASES:  # so that the first failure is an increase, too
            self.submissions_ended.labels(phase)
        self.forced_ends = counter(
            "tiphys_attempts_forced",
            "Attempts that were ended by force because one of their pods had not ended in time.",
        )
        self.forced_leases = counter(
            "tiphys_leases_forced",
            "Leases that were released after the declared time although the end of their pods was not observed.",
        )
        self.unrecovered_runs = counter(
            "tiphys_runs_not_recovered",
            "Runs with live pods whose leases could not be restored, because their records are damaged.",
        )
        self.capped_leases = counter(
            "tiphys_leases_capped",
            "Leases of live attempts that were recovered with fewer GPUs than recorded, or not at all.",
        )
        self.skipped_checkpoints = counter(
            "tiphys_checkpoints_skipped", "Checkpoints that were skipped because they were damaged or quarantined."
        )
        self.gpu_requests = counter(
            "tiphys_gpu_requests",
            "Answers to requests for GPUs: Admitted, or the main reason; a waiting request gets many answers.",
            ("answer",),
        )
        self.gpu_decision_seconds = histogram(
            "tiphys_gpu_decision_seconds",
            "Time that the ledger takes for one answer, including its storage.",
            buckets=_SECONDS,
        )
        self.gpu_wait_seconds = histogram(
            "tiphys_gpu_wait_seconds",
            "Time from the first request for GPUs to their lease.",
            buckets=(1, 10, 60, 300, 900, 3600, 4 * 3600, 24 * 3600),
        )
        self.preemptions = counter(
            "tiphys_preemptions",
            "Preempted attempts, by whether they left a committed checkpoint: with, without, unknown.",
            ("checkpoint",),
        )
        self.preemption_lost = counter(
            "tiphys_preemption_lost_gpu_seconds",
            "GPU-seconds of training between the last checkpoint of attempts and their preemption.",
        )
        self.preemption_seconds = histogram(
            "tiphys_preemption_seconds",
            "Time from the preemption of an attempt until its pods were observed to be gone.",
            buckets=(1, 5, 15, 30, 60, 120, 300, 600, 1800),
        )

    def count_submission_end(self, phase: str) -> None:
        """Count the end of a Workflow. ``phase`` is what a call of the tenant says, so other values are one."""
        self.submissions_ended.labels(phase if phase in _FINISHED_PHASES else "Error").inc()

    def count_preemption(self, preempted: Preemption) -> None:
        """Count a preempted attempt that has ended."""
        uncommitted = "unknown" if preempted.seconds_lost is None else "without"
        self.preemptions.labels(checkpoint="with" if preempted.committed else uncommitted).inc()
        self.preemption_lost.inc(preempted.gpu_seconds_lost or 0.0)
        self.preemption_seconds.observe((preempted.gone_at - preempted.asked_at).total_seconds())

    def register_ledger(self, snapshot: Callable[[], LedgerState]) -> None:
        """Add the metrics of the ledger, which are read at each scrape."""
        self.registry.register(LedgerCollector(snapshot))

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


class TenantsCollector(Collector):
    """Merges the metrics of several cores; the label ``tenant`` holds the namespace of each."""

    def __init__(self, registries: Callable[[], Mapping[str, CollectorRegistry]]) -> None:
        self._registries = registries

    def describe(self) -> Iterable[Metric]:
        return []  # no core exists before the first call of a tenant

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for tenant, registry in self._registries().items():
            for family in registry.collect():
                total = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                total.samples += [
                    sample._replace(labels={**sample.labels, "tenant": tenant}) for sample in family.samples
                ]
        return merged.values()


class LedgerCollector(Collector):
    """Held GPUs and waiting requests by queue, read from the ledger at each scrape.

    ``measures_room``: the ledger is an object of limited size, whose room namespaces share.
    """

    def __init__(
        self,
        snapshot: Callable[[], LedgerState],
        *,
        measures_room: bool = False,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._snapshot = snapshot
        self._clock = clock
        self._measures_room = measures_room

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return self._families()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        held, waiting, oldest, quota, borrowed, share_used, room_used = self._families()
        try:
            ledger = self._snapshot()
        except StoreError:  # absent series are correct; zeros would be false
            return []
        for name in {lease.request.queue for lease in ledger.leases}:
            held.add_metric([name], sum(lease.request.gpus for lease in ledger.leases if lease.request.queue == name))
        begun: defaultdict[str, list[datetime]] = defaultdict(list)
        for pending in ledger.pending:
            begun[pending.request.queue].append(pending.since)
        for name, times in begun.items():
            waiting.add_metric([name], len(times))
            oldest.add_metric([name], (self._clock() - min(times)).total_seconds())
        if isinstance(ledger.queues, Queues):
            held_only = replace(ledger, pending=())
            declared = [usage for usage in compute_queue_usage(held_only) if usage.quota is not None]
            for name in ledger.queues.names:
                rows = [usage for usage in declared if usage.queue == name]
                quota.add_metric([name], sum(usage.quota or 0 for usage in rows))
                borrowed.add_metric([name], sum(usage.borrowed for usage in rows))
        if self._measures_room:
            for tenant, used in room.measure_shares(ledger).items():
                share_used.add_metric([tenant], used)
            room_used.add_metric([], room.count_entries(ledger).total() / room.ROOM_ENTRIES)
        return [held, waiting, oldest, quota, borrowed, share_used, room_used]

    @staticmethod
    def _families() -> tuple[GaugeMetricFamily, ...]:
        return (
            GaugeMetricFamily("tiphys_gpus_held", "GPUs held by leases.", labels=["queue"]),
            GaugeMetricFamily("tiphys_gpu_requests_waiting", "Requests that wait for GPUs.", labels=["queue"]),
            GaugeMetricFamily(
                "tiphys_gpu_requests_oldest_seconds",
                "How long the request has waited that has waited longest.",
                labels=["queue"],
            ),
            GaugeMetricFamily("tiphys_gpu_quota", "GPUs of the queue's own quota, of all types.", labels=["queue"]),
            GaugeMetricFamily("tiphys_gpus_borrowed", "GPUs held beyond the queue's own quota.", labels=["queue"]),
            GaugeMetricFamily(
                "tiphys_ledger_share_used",
                "Part of its share of the GPU ledger that a namespace has used; at 1, its new requests are deferred.",
                labels=["tenant"],
            ),
            GaugeMetricFamily(
                "tiphys_ledger_room_used", "Part of the GPU ledger that all leases and waiting requests use.", labels=[]
            ),
        )
