"""Reads what the page of a log shows: the last lines of the programs of one attempt, and how its program crashed.

The store keeps what a training program copied of its output, and what it reported
about its own crash. All other output is with the pods, the local engine or Argo's
archive, and whoever serves the pages finds it there.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from markupsafe import escape

from hera_pipelines.control_characters import replace_control_characters
from tiphys.errors import IntegrityError, NotFoundError, TiphysError
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.step_names import StepNames
from tiphys.records import CrashRecord
from tiphys.store import Attempt, RunLayout, Store, Submission
from tiphys.store.incarnations import find_crash_record
from tiphys.store.program_output import read_program_output

MAX_HTML_BYTES = 128 << 10
"""Most HTML of the logs of a page, all pods together."""
MAX_PODS = 16
"""Most pods whose logs are on a page."""
MAX_LINES = 5000
_MAX_READ_BYTES = 1 << 20
"""Most bytes that are read of the log of a pod."""
MAX_LINKS = 20
"""Most other attempts to which a page links."""
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n(?:[ ].*\n)+\S.*", re.MULTILINE)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

AttemptLogs = Callable[[Attempt, Submission, int, int], Iterable[tuple[str, str, Iterable[str]]]]
"""Finds the logs of the pods of an attempt of a submission: name, where it comes from, and lines.

The numbers are the most lines, and the most bytes, of each. Raises `TiphysError`.
"""


@dataclass(frozen=True)
class PodLogView:
    pod: str
    source: str
    text: str
    is_cut: bool
    """Whether the log begins earlier."""


@dataclass(frozen=True)
class LogView:
    run: str
    step: str
    """Step id."""
    name: str
    """Name of the step or item for people."""
    attempt: Attempt
    attempts: tuple[int, ...]
    """Numbers of the newest attempts of the step, and of this one."""
    logs: tuple[PodLogView, ...]
    hidden_pods: bool
    problem: str
    """Why no log can be read; empty if one is shown, or if none is left."""
    crash: CrashRecord | None

    @property
    def is_live(self) -> bool:
        return self.attempt.end is None and not self.problem


def read_log_view(history: RunHistory, find_logs: AttemptLogs, step: str, number: int | None) -> LogView:
    """Read the logs of an attempt of a step, or of an item of a fan-out, by name or id; ``number`` None: of the newest.

    Raises:
        NotFoundError: there is no such run, step or attempt.
        UsageError: several items have this value.
        StoreError: the store does not answer.
    """
    run, names = history.run, history.names
    step = names.resolve(step)
    listed = history.list_step_attempts(step)
    attempts = sorted(listed.claimed | listed.ended, reverse=True)
    if not attempts:
        raise NotFoundError(f"{run}/{names.name(step)} has no attempt{_list_items(names, step)}")
    chosen = max(attempts) if number is None else number
    if chosen not in attempts:
        raise NotFoundError(f"{run}/{names.name(step)} has no attempt {chosen}; its newest is {max(attempts)}")
    attempt = history.read_attempt(step, chosen)
    logs, has_more, problem = _read_logs(history, find_logs, attempt)
    return LogView(
        run=run,
        step=step,
        name=names.name(step),
        attempt=attempt,
        attempts=tuple(sorted({*attempts[:MAX_LINKS], chosen})),
        logs=logs,
        hidden_pods=has_more,
        problem=problem,
        crash=_find_crash(history, step, chosen),
    )


def read_traceback(history: RunHistory, find_logs: AttemptLogs, step: str, number: int) -> str:
    """The last traceback in the logs of an attempt, up to the error; empty if there is none."""
    logs, _, _ = _read_logs(history, find_logs, history.read_attempt(step, number))
    found = [match for log in logs for match in _TRACEBACK.findall(log.text)]
    return found[-1] if found else ""


def _list_items(names: StepNames, step: str) -> str:
    items = [item.name for item in names.items(step)]
    return f"; its items are {', '.join(items[:10])}{' …' if len(items) > 10 else ''}" if items else ""


def _read_logs(
    history: RunHistory, find_logs: AttemptLogs, attempt: Attempt
) -> tuple[tuple[PodLogView, ...], bool, str]:
    submissions = {entry.claim.submission: entry for entry in history.submissions}
    submission = submissions.get(attempt.claim.submission)
    if submission is None:
        return (), False, f"the record of submission {attempt.claim.submission} cannot be read"
    problem = ""
    try:
        found = list(islice(find_logs(attempt, submission, MAX_LINES, _MAX_READ_BYTES), MAX_PODS + 1))
        shown = found[:MAX_PODS]
        budget = MAX_HTML_BYTES // max(1, len(shown))
        if shown:
            return tuple(_cut(*pod, budget) for pod in shown), len(found) > MAX_PODS, ""
    except (TiphysError, OSError) as error:
        problem = str(error)
    stored = _read_stored(history.store, attempt)
    return stored, False, "" if stored else problem


def _read_stored(store: Store, attempt: Attempt) -> tuple[PodLogView, ...]:
    """What the program stored of its output; empty if it stored none."""
    claim, layout = attempt.claim, RunLayout(attempt.claim.run)
    lines = read_program_output(
        store, layout, claim.step, claim.attempt, last_lines=MAX_LINES, last_bytes=MAX_HTML_BYTES
    )
    source = f"the copy that the program stored below {layout.program_output(claim.step, claim.attempt)}"
    return (_cut("Output", source, lines, MAX_HTML_BYTES),) if lines else ()


def _cut(pod: str, source: str, lines: Iterable[str], budget: int) -> PodLogView:
    """The last whole lines that fit into ``budget`` bytes of HTML; the end of the last line if that alone is longer."""
    kept: deque[str] = deque()
    shown = [replace_control_characters(_COLOURS.sub("", line.rstrip("\r\n"))) for line in lines]
    for line in reversed(shown):
        budget -= len(escape(line).encode()) + 1
        if budget < 0:
            break
        kept.appendleft(line)
    if shown and not kept:
        kept.append(shown[-1][-(MAX_HTML_BYTES // MAX_PODS // 8) :])
    return PodLogView(pod, source, "\n".join(kept), is_cut=len(kept) < len(shown) or len(shown) >= MAX_LINES)


def _find_crash(history: RunHistory, step: str, attempt: int) -> CrashRecord | None:
    try:
        return find_crash_record(history.store, history.run, step, attempt)
    except IntegrityError:
        return None
