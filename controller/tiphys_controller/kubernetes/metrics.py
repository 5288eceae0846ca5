"""Every metric of the controller, declared in one place. No label takes a run, a workflow or a user."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tiphys_controller.submit.plan_report import PlanReport


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
            "What could not be done and is tried again: look (storage or API server), agent, gang, watch, projection, "
            "resume, alert, janitor.",
            ("what",),
            registry=self.registry,
        )
        self._about_resumes()

    def _about_resumes(self) -> None:
        self.resumed = Counter(
            "tiphys_controller_resumes",
            "Runs that were resumed without a person, by the cause of their end (gone: the Workflow was deleted; "
            "unsent: it was never made).",
            ("cause",),
            registry=self.registry,
        )
        self.would_resume = Counter(
            "tiphys_controller_resumes_not_made",
            "The same, in a dry run: each look that found one.",
            ("cause",),
            registry=self.registry,
        )
        self.not_resumed = Counter(
            "tiphys_controller_resumes_declined",
            "Looks at a run that ended with waiting or leaving it alone, by reason.",
            ("reason",),
            registry=self.registry,
        )
        self.breakers = Gauge(
            "tiphys_controller_breakers_open",
            "Runs that were resumed too often without getting any further.",
            registry=self.registry,
        )
        self.resume_seconds = Histogram(
            "tiphys_controller_resume_seconds",
            "From the moment at which the end of a run was noticed to its next Workflow, waits included.",
            buckets=(0.25, 0.5, 1, 2, 5, 15, 60, 300, 3600),
            registry=self.registry,
        )
        self.plan_seconds = Histogram(
            "tiphys_controller_plan_seconds",
            "Time to plan a run, storage included.",
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2, 5, 15, 60),
            registry=self.registry,
        )
        self.plan_steps = Counter(
            "tiphys_controller_planned_steps",
            "Steps of resumed runs, by decision: skip or run.",
            ("decision",),
            registry=self.registry,
        )

        self.lost_gpu_seconds = Counter(
            "tiphys_controller_lost_gpu_seconds",
            "GPU-seconds that attempts of resumed runs held for nothing, by the cause of their end.",
            ("cause",),
            registry=self.registry,
        )
        self.alerts = Counter(
            "tiphys_controller_alerts_handled", "Alerts, by what came of them.", ("outcome",), registry=self.registry
        )
        self.alerts_waiting = Gauge(
            "tiphys_controller_alerts_waiting",
            "Alerts that nothing came of yet: a Workflow still ends, or a brake holds.",
            registry=self.registry,
        )
        self.calls = Counter(
            "tiphys_controller_http_calls",
            "Calls of the HTTP API and the webhook, by status.",
            ("call", "status"),
            registry=self.registry,
        )
        self.call_seconds = Histogram(
            "tiphys_controller_http_call_seconds",
            "Time until a call was answered.",
            ("call",),
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30),
            registry=self.registry,
        )

        self.litter = Counter(
            "tiphys_controller_litter",
            "What nobody needs and the janitor removed, or would have in a dry run: upload, alert.",
            ("what",),
            registry=self.registry,
        )
        self.orphaned_leases = Gauge(
            "tiphys_controller_leases_orphaned",
            "Leases of GPUs that are held although their attempt ended ten minutes ago or their Workflow is over.",
            registry=self.registry,
        )
        self.unfinished = Gauge(
            "tiphys_controller_runs_unfinished",
            "Runs that nothing carries on at the moment: unsent (claimed an hour ago, and no Workflow made) or gone "
            "(their Workflow was deleted).",
            ("what",),
            registry=self.registry,
        )

    def note_call(self, call: str, status: int, seconds: float) -> None:
        """A call was answered."""
        self.calls.labels(call, str(status)).inc()
        self.call_seconds.labels(call).observe(seconds)

    def note_plan(self, plan: PlanReport) -> None:
        """A run was planned and submitted."""
        self.plan_seconds.observe(plan.seconds)
        for step in plan.steps:
            self.plan_steps.labels(step.decision).inc()

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)
