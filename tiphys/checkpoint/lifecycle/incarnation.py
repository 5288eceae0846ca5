"""Records that the launcher has started the program again in its pod, so that everybody can see it."""

from collections.abc import Mapping
from datetime import UTC, datetime

from tiphys.checkpoint.settings import CheckpointSettings
from tiphys.checkpoint.telemetry.events import EventLog, log_message
from tiphys.errors import TiphysError, UsageError
from tiphys.protocol import environment
from tiphys.records import Cause, IncarnationRecord, utc_now
from tiphys.store import RunLayout, Store, claim_record
from tiphys.store.incarnations import incarnation_key


def record_incarnation(
    run_store: Store, settings: CheckpointSettings, environ: Mapping[str, str], event_log: EventLog
) -> None:
    """Store the `IncarnationRecord` of this process and an event; nothing for the first process of an attempt.

    It comes before the restore, so that a crash report of an earlier process no longer counts as the last one. A
    failure of storage is only logged: the restore meets it next.

    Raises:
        UsageError: the variables are not those of the launcher.
    """
    if settings.incarnation == 1:
        return
    record = read_incarnation(settings, environ)
    seconds = max(0.0, (utc_now() - record.ended_at).total_seconds())
    event = event_log.make_event(
        "program.restarted",
        f"attempt {record.attempt} goes on in its pod, as process {record.incarnation}: its program ended with "
        f"{record.exit_code} ({record.cause.display_name}) {seconds:.1f} s ago",
        incarnation=record.incarnation,
        cause=record.cause.value,
        exit_code=record.exit_code,
        seconds=round(seconds, 3),
    )
    try:
        key = incarnation_key(RunLayout(record.run), record.step, record.attempt, record.incarnation)
        claim_record(run_store, key, record)
    except TiphysError as error:
        log_message(f"the restart could not be recorded: {error}")
    event_log.record([event])


def read_incarnation(settings: CheckpointSettings, environ: Mapping[str, str]) -> IncarnationRecord:
    """The record of this process, by what the launcher says; raises `UsageError` if that is not valid."""
    text = environ.get(environment.RESTARTED_AFTER, "")
    try:
        cause, code, ended_at = text.split()
        return IncarnationRecord(
            run=settings.run,
            step=settings.step,
            attempt=settings.attempt,
            incarnation=settings.incarnation,
            cause=Cause(cause),
            exit_code=int(code),
            ended_at=datetime.fromtimestamp(float(ended_at), UTC),
        )
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"{environment.RESTARTED_AFTER}={text!r} is not what the launcher writes; do not set this variable"
        ) from error
