"""Every metric of the plugin, declared in one place.

No label takes a run, workflow, step or user: their number has no bound.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiphys.errors import StoreError
from tiphys.records import Preemption
from tiphys_plugin.quota.lease import Snapshot
from tiphys_plugin.quota.ledger.state import Book
from tiphys_plugin.quota.ledger.usage import usage
from tiphys_plugin.quota.queues import Queues

_SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 20, 30)


class Metrics:
    """Counters of one plugin in a registry of their own, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.answers = Counter(
            "tiphys_plugin_answers",
            "Answered calls by operation and answer: pending, succeeded, failed, foreign, unavailable.",
            ("op", "answer"),
            registry=self.registry,
        )
        self.answer_seconds = Histogram(
            "tiphys_plugin_answer_seconds",
            "Time to answer one call.",
            ("op",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.adopted = Counter(
            "tiphys_steps_adopted",
            "Steps that were not run because a finished result was there, by where it came from: run, shared.",
            ("source",),
            registry=self.registry,
        )
        self.attempts_ended = Counter(
            "tiphys_attempts_ended",
            "Ended attempts by cause; done means finished with all outputs.",
            ("cause",),
            registry=self.registry,
        )
        self.forced_ends = Counter(
            "tiphys_attempts_forced",
            "Attempts that were ended although a pod of theirs had not gone away in time.",
            registry=self.registry,
        )
        self.forced_leases = Counter(
            "tiphys_leases_forced",
            "Leases that were taken back after the declared time although nobody saw the pods of their attempt end.",
            registry=self.registry,
        )
        self.skipped_checkpoints = Counter(
            "tiphys_checkpoints_skipped",
            "Checkpoints that were passed over because they were damaged or in quarantine.",
            registry=self.registry,
        )
        self.gpu_requests = Counter(
            "tiphys_gpu_requests",
            "Answers to requests for GPUs: Admitted, or the reason that weighed most; who waits gets many.",
            ("answer",),
            registry=self.registry,
        )
        self.gpu_decision_seconds = Histogram(
            "tiphys_gpu_decision_seconds",
            "Time that the ledger takes for one answer, its storage included.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.gpu_wait_seconds = Histogram(
            "tiphys_gpu_wait_seconds",
            "Time from the first request for GPUs to their lease.",
            buckets=(1, 10, 60, 300, 900, 3600, 4 * 3600, 24 * 3600),
            registry=self.registry,
        )
        self.preemptions = Counter(
            "tiphys_preemptions",
            "Attempts that went for another, by whether they left a committed checkpoint: with, without, unknown.",
            ("checkpoint",),
            registry=self.registry,
        )
        self.preemption_lost = Counter(
            "tiphys_preemption_lost_gpu_seconds",
            "GPU-seconds of training that attempts had done since their last checkpoint when they were asked to go.",
            registry=self.registry,
        )
        self.preemption_seconds = Histogram(
            "tiphys_preemption_seconds",
            "Time from when an attempt was asked to go until its pods were seen to be gone.",
            buckets=(1, 5, 15, 30, 60, 120, 300, 600, 1800),
            registry=self.registry,
        )

    def count_preemption(self, preempted: Preemption) -> None:
        """An attempt is over that was asked to go."""
        unseen = "unknown" if preempted.seconds_lost is None else "without"
        self.preemptions.labels(checkpoint="with" if preempted.committed else unseen).inc()
        self.preemption_lost.inc(preempted.gpu_seconds_lost or 0.0)
        self.preemption_seconds.observe((preempted.gone_at - preempted.asked_at).total_seconds())

    def watch_ledger(self, snapshot: Callable[[], Snapshot]) -> None:
        """Report held GPUs and waiting requests by queue, read at each scrape."""
        self.registry.register(LedgerCollector(snapshot))

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


class TenantsCollector(Collector):
    """The metrics of several plugins as one, each told by the label ``tenant``, its namespace."""

    def __init__(self, registries: Callable[[], Mapping[str, CollectorRegistry]]) -> None:
        self._registries = registries

    def describe(self) -> Iterable[Metric]:
        return []  # nothing is known before the first tenant calls

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for tenant, registry in self._registries().items():
            for family in registry.collect():
                into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                into.samples += [one._replace(labels={**one.labels, "tenant": tenant}) for one in family.samples]
        return merged.values()


class LedgerCollector(Collector):
    """Held GPUs and waiting requests by queue, read from the ledger at each scrape."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return self._families()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        held, waiting, quota, borrowed = self._families()
        try:
            seen = self._snapshot()
        except StoreError:  # absent series tell the truth; zeros would not
            return []
        for name in {lease.request.queue for lease in seen.leases}:
            held.add_metric([name], sum(lease.request.gpus for lease in seen.leases if lease.request.queue == name))
        for name in {w.request.queue for w in seen.waiting}:
            waiting.add_metric([name], sum(1 for w in seen.waiting if w.request.queue == name))
        if isinstance(seen.queues, Queues):
            declared = [one for one in usage(seen.queues, Book(seen.leases)) if one.quota is not None]
            for name in seen.queues.names:
                rows = [one for one in declared if one.queue == name]
                quota.add_metric([name], sum(one.quota or 0 for one in rows))
                borrowed.add_metric([name], sum(one.borrowed for one in rows))
        return [held, waiting, quota, borrowed]

    @staticmethod
    def _families() -> tuple[GaugeMetricFamily, ...]:
        return (
            GaugeMetricFamily("tiphys_gpus_held", "GPUs held by leases.", labels=["queue"]),
            GaugeMetricFamily("tiphys_gpu_requests_waiting", "Requests that wait for GPUs.", labels=["queue"]),
            GaugeMetricFamily("tiphys_gpu_quota", "GPUs of the queue's own quota, of all types.", labels=["queue"]),
            GaugeMetricFamily("tiphys_gpus_borrowed", "GPUs held beyond the queue's own quota.", labels=["queue"]),
        )
