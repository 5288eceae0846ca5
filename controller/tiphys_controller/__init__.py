"""Plans and resumes runs from storage alone."""

from tiphys_controller.inspecting import RunDetail, RunSummary, describe, runs_table
from tiphys_controller.phase import Phase
from tiphys_controller.report import API_VERSION, ItemReport, PlanReport, StepReport, plan_run
from tiphys_controller.resuming import Resumed, resume
from tiphys_controller.starting import Started, start
from tiphys_controller.submitter import LiveWorkflow, Submitter

__all__ = [
    "API_VERSION",
    "ItemReport",
    "LiveWorkflow",
    "Phase",
    "PlanReport",
    "Resumed",
    "RunDetail",
    "RunSummary",
    "Started",
    "StepReport",
    "Submitter",
    "describe",
    "plan_run",
    "resume",
    "runs_table",
    "start",
]
