"""The page ``report.html`` of a submission, an artifact of its finalize node.

Argo's own UI shows it, so that a person who knows only that UI learns why the
steps of a failed workflow ended, and the command that goes on. The page has no
script, because Argo's server forbids any, and needs nothing else from the store.
"""

import contextlib
from collections.abc import Iterator
from html import escape

import structlog

from tiphys.errors import IntegrityError, ObjectExistsError, StoreError
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.compiled_workflow import shown_status
from tiphys.protocol.execute_api import ArtifactValue, NodeOutputs, S3Location
from tiphys.protocol.operations import REPORT_ARTIFACT
from tiphys.protocol.quantities import format_duration
from tiphys.recording.run_binding import RunBinding
from tiphys.records import AttemptEndOutcome, SubmissionEnd
from tiphys.store import Attempt, Store

_log = structlog.get_logger()
_MAX_ATTEMPTS = 2000
"""Most attempts of a run whose records are read: Argo waits only a limited time for an answer."""
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem;max-width:64rem;color:#1f2328;background:#fff}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3rem .8rem .3rem 0;vertical-align:top;"
    "border-bottom:1px solid #d1d9e0}code{background:#eff2f5;padding:.1rem .3rem}h1{font-size:1.4rem}"
    ".failed{color:#b3261e}.done{color:#1a7f37}"
)


def store_report(store: Store, binding: RunBinding, end: SubmissionEnd) -> NodeOutputs | None:
    """Store the page of the submission that ``end`` seals, and return it as the outputs of the finalize node.

    The page that was stored first stays. None if the store refuses: a missing page must not keep a workflow from
    its end.
    """
    key = binding.layout.submission_report(binding.submission)
    try:
        page = _render_page(store, binding, end)
        with contextlib.suppress(ObjectExistsError):
            store.create(key, page.encode())
    except (StoreError, IntegrityError) as error:
        _log.warning("report.not_stored", key=key, error=str(error))
        return None
    return NodeOutputs(artifacts=[ArtifactValue(name=REPORT_ARTIFACT, s3=S3Location(key=store.artifact_key(key)))])


def _render_page(store: Store, binding: RunBinding, end: SubmissionEnd) -> str:
    title = f"Run {binding.run}, submission {binding.submission}: {shown_status(end.status, end.message)}"
    style = "done" if end.status == "Succeeded" else "failed"
    reason = f"<p>{escape(end.message)}</p>" if end.message and style == "failed" else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<style>{_STYLE}</style></head>\n<body><h1 class="{style}">{escape(title)}</h1>\n{reason}\n'
        f"{''.join(_attempt_table(store, binding))}\n{_commands(binding.run, style)}\n</body></html>\n"
    )


def _attempt_table(store: Store, binding: RunBinding) -> Iterator[str]:
    history = RunHistory.for_display(store, binding.run)
    listed = sum(len(numbers.claimed) for numbers in history.attempt_numbers.values())
    if listed > _MAX_ATTEMPTS:
        yield f"<p>The run has {listed:,} attempts, too many for this page; the commands below list them.</p>"
        return
    attempts, names = history.attempts, history.names
    if attempts:
        yield "<table><thead><tr><th>Step<th>Attempt<th>Submission<th>Result<th>Time<th>GPUs<th>Node</tr></thead>\n"
        for step in names.sort(attempts):
            spec = binding.pipeline.steps.get(names.name(step).partition("[")[0])
            gpus = spec.gpu.gpus if spec and spec.gpu else 0
            yield from (_attempt_row(names.name(step), attempt, gpus) for attempt in attempts[step])
        yield "</table>\n"
    yield from (f'<p class="failed">{escape(message)}</p>\n' for message in history.damaged)


def _attempt_row(name: str, attempt: Attempt, gpus: int) -> str:
    claim, end = attempt
    evidence = end.evidence.node if end and end.evidence else ""
    nodes = claim.nodes or ((evidence,) if evidence else ())
    held = format_duration((end.ended_at - claim.written_at).total_seconds()) if end else "-"
    cells = (name, claim.attempt, claim.submission, _result(attempt), held, gpus or "-", ", ".join(nodes) or "-")
    return "<tr>" + "".join(f"<td>{escape(str(cell))}" for cell in cells) + "</tr>\n"


def _result(attempt: Attempt) -> str:
    if attempt.end is None:
        return "no end recorded"
    if attempt.end.outcome is AttemptEndOutcome.DONE:
        return "done"
    cause = attempt.end.cause.display_name if attempt.end.cause else attempt.end.outcome_name
    return f"{cause}: {attempt.end.message}" if attempt.end.message else cause


def _commands(run: str, style: str) -> str:
    commands = {"what the run is now": "get", "what failures cost": "report", "the program's output": "logs"}
    if style == "failed":
        commands = {"go on, with only the steps that are missing": "resume", **commands}
    rows = "".join(f"<li>{escape(what)}: <code>tiphys {verb} {escape(run)}</code>" for what, verb in commands.items())
    return f"<ul>{rows}</ul>"
