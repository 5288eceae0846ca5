"""What storage shows of the trainings of a run, for its display."""

import pytest
from support.builders.compiled_workflows import gated, pipeline_of
from support.fakes.memory_store import MemoryStore

from hera_pipelines.cli.progress import local
from hera_pipelines.cli.progress.local import build_training_lookup
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.protocol.step_spec import StepKind
from tiphys.records import ItemBinding, SubmissionClaim, SubmissionKind, TrainingProgress, item_step_id
from tiphys.store import LineageLayout, RunLayout, claim_record, lineage_name

RUN = "sweep-1"
PIPELINE = CompiledPipeline.from_manifest(
    pipeline_of(
        gated("fit", kind=StepKind.TRAIN, withItems=["a", "b"]),
        gated("tune", kind=StepKind.TRAIN, withParam="{{tasks.list.outputs.parameters.items}}"),
        gated("list", withItems=["a"]),
    )
)


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    claim = SubmissionClaim(run=RUN, submission=1, kind=SubmissionKind.ORIGINAL, workflow_name="w", namespace="default")
    claim_record(store, RunLayout(RUN).submission(1), claim)
    return store


def report(store: MemoryStore, step: str, global_step: int) -> None:
    layout = LineageLayout(lineage_name(RUN, step))
    store.create(layout.training_progress_report(1, 1), TrainingProgress(global_step=global_step).to_bytes())


def steps(store: MemoryStore, task: str, *items: str) -> dict[str, int | None]:
    lookup = build_training_lookup(store, RUN, PIPELINE)
    return {name: one.global_step for name, one in lookup(task, items).items.items()}


def test_items_of_a_fan_out_show_their_steps(store: MemoryStore) -> None:
    report(store, item_step_id("fit", "b", 0), 7)
    assert steps(store, "fit", "fit[0]", "fit[1]") == {"fit[1]": 7}
    assert steps(store, "list", "list[0]") == {}


def test_items_that_are_made_at_run_time_show_their_steps_once_they_are_bound(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(local.time, "monotonic", lambda: now[0])
    step = item_step_id("tune", "x", 0)
    report(store, step, 9)
    lookup = build_training_lookup(store, RUN, PIPELINE)
    assert lookup("tune", ["tune[0]"]).items == {}
    binding = ItemBinding(run=RUN, submission=1, step=step, instance="i", label="tune(0:x)", item="x")
    claim_record(store, RunLayout(RUN).item(1, step), binding)
    assert lookup("tune", ["tune[0]"]).items == {}, "names are not read again so soon"
    now[0] = 60.0
    assert lookup("tune", ["tune[0]"]).items["tune[0]"].global_step == 9
