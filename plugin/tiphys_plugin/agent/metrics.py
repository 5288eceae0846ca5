"""The metrics of the shared agent. No label holds a workflow or a node, because their number is unbounded."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600)


class AgentMetrics:
    """The metrics of one agent in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.leader = gauge("tiphys_agent_leader", "1 while this process is the leader, which answers.")
        self.open_tasks = gauge("tiphys_agent_open_tasks", "Plugin nodes without a final answer.")
        self.foreign_tasks = gauge(
            "tiphys_agent_foreign_tasks",
            "Open HTTP templates and nodes of other plugins, which this agent does not answer.",
        )
        self.queue = gauge("tiphys_agent_queue_length", "Nodes that wait for a free worker.")
        self.queue_seconds = histogram(
            "tiphys_agent_queue_seconds", "Time that a node waited for a free worker.", buckets=_SECONDS
        )
        self.answer_seconds = histogram(
            "tiphys_agent_answer_seconds",
            "Time from the first observation of a task to its stored final answer.",
            buckets=_SECONDS,
        )
        self.patches = counter(
            "tiphys_agent_patches",
            "Patches of task sets by outcome: written, conflict, refused, unreachable, not_leading.",
            ("outcome",),
        )
        self.patched_nodes = counter("tiphys_agent_patched_nodes", "Entries of nodes that patches wrote or removed.")
        self.api_requests = counter(
            "tiphys_agent_api_requests",
            "Requests to the API server by verb and kind, including those of the plugin's core.",
            ("verb", "resource"),
        )

    def count_request(self, verb: str, resource: str) -> None:
        self.api_requests.labels(verb=verb, resource=resource).inc()

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)
