"""What the processes of one attempt report: that the launcher started them again, and how they crashed.

Both lie in one folder, so that one listing says which process was the last, and whether it left a crash report.
"""

import contextlib
import itertools

from tiphys.errors import IntegrityError
from tiphys.records import CrashRecord, GangRestartDecision, check_step_id
from tiphys.store.base import Store
from tiphys.store.claims import find_record
from tiphys.store.layout import RunLayout

_MAX_LISTED = 10_000
"""Objects of one attempt that are looked at: a program may write any number of them."""


def incarnation_key(layout: RunLayout, step: str, attempt: int, incarnation: int) -> str:
    """Key of the `IncarnationRecord` of a process after the first."""
    return f"{layout.incarnations(step, attempt)}{incarnation:09d}.json"


def crash_key(layout: RunLayout, step: str, attempt: int, incarnation: int = 1) -> str:
    """Key of the crash report of one process of an attempt."""
    return f"{layout.incarnations(step, attempt)}{incarnation:09d}.crash.json"


def gang_restart_prefix(layout: RunLayout, step: str, attempt: int, incarnation: int) -> str:
    """Prefix of what the members of a gang agree on before they start their programs again, as ``incarnation``."""
    return f"{_gang_prefix(layout, step, attempt)}{incarnation:09d}/"


def joined_members_prefix(layout: RunLayout, step: str, attempt: int) -> str:
    """Prefix of the members that came after the start of an elastic gang, by their numbers."""
    return f"{_gang_prefix(layout, step, attempt)}joined/"


def _gang_prefix(layout: RunLayout, step: str, attempt: int) -> str:
    return f"{layout.data}gang-restarts/{check_step_id(step)}/{attempt:09d}/"


def gang_decision_key(layout: RunLayout, step: str, attempt: int, incarnation: int) -> str:
    """Key of the `GangRestartDecision`: whether they do."""
    return f"{gang_restart_prefix(layout, step, attempt, incarnation)}decision.json"


def stored_outputs_prefix(layout: RunLayout, step: str, attempt: int) -> str:
    """Prefix of the marks of the member of an elastic gang that stores the outputs."""
    return f"{_gang_prefix(layout, step, attempt)}outputs/"


def count_incarnations(store: Store, run: str, step: str, attempt: int) -> int:
    """How often the program of an attempt was started: 1, and the restarts in its pod that it has reported."""
    prefix = RunLayout(run).incarnations(step, attempt)
    listed = itertools.islice(store.list(prefix), _MAX_LISTED)
    names = (info.key.removeprefix(prefix) for info in listed)
    numbers = (int(name[:9]) for name in names if len(name) == 14 and name[:9].isdecimal() and name[9:] == ".json")
    return max((number for number in numbers if number <= _MAX_LISTED), default=1) or 1


def find_gang_host(store: Store, run: str, step: str, attempt: int) -> int:
    """The member at which those of an elastic gang met last: 0, unless another one has taken its place."""
    last = count_incarnations(store, run, step, attempt)
    key = gang_decision_key(RunLayout(run), step, attempt, last)
    with contextlib.suppress(IntegrityError):  # of a damaged record, as any program of the tenant can write it
        decision = find_record(store, key, GangRestartDecision) if last > 1 else None
        return decision.host if decision else 0
    return 0


def describe_incarnations(count: int) -> str:
    """How often its program was started, for the message of an end; empty for once."""
    return f"its program was started {count} times" if count > 1 else ""


def find_crash_record(store: Store, run: str, step: str, attempt: int) -> CrashRecord | None:
    """The crash report that the last process of an attempt left; None if it left none.

    Raises:
        IntegrityError: the record is damaged.
    """
    last = count_incarnations(store, run, step, attempt)
    return find_record(store, crash_key(RunLayout(run), step, attempt, last), CrashRecord)
