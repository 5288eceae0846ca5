"""Which trial is the best, and what is told of the others.

| a trial has | its value is |
|---|---|
| an output parameter of the metric's name | that one |
| checkpoints with the metric | the best of those that may be used |
| neither | none, and it comes last |
"""

import json
from datetime import timedelta
from typing import Any

import pytest
from support.builders.lineage import RUN, claim_of, commit, write_claim

from tiphys.errors import IntegrityError, NotFoundError, UsageError
from tiphys.lineage import best
from tiphys.lineage.quarantine import quarantine_checkpoint
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.tree import read_lineage_tree
from tiphys.lineage.trials import SweepReport, TrialState, read_sweep
from tiphys.protocol.fan_out import SWEEP_ANNOTATION, assign_item_ids, format_item_parameters
from tiphys.protocol.step_spec import (
    PIPELINE_ANNOTATION,
    STEP_ANNOTATION,
    BestCheckpoints,
    CheckpointPolicy,
    GpuRequest,
    StepKind,
    StepSpec,
)
from tiphys.records import (
    AttemptEnd,
    AttemptEndOutcome,
    Cause,
    CheckpointRef,
    ItemBinding,
    Output,
    OutputKind,
    OutputObject,
    ReuseRecord,
    RunRecord,
    SubmissionClaim,
    SubmissionKind,
    item_step_id,
    json_digest,
    utc_now,
)
from tiphys.store import RunLayout, fence_attempt

ITEMS = [{"lr": 0.1, "name": "a"}, {"lr": 0.2, "name": "b"}, {"lr": 0.3, "name": "c"}]
STEPS = [item.step_id for item in assign_item_ids("fit", ITEMS)]


def spec(name: str = "fit", **fields: Any) -> StepSpec:
    return StepSpec(**{"name": name, "kind": StepKind.TRAIN, "template": "t", "fan_out": True, **fields})


def write_run(store, *specs: StepSpec, run: str = RUN, **task: Any) -> None:
    tasks = [{"name": one.name, "template": one.name, **(task or {"withItems": ITEMS})} for one in specs]
    templates = [
        {"name": one.name, "metadata": {"annotations": {STEP_ANNOTATION: one.model_dump_json()}}} for one in specs
    ]
    annotations = {PIPELINE_ANNOTATION: "digits", f"{SWEEP_ANNOTATION}fit": "grid of 3"}
    workflow = {
        "metadata": {"annotations": annotations},
        "spec": {"entrypoint": "main", "templates": [{"name": "main", "dag": {"tasks": tasks}}, *templates]},
    }
    record = RunRecord(run=run, pipeline="digits", workflow=workflow, digest=json_digest(workflow))
    store.create(RunLayout(run).run_record, record.to_bytes())


def saved(step: str, attempt: int, global_step: int) -> CheckpointRef:
    return CheckpointRef(lineage=f"{RUN}/{step}", attempt=attempt, global_step=global_step)


def begin(store, step: str, attempt: int = 1, **metrics: float) -> None:
    """An attempt that has committed a checkpoint with ``metrics``, if any are given."""
    write_claim(store, claim_of(attempt, step=step))
    if metrics:
        commit(store, saved(step, attempt, 10 * attempt), metrics=metrics)


def end(
    store,
    step: str,
    attempt: int = 1,
    outcome: AttemptEndOutcome = AttemptEndOutcome.DONE,
    run: str = RUN,
    **outputs: str,
) -> None:
    cause = Cause.USER_ERROR if outcome is AttemptEndOutcome.FAILED else None
    made = tuple(
        Output(name=name, kind=OutputKind.PARAMETER, key=f"k/{name}", value=text) for name, text in outputs.items()
    )
    record = AttemptEnd(
        run=run, step=step, attempt=attempt, submission=1, outcome=outcome, cause=cause, message="m", outputs=made
    )
    store.create(RunLayout(run).attempt_end(step, attempt), record.to_bytes())


def read(store, metric: str | None = "loss", mode: Any = None, step: str = "") -> SweepReport:
    return read_sweep(RunHistory.for_display(store, RUN), step, metric, mode, utc_now())


def values(sweep: SweepReport) -> list[tuple[str, float | None, str]]:
    return [(trial.parameters["name"], trial.value, trial.value_from) for trial in sweep.trials]


def test_the_best_that_is_done_is_marked_though_one_that_runs_is_ahead(store):
    write_run(store, spec())
    begin(store, STEPS[0], loss=0.5)
    end(store, STEPS[0])
    begin(store, STEPS[1], loss=0.7)
    end(store, STEPS[1])
    begin(store, STEPS[2], loss=0.1)

    found = read(store)

    assert values(found) == [("c", 0.1, "1-10"), ("a", 0.5, "1-10"), ("b", 0.7, "1-10")]
    assert found.best == STEPS[0]
    assert [trial.state for trial in found.trials] == [TrialState.RUNNING, TrialState.DONE, TrialState.DONE]
    assert (found.description, found.metric, found.mode) == ("grid of 3", "loss", "min")
    assert read(store, mode="max").best == STEPS[1]


def test_an_output_speaks_of_what_came_out_in_the_end(store):
    write_run(store, spec())
    begin(store, STEPS[0], loss=0.1)
    end(store, STEPS[0], loss="0.9", note="no number")
    begin(store, STEPS[1], loss=0.5)
    end(store, STEPS[1])

    found = read(store)

    assert values(found) == [("b", 0.5, "1-10"), ("a", 0.9, "output"), ("c", None, "")]
    assert found.trials[1].metrics == ("loss",)


def test_the_best_of_all_attempts_counts_and_none_that_may_not_be_used(store):
    write_run(store, spec())
    begin(store, STEPS[0], loss=0.5)
    end(store, STEPS[0], outcome=AttemptEndOutcome.FAILED)
    write_claim(store, claim_of(2, saved(STEPS[0], 1, 10), step=STEPS[0]))
    commit(store, saved(STEPS[0], 2, 20), metrics={"loss": 0.8})
    commit(store, saved(STEPS[0], 2, 30), metrics={"loss": 0.2})
    quarantine_checkpoint(store, saved(STEPS[0], 2, 30), "bytes", by="verify")

    assert values(read(store))[0] == ("a", 0.5, "1-10")


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_metric_that_is_no_finite_number_is_never_the_best(store, mode):
    write_run(store, spec())
    for step, loss in zip(STEPS, ("nan", "inf" if mode == "max" else "-inf", "0.4"), strict=True):
        begin(store, step)
        end(store, step, loss=loss)

    assert read(store, mode=mode).best == STEPS[2]
    assert [name for name, _, _ in values(read(store, mode=mode))][-1] == "a"


def test_of_equals_the_first_is_taken(store):
    write_run(store, spec())
    for step in reversed(STEPS):
        begin(store, step)
        end(store, step, loss="1")
    assert read(store).best == STEPS[0]


def test_trials_are_compared_by_the_metric_of_the_checkpoint_policy(store):
    keep = CheckpointPolicy(keep_best=BestCheckpoints(metric="accuracy", order="max"))
    write_run(store, spec(checkpoints=keep))
    found = [read(store, None), read(store, "accuracy"), read(store, "accuracy", "min"), read(store, "loss")]
    assert [(one.metric, one.mode) for one in found] == [
        ("accuracy", "max"),
        ("accuracy", "max"),
        ("accuracy", "min"),
        ("loss", "min"),
    ]


def test_trials_without_a_metric_are_listed_in_their_order(store):
    write_run(store, spec())
    begin(store, STEPS[1], loss=0.5, error=1.0)
    found = read(store, None)
    assert [trial.index for trial in found.trials] == [0, 1, 2]
    assert (found.best, found.trials[1].metrics) == ("", ("error", "loss"))


def test_attempts_and_gpu_hours_are_counted(store):
    write_run(store, spec(gpu=GpuRequest(gpus=4)))
    begin(store, STEPS[0])
    end(store, STEPS[0], outcome=AttemptEndOutcome.FAILED)
    begin(store, STEPS[0], 2)
    end(store, STEPS[0], 2, outcome=AttemptEndOutcome.FENCED)
    begin(store, STEPS[0], 3)
    fence_attempt(store, RUN, STEPS[0], 3, "its pod is gone", last_alive_at=utc_now() + timedelta(minutes=30))
    begin(store, STEPS[1])

    later = utc_now() + timedelta(hours=1)
    first, second, third = read_sweep(RunHistory.for_display(store, RUN), "fit", None, None, later).trials

    assert [trial.attempts for trial in (first, second, third)] == [3, 1, 0]
    assert [trial.state for trial in (first, second, third)] == ["Interrupted", "Running", "Waiting"]
    assert 2 <= first.gpu_hours < 2.5, "what has ended counts no further, and a lost one to its last sign of life"
    [fit] = read_lineage_tree(RunHistory(store, RUN)).steps[:1]
    assert fit.attempts[2].ended_at == RunHistory(store, RUN).read_end(STEPS[0], 3).ended_at
    assert 4 <= second.gpu_hours < 4.5
    assert third.gpu_hours == 0


def test_a_result_of_another_run_counts_as_this_ones(store):
    write_run(store, spec())
    end(store, "other", 3, run="other-run", loss="0.25")
    adopted = ReuseRecord(
        run=RUN,
        submission=1,
        step=STEPS[1],
        step_key="k",
        source_run="other-run",
        source_step="other",
        source_attempt=3,
    )
    store.create(RunLayout(RUN).reused(1, STEPS[1]), adopted.to_bytes())
    first = read(store).trials[0]
    assert (first.step, first.state, first.value, first.attempts) == (STEPS[1], TrialState.DONE, 0.25, 0)


def test_items_that_a_step_made_are_known_from_their_bindings(store):
    write_run(store, spec(), withParam="{{tasks.propose.outputs.parameters.lrs}}")
    step = item_step_id("fit", "0.5", 0)
    bound = ItemBinding(run=RUN, submission=1, step=step, instance="wf.fit(0:0.5)", label="fit(0:0.5)", item="0.5")
    sent = SubmissionClaim(run=RUN, submission=1, kind=SubmissionKind.ORIGINAL, workflow_name=RUN, namespace="default")
    store.create(RunLayout(RUN).submission(1), sent.to_bytes())
    store.create(RunLayout(RUN).item(1, step), bound.to_bytes())
    begin(store, step, loss=1.0)
    [trial] = read(store).trials
    assert trial.name == "fit[0]"
    assert (trial.step, trial.parameters, trial.value) == (step, {"item": 0.5}, 1.0)


def test_the_lineage_names_items_by_what_they_were_given(store):
    write_run(store, spec(checkpoints=CheckpointPolicy()))
    begin(store, STEPS[1], loss=0.5)
    assert [(one.step, one.item) for one in read_lineage_tree(RunHistory.for_display(store, RUN)).steps] == [
        (STEPS[1], "lr=0.2 name=b")
    ]


def test_a_run_without_a_sweep_or_with_several_says_so(store):
    write_run(store, spec(), spec("more"))
    with pytest.raises(UsageError, match="several sweeps; name one as RUN/STEP; its fanned-out steps are: fit, more"):
        read(store)
    assert read(store, step="more").step == "more"
    with pytest.raises(UsageError, match="no sweep 'nope'"):
        read(store, step="nope")
    write_run(store, spec(fan_out=False), run="plain", when="true")
    with pytest.raises(UsageError, match="none of its steps fans out"):
        read_sweep(RunHistory.for_display(store, "plain"), "", None, None, utc_now())


class TestBest:
    """The program behind a sweep."""

    def run(self, store, monkeypatch, tmp_path, *outputs: str) -> int:
        paths = {f"OUTPUT_{name}": str(self.path(tmp_path, name)) for name in outputs}
        for name, value in {"STORE": store.url, "RUN": RUN, **paths}.items():
            monkeypatch.setenv(f"TIPHYS_{name}", value)
        return best.main(["fit", "--metric", "loss", "--mode", "min"])

    def path(self, tmp_path, name: str):
        return tmp_path / "outputs" / name

    def finish(self, store, step: str, loss: str, *, damaged: bool = False) -> None:
        """A done trial with a parameter, a file and a folder."""
        layout = RunLayout(RUN)
        prefix = layout.outputs(step, 1)
        contents = {"artifacts/model": step.encode(), "artifacts/logs/a/b": b"1", "artifacts/logs/c": b"2"}
        for place, data in contents.items():
            store.create(f"{prefix}{place}", data)

        def made(name: str, *places: str) -> Output:
            objects = tuple(
                OutputObject(
                    key=f"{prefix}{place}",
                    size=len(contents[place]),
                    sha256=best.hashlib.sha256(b"other" if damaged else contents[place]).hexdigest(),
                )
                for place in places
            )
            key = f"{prefix}artifacts/{name}"
            return Output(name=name, kind=OutputKind.ARTIFACT, key=key, directory=len(places) > 1, objects=objects)

        value = Output(name="loss", kind=OutputKind.PARAMETER, key=f"{prefix}parameters/loss", value=loss)
        write_claim(store, claim_of(1, step=step))
        record = AttemptEnd(
            run=RUN,
            step=step,
            attempt=1,
            submission=1,
            outcome=AttemptEndOutcome.DONE,
            outputs=(value, made("model", "artifacts/model"), made("logs", "artifacts/logs/a/b", "artifacts/logs/c")),
        )
        store.create(layout.attempt_end(step, 1), record.to_bytes())

    def test_the_outputs_of_the_best_trial_become_those_of_the_step(self, store, monkeypatch, tmp_path, capsys):
        write_run(store, spec())
        self.finish(store, STEPS[0], "0.5")
        self.finish(store, STEPS[1], "0.4")

        assert self.run(store, monkeypatch, tmp_path, "TRIAL", "LOSS", "MODEL", "LOGS") == 0

        assert json.loads(self.path(tmp_path, "TRIAL").read_text()) == ITEMS[1]
        assert self.path(tmp_path, "LOSS").read_text() == "0.4"
        assert self.path(tmp_path, "MODEL").read_bytes() == STEPS[1].encode()
        logs = self.path(tmp_path, "LOGS")
        assert ((logs / "a/b").read_bytes(), (logs / "c").read_bytes()) == (b"1", b"2")
        assert capsys.readouterr().out == f"fit[1] {format_item_parameters(ITEMS[1])}: loss 0.4\n"

    def test_without_a_value_it_fails_and_says_what_there_is(self, store, monkeypatch, tmp_path, capsys):
        write_run(store, spec())
        begin(store, STEPS[0], accuracy=0.5)
        end(store, STEPS[0])
        assert self.run(store, monkeypatch, tmp_path) == NotFoundError.exit_code
        assert "has a finite 'loss'" in (printed := capsys.readouterr().err)
        assert "recorded metrics are: accuracy" in printed

    def test_a_damaged_output_is_not_handed_on(self, store, monkeypatch, tmp_path, capsys):
        write_run(store, spec())
        self.finish(store, STEPS[0], "0.5", damaged=True)
        assert self.run(store, monkeypatch, tmp_path, "MODEL") == IntegrityError.exit_code
        assert "does not match its SHA-256" in capsys.readouterr().err

    @pytest.mark.parametrize("typed", [["fit"], ["fit", "--metric", "loss"], ["fit", "--mode", "min"]])
    def test_missing_arguments_are_named(self, typed, capsys):
        with pytest.raises(SystemExit):
            best.main(typed)
        assert "the following arguments are required" in capsys.readouterr().err

    def test_outside_of_a_pipeline_it_says_what_it_is(self, monkeypatch, capsys):
        monkeypatch.delenv("TIPHYS_STORE", raising=False)
        assert best.main(["fit", "--metric", "loss", "--mode", "min"]) == UsageError.exit_code
        assert "TIPHYS_STORE is not set" in capsys.readouterr().err
