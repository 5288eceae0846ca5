"""Every metric of the controller, declared in one place. No label takes a run, a workflow or a user."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class Metrics:
    """Metrics of one controller, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.leads = Gauge(
            "tiphys_controller_leads", "1 while this controller leads, 0 while it stands by.", registry=self.registry
        )
        self.workflows = Gauge(
            "tiphys_controller_workflows", "Workflows of Tiphys that are not over.", registry=self.registry
        )
        self.agents_deleted = Counter(
            "tiphys_controller_agent_pods_deleted",
            "Failed agent pods of live Workflows that were deleted, so that Argo makes another.",
            registry=self.registry,
        )
        self.gangs_ended = Counter(
            "tiphys_controller_gangs_ended",
            "Trainings on several nodes that were ended because their Workflow was stopped or over.",
            registry=self.registry,
        )
        self.events = Counter(
            "tiphys_controller_events_written", "Events written, by reason.", ("reason",), registry=self.registry
        )
        self.descriptions = Counter(
            "tiphys_controller_descriptions_written",
            "Changes of a Workflow's title or description.",
            registry=self.registry,
        )
        self.projected = Counter(
            "tiphys_controller_projections_written",
            "Writes of objects that show the GPU ledger.",
            registry=self.registry,
        )
        self.looks = Counter("tiphys_controller_looks", "Looks at the storage of a run.", registry=self.registry)
        self.failures = Counter(
            "tiphys_controller_failures",
            "What could not be done and is tried again: look (storage or API server), agent, gang, watch, projection.",
            ("what",),
            registry=self.registry,
        )

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)
