"""``tiphys triggers``: lists the triggers of a namespace, and what each would make of an object."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import typer
from tiphys_controller.submit.triggers.catalog import Trigger, list_trigger_templates, read_trigger
from tiphys_controller.submit.triggers.start import check_object_name, find_triggered_run, read_last_triggered_run

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import (
    FormatOption,
    NamespaceOptions,
    StoreOption,
    existing_store,
    with_option_groups,
)
from tiphys.errors import UsageError
from tiphys.records import ObjectVersion, TriggeredRunRecord
from tiphys.records.trigger import is_recent, split_object_url
from tiphys.store import Store

EXAMPLES = """\b
Examples:
  tiphys triggers -n ml --store s3://ml-runs/tiphys
  tiphys triggers -n ml --store s3://ml-runs/tiphys --test s3://ml-raw/ml/incoming/a.csv
"""
_TIME = "%Y-%m-%d %H:%M:%S"


@with_option_groups
def triggers(
    command: typer.Context,
    *,
    test: Annotated[
        str | None,
        typer.Option("--test", metavar="URL", help="Say what each trigger makes of this object; nothing is started."),
    ] = None,
    store: StoreOption = None,
    cluster: NamespaceOptions,
    output: FormatOption = Format.TABLE,
) -> None:
    """List the triggers of a namespace: their objects, and the last run.

    A trigger belongs to a WorkflowTemplate and starts or resumes a run for each
    object that arrives in a bucket. --test reads the object with your own
    credentials. Where triggers may look is a setting of the controller, which this
    command does not know.
    """
    screen: Screen = command.obj
    runs = existing_store(screen, store)
    api = cluster.connect(command)
    rows = [_read_row(runs, template) for template in list_trigger_templates(api, api.namespace)]
    if test is not None:
        _show_test(screen, runs, rows, test)
    elif output is Format.TABLE:
        _show_triggers(screen, rows, api.namespace)
    else:
        items = [row.as_document() for row in rows]
        screen.typed_document("TriggerList", output, items=items)


class _TriggerRow(NamedTuple):
    template: str
    trigger: Trigger | None
    last: TriggeredRunRecord | None
    problem: str = ""

    def as_document(self) -> dict[str, object]:
        if self.trigger is None:
            return {"trigger": self.template, "problem": self.problem}
        return {
            "trigger": self.template,
            **self.trigger.spec.model_dump(mode="json", exclude={"since"}),
            "since": self.trigger.since.isoformat(),
            "last": self.last and self.last.model_dump(mode="json", exclude={"nonce", "version"}),
        }


def _read_row(store: Store, template: dict[str, object]) -> _TriggerRow:
    name = str(template["metadata"]["name"])  # type: ignore[index]
    try:
        trigger = read_trigger(template)
    except UsageError as error:
        return _TriggerRow(name, None, None, str(error))
    return _TriggerRow(name, trigger, read_last_triggered_run(store, name))


def _show_triggers(screen: Screen, rows: Sequence[_TriggerRow], namespace: str) -> None:
    if not rows:
        screen.note(f"namespace {namespace} has no WorkflowTemplate with a trigger; see docs/triggers.md")
        return
    columns = ("TRIGGER", "OBJECTS", "STARTS", "LAST OBJECT", "RUN", "SINCE")
    screen.table(columns, [_cells(row) for row in rows], hide=("SINCE", "LAST OBJECT"))
    for row in rows:
        if row.problem:
            screen.note(f"{row.template}: {row.problem}")


def _cells(row: _TriggerRow) -> Sequence[str]:
    if row.trigger is None:
        return (row.template, "damaged", "nothing", "", "", "")
    spec = row.trigger.spec
    last = (row.last.object.url, row.last.run) if row.last else ("none", "")
    starts = f"resumes {spec.resume}" if spec.resume else "runs"
    return (row.template, f"{spec.objects}{spec.pattern}", starts, *last, f"{row.trigger.since:{_TIME}}")


def _show_test(screen: Screen, store: Store, rows: Sequence[_TriggerRow], url: str) -> None:
    from tiphys_controller.submit.triggers.bucket import S3Buckets

    bucket, key = split_object_url(url)
    version = S3Buckets().find(bucket, key)
    for row in rows:
        screen.write(f"{row.template}: {_describe_test(store, row, bucket, key, version)}")


def _describe_test(store: Store, row: _TriggerRow, bucket: str, key: str, version: ObjectVersion | None) -> str:
    trigger = row.trigger
    if trigger is None:
        return f"no run: {row.problem}"
    spec = trigger.spec
    if bucket != spec.bucket or not key.startswith(spec.prefix):
        return f"no run: it does not lie below {spec.objects}"
    if not spec.matches(bucket, key):
        return f"no run: the pattern {spec.pattern} does not match {key[len(spec.prefix) :]}"
    if version is None:
        return "no run: there is no such object"
    if not is_recent(version, trigger.since):
        return f"no run: it was modified at {version.modified:{_TIME}}, before {trigger.since:{_TIME}}"
    if (done := find_triggered_run(store, trigger, version)) is not None:
        return f"has had its run: {done.run}"
    try:
        check_object_name(version)
    except UsageError as error:
        return f"no run: {error}"
    if spec.resume:
        return f"would resume {spec.resume}"
    values = ", ".join(f"{name}={version.read_field(field)}" for name, field in spec.parameters.items())
    return f"would start a run{f' with {values}' if values else ''}"
