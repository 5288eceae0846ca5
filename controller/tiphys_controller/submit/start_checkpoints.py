"""Adds to a plan the checkpoint from which each training would go on, for people.

The plugin chooses the checkpoint when the attempt is admitted; this is the same
choice, made earlier. It costs some requests per training, so only the commands
that show a plan make it.
"""

from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.lineage.fork_history import choose_start_checkpoint, find_rerun_submission, read_ancestors
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.validity import read_manifest
from tiphys.records import AttemptEndOutcome, task_name
from tiphys.store import Store, read_step_attempts
from tiphys.store.runs import read_concurrently
from tiphys_controller.submit.plan_report import PlanReport, StartCheckpoint


def add_start_checkpoints(store: Store, report: PlanReport) -> PlanReport:
    """``report`` with the start checkpoints of the trainings that would run.

    Checkpoints on a volume cannot be read here, so their trainings get none.

    Raises:
        StoreError: storage failed.
        IntegrityError: a claim is damaged.
    """
    trainings = [planned for planned in report.steps if planned.kind == "train" and planned.decision == "run"]
    if not trainings:
        return report
    history = RunHistory(store, report.run)
    last, pipeline, ancestors = history.last_submission, history.pipeline, read_ancestors(store, history.record)
    rerun_since = (last.claim if last else history.record).rerun_since

    def find(step: str) -> StartCheckpoint:
        if step in report.rerun or task_name(step) in report.rerun:
            return StartCheckpoint()
        attempts = read_step_attempts(store, report.run, step, [])
        choice = choose_start_checkpoint(
            store,
            report.run,
            step,
            attempts,
            rerun_since=find_rerun_submission(rerun_since, step),
            ancestors=ancestors,
        )
        if choice.checkpoint is None:
            return StartCheckpoint()
        try:
            committed_at = read_manifest(store, choice.checkpoint).written_at
        except (IntegrityError, ObjectMissingError):  # retention removed it just now
            return StartCheckpoint()
        return StartCheckpoint(
            checkpoint=str(choice.checkpoint),
            global_step=choice.checkpoint.global_step,
            committed_at=committed_at,
            is_end=attempts[-1].end.outcome is AttemptEndOutcome.DONE if attempts and attempts[-1].end else False,
        )

    steps = [
        step
        for training in trainings
        if pipeline.steps[training.name].checkpoints and not pipeline.checkpoint_volume_url(training.name)
        for step in ([item.step for item in training.items if not item.done] if training.items else [training.name])
    ]
    starts = dict(zip(steps, read_concurrently(find, steps), strict=True))
    return report.model_copy(
        update={
            "steps": tuple(
                planned.model_copy(
                    update={
                        "starts_from": starts.get(planned.name),
                        "items": tuple(
                            item.model_copy(update={"starts_from": starts.get(item.step)}) for item in planned.items
                        ),
                    }
                )
                for planned in report.steps
            )
        }
    )


def find_finished_trainings(report: PlanReport) -> dict[str, int]:
    """Names of trainings and items that would run although they are finished, each with the step of their checkpoint.

    They go on from their end, so they train nothing unless the change gives them more steps.

    ``report`` is a plan with `add_start_checkpoints`.
    """
    starts = [(step.name, step.starts_from) for step in report.steps]
    starts += [(item.name, item.starts_from) for step in report.steps for item in step.items]
    return {name: start.global_step for name, start in starts if start and start.is_end}
