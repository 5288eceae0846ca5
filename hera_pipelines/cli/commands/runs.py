"""``tiphys runs`` and ``tiphys get``: what lies in a store, and everything about one run.

``tiphys events``: what happened to a run, in order.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Annotated

import typer
from rich.text import Text
from tiphys_controller import API_VERSION, Phase, RunDetail, Submitter, describe, runs_table

from hera_pipelines.cli.screen import Format, Screen, local_time
from hera_pipelines.cli.shared_options import (
    DEFAULT_STATE,
    ArgoServerOption,
    ContextOption,
    KubeconfigOption,
    StoreOption,
    Where,
    existing_store,
)
from hera_pipelines.cli.target import cluster_submitter, refuse
from hera_pipelines.local.run_session import LocalSession
from tiphys.lineage import timeline
from tiphys.protocol.fan_out import given_by, in_words
from tiphys.records import Event
from tiphys.store import Store, read_run, submissions

RUNS_EXAMPLES = """\b
Examples:
  tiphys runs
  tiphys runs --store s3://ml/tiphys --cluster
  tiphys runs --store s3://ml/tiphys -o json | jq -r '.runs[] | select(.phase == "Failed") | .run'
"""
GET_EXAMPLES = """\b
Examples:
  tiphys get digits-7xk2p
  tiphys get digits-7xk2p -o yaml
"""

AskClusterOption = Annotated[
    bool, typer.Option("--cluster", help="Ask the cluster of the kubeconfig, too, which of its runs are alive.")
]

_PHASE_STYLES = {Phase.SUCCEEDED: "green", Phase.FAILED: "red", Phase.RUNNING: "cyan", Phase.UNKNOWN: "yellow"}


def runs(
    command: typer.Context,
    store: StoreOption = None,
    cluster: AskClusterOption = False,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    argo_server: ArgoServerOption = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="Form of the list.")] = Format.TABLE,
) -> None:
    """List the runs of a store."""
    screen: Screen = command.obj
    place = existing_store(screen, store)
    who = _who_knows(command, place, cluster, Where(kubeconfig, context, None, argo_server), screen.note)
    found = sorted(runs_table(place, who), key=lambda summary: summary.run)
    if output is not Format.TABLE:
        document = {"apiVersion": API_VERSION, "kind": "RunList", "store": place.url}
        screen.document({**document, "runs": [summary.model_dump(mode="json") for summary in found]}, output)
        return
    if not found:
        screen.note("no runs here yet; begin one with `tiphys run FILE`")
        return
    screen.table(
        ("RUN", "PIPELINE", "PHASE", "STEPS", "SUBMISSIONS", "LAST ACTIVITY", "REASON"),
        [
            (
                summary.run,
                summary.pipeline,
                _phase(summary.phase),
                f"{summary.steps_done}/{summary.steps_total}",
                str(summary.submissions),
                _time(summary.last_activity),
                summary.reason,
            )
            for summary in found
        ],
    )


def get(
    command: typer.Context,
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    store: StoreOption = None,
    cluster: AskClusterOption = False,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    argo_server: ArgoServerOption = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="Form of the answer.")] = Format.TABLE,
) -> None:
    """Show one run: its submissions, its steps, every attempt and what came out."""
    screen: Screen = command.obj
    place = existing_store(screen, store)
    who = _who_knows(command, place, cluster, Where(kubeconfig, context, None, argo_server), screen.note)
    detail = describe(place, run, who)
    if output is not Format.TABLE:
        screen.document(detail.model_dump(mode="json", by_alias=True), output)
        return
    _show_summary(screen, detail)
    screen.show("")
    items = {item.step: in_words(given_by(item.item)) for step in detail.steps for item in step.items if item.item}
    named = ("STEP", "ITEM") if items else ("STEP",)
    columns = (*named, "ATTEMPT", "SUBMISSION", "OUTCOME", "STARTED FROM", "MESSAGE")
    screen.table(columns, _with_item(_attempts(detail), items))
    outputs = list(_outputs(detail))
    if outputs:
        screen.show("")
        screen.table((*named, "OUTPUT", "VALUE"), _with_item(outputs, items))


def _who_knows(
    command: typer.Context, store: Store, cluster: bool, where: Where, note: Callable[[str], object]
) -> Submitter:
    """Whoever may know that a run is alive: the cluster that is asked for, else the engine of this folder."""
    if cluster:
        return cluster_submitter(where, note)[0]
    options = {"context": "--context", "kubeconfig": "--kubeconfig", "argo_server": "--argo-server"}
    refuse(command, options, "this is for a cluster; add --cluster")
    return LocalSession(store, DEFAULT_STATE)


def _show_summary(screen: Screen, detail: RunDetail) -> None:
    summary = detail.summary
    line = Text.assemble((summary.run, "bold"), f" of pipeline {summary.pipeline}: ", _phase(summary.phase))
    screen.show(line.append(f", {summary.reason}" if summary.reason else ""))
    screen.show(Text(f"{summary.steps_done} of {summary.steps_total} steps done, {summary.submissions} submissions"))
    if detail.parent:
        screen.show(Text(f"fork of run {detail.parent}"))
    if detail.parameters:
        screen.show(Text("parameters: " + ", ".join(f"{name}={value}" for name, value in detail.parameters.items())))


def _attempts(detail: RunDetail) -> Iterator[tuple[str, ...]]:
    for step in detail.steps:
        if not step.attempts:
            yield step.name, "", "", "", "", step.reason
        for one in step.attempts:
            told = ": ".join(part for part in (one.cause.replace("_", " "), one.message) if part)
            yield one.step, str(one.attempt), str(one.submission), one.outcome or "open", one.starts_from, told


def _outputs(detail: RunDetail) -> Iterator[tuple[str, str, str]]:
    for step in detail.steps:
        for attempt in step.attempts:
            for name, value in attempt.outputs.items():
                yield attempt.step, name, value


def _with_item(rows: Iterable[tuple[str, ...]], items: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Rows that begin with a step id, with what people know that item by behind it, where there are items."""
    for step, *rest in rows:
        yield (step, *([items.get(step, "")] if items else []), *rest)


def _phase(phase: Phase) -> Text:
    return Text(phase.value, style=_PHASE_STYLES.get(phase, ""))


def _time(moment: datetime | None) -> str:
    return local_time(moment) if moment else ""


EXAMPLES = """\b
Examples:
  tiphys events digits-7xk2p
  tiphys events digits-7xk2p --follow -o json | jq .message
"""

_POLL_SECONDS = 1.0


def events(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    store: StoreOption = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="json gives one event per line.")] = Format.TABLE,
) -> None:
    """Tell what happened to a run: submissions, attempts, checkpoints, and what was skipped and why."""
    screen: Screen = context.obj
    place = existing_store(screen, store)
    read_run(place, run)
    for event in _following(place, run) if follow else timeline(place, run):
        _print(screen, event, output)


def _following(store: Store, run: str) -> Iterator[Event]:
    """Events as they come; ends when the last submission is sealed and all is told."""
    told: set[str] = set()
    while True:
        sealed = all(submission.end for submission in submissions(store, run))
        for event in timeline(store, run):
            identity = event.model_dump_json()
            if identity not in told:
                told.add(identity)
                yield event
        if sealed:
            return
        time.sleep(_POLL_SECONDS)


def _print(screen: Screen, event: Event, output: Format) -> None:
    if output == Format.JSON:
        screen.write(event.model_dump_json(exclude_none=True))
    elif output == Format.YAML:
        screen.write("---")
        screen.document(event.model_dump(mode="json", exclude_none=True), output)
    else:
        clock = event.at.astimezone().strftime("%H:%M:%S.%f")[:-3]
        place = f"{event.step}/{event.attempt}" if event.attempt else event.step
        screen.write(f"{clock}  {event.name:<24}{place:<16}{event.message}")
    screen.out.file.flush()
