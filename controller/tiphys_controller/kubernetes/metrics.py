"""Declares every metric of the controller.

No label holds a run, a workflow or a user, so that the number of series stays bounded.
"""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tiphys_controller.submit.plan_report import PlanReport


class ControllerMetrics:
    """Metrics of one controller, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.is_leader = gauge("tiphys_controller_leads", "1 while this controller leads, 0 while it is a standby.")
        self.workflows = gauge("tiphys_controller_workflows", "Workflows of Tiphys that have not finished.")
        self.agents_deleted = counter(
            "tiphys_controller_agent_pods_deleted",
            "Failed agent pods of live Workflows that were deleted, so that Argo makes another.",
        )
        self.gangs_ended = counter(
            "tiphys_controller_gangs_ended",
            "Trainings on several nodes that were ended because their Workflow was stopped or finished.",
        )
        self.events = counter("tiphys_controller_events_written", "Events written, by reason.", ("reason",))
        self.descriptions = counter(
            "tiphys_controller_descriptions_written", "Changes of a Workflow's title or description."
        )
        self.recorded_steps = counter(
            "tiphys_controller_recorded_steps", "Ends of steps without a gate that this controller recorded."
        )
        self.looks = counter("tiphys_controller_looks", "Reads of the storage of a run, to report its events.")
        self.failures = counter(
            "tiphys_controller_failures",
            "Actions that failed and are retried: look (storage or API server), record, agent, gang, watch, "
            "resume, alert, janitor, trigger.",
            ("what",),
        )
        self.resumed = counter(
            "tiphys_controller_resumes",
            "Automatic resumes, by the cause of the run's end (gone: its Workflow was deleted; "
            "unsent: its Workflow was never created).",
            ("cause",),
        )
        self.would_resume = counter(
            "tiphys_controller_resumes_not_made",
            "Resumes due in a dry run, counted at each reconcile, by cause.",
            ("cause",),
        )
        self.not_resumed = counter(
            "tiphys_controller_resumes_declined",
            "Reconciles of a run that ended with waiting or leaving it alone, by reason.",
            ("reason",),
        )
        self.open_breakers = gauge(
            "tiphys_controller_breakers_open", "Runs with an open circuit breaker: resumed too often without progress."
        )
        self.resume_seconds = histogram(
            "tiphys_controller_resume_seconds",
            "Time from noticing the end of a run to its next Workflow, waits included.",
            buckets=(0.25, 0.5, 1, 2, 5, 15, 60, 300, 3600),
        )
        self.plan_seconds = histogram(
            "tiphys_controller_plan_seconds",
            "Time to plan a run, storage included.",
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2, 5, 15, 60),
        )
        self.plan_steps = counter(
            "tiphys_controller_planned_steps", "Steps of resumed runs, by decision: skip or run.", ("decision",)
        )

        self.lost_gpu_seconds = counter(
            "tiphys_controller_lost_gpu_seconds",
            "GPU-seconds lost by attempts of resumed runs, by the cause of their end.",
            ("cause",),
        )
        self.alerts = counter("tiphys_controller_alerts_handled", "Handled alerts, by outcome.", ("outcome",))
        self.alerts_waiting = gauge(
            "tiphys_controller_alerts_waiting",
            "Alerts that wait: a Workflow is still ending, or a brake delays the resume.",
        )
        self.triggered_runs = counter(
            "tiphys_controller_triggered_runs",
            "Runs that were started or resumed for an object, by how it became known: delivered or found.",
            ("source",),
        )
        self.trigger_objects_waiting = gauge(
            "tiphys_controller_trigger_objects_waiting",
            "Objects that wait because the run that they resume still runs.",
        )
        self.trigger_problems = gauge(
            "tiphys_controller_trigger_problems",
            "Triggers without effect: damaged, too many, or for objects that the administrator does not allow.",
        )
        self.calls = counter(
            "tiphys_controller_http_calls", "Calls of the HTTP API and the webhook, by status.", ("call", "status")
        )
        self.call_seconds = histogram(
            "tiphys_controller_http_call_seconds",
            "Time until a call was answered.",
            ("call",),
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30),
        )

        self.garbage = counter(
            "tiphys_controller_litter",
            "Uploads, alerts and markers that the janitor removed, or would remove in a dry run.",
            ("what",),
        )
        self.orphaned_leases = gauge(
            "tiphys_controller_leases_orphaned",
            "GPU leases that are held although their attempt ended ten minutes ago or their Workflow has finished.",
        )
        self.unfinished = gauge(
            "tiphys_controller_runs_unfinished",
            "Stalled runs: unsent (claimed an hour ago, and no Workflow created) or gone (their Workflow was deleted).",
            ("what",),
        )

    def observe_call(self, call: str, status: int, seconds: float) -> None:
        """Count an answered HTTP call."""
        self.calls.labels(call, str(status)).inc()
        self.call_seconds.labels(call).observe(seconds)

    def observe_triggered_run(self, source: str) -> None:
        """Count a run that was made for an object."""
        self.triggered_runs.labels(source).inc()

    def observe_trigger_failure(self) -> None:
        """Count a trigger that made no run, or a listing that failed."""
        self.failures.labels("trigger").inc()

    def set_trigger_state(self, waiting: int, problems: int) -> None:
        """Show the objects that wait, and the triggers without effect."""
        self.trigger_objects_waiting.set(waiting)
        self.trigger_problems.set(problems)

    def observe_plan(self, plan: PlanReport) -> None:
        """Count the plan of a submitted run."""
        self.plan_seconds.observe(plan.seconds)
        for step in plan.steps:
            self.plan_steps.labels(step.decision).inc()

    def render(self) -> bytes:
        """Render all metrics in the Prometheus text format."""
        return generate_latest(self.registry)
