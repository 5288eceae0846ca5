"""``tiphys register``: finishes the registrations of a run that MLflow has not answered."""

import os
from typing import Annotated

import typer
from rich.text import Text

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import FormatOption, RunStepArgument, StoreOption, existing_store, parse_run_step
from tiphys.errors import NotFoundError
from tiphys.lineage.step_names import selects_step
from tiphys.records.tracking import MLFLOW_TRACKING_URI
from tiphys.store import DamagedRecord
from tiphys.tracking.records import RegistrationReport, list_registrations
from tiphys.tracking.registration import repeat_registration
from tiphys.tracking.server import connect

EXAMPLES = """\b
Examples:
  tiphys register digits-7xk2p --tracking-uri https://mlflow.example.com
  tiphys register digits-7xk2p/register
  tiphys register digits-7xk2p --dry-run -o json
"""


def register(
    context: typer.Context,
    what: RunStepArgument,
    tracking_uri: Annotated[
        str,
        typer.Option(
            "--tracking-uri",
            metavar="URL",
            help=f"MLflow server. Default: the variable {MLFLOW_TRACKING_URI}. Its variables hold credentials.",
        ),
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the registrations and their state.")] = False,
    store: StoreOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Register models of a run in MLflow that were requested and are not complete.

    A step of RegisterModel requests a registration before it asks MLflow. This command verifies every byte of the
    model again, and makes or finds the one version of it. What is complete stays as it is.
    """
    screen: Screen = context.obj
    run_store = existing_store(screen, store)
    history, step = parse_run_step(run_store, what)
    run, pipeline = history.run, history.pipeline
    damaged: list[DamagedRecord] = []
    registrations = list_registrations(run_store, run, damaged)
    found = [registration for registration in registrations if selects_step(step, registration.request.step)]
    for record in damaged:
        screen.note(f"left out, because a record is damaged: {record.message}")
    if not found:
        raise NotFoundError(f"no step of {what} has asked to register a model; a step of RegisterModel does as it runs")
    if not dry_run and any(registration.done is None for registration in found):
        server = connect({**os.environ, **({MLFLOW_TRACKING_URI: tracking_uri} if tracking_uri else {})})
        found = [
            entry if entry.done else entry._replace(done=repeat_registration(server, run_store, entry, pipeline))
            for entry in found
        ]
    reports = [registration.report() for registration in found]
    if output is not Format.TABLE:
        entries = [report.model_dump(mode="json") for report in reports]
        screen.typed_document("RegistrationList", output, store=run_store.url, run=run, registrations=entries)
        return
    rows = ((report.step, report.model, _state(report), report.alias, report.source) for report in reports)
    screen.table(("STEP", "MODEL", "VERSION", "ALIAS", "SOURCE"), rows, wraps=True)


def _state(report: RegistrationReport) -> Text:
    return Text(report.model_version) if report.model_version else Text("pending", style="yellow")
