"""From the lineage tree that storage gives to what is drawn of it."""

from collections.abc import Mapping

from hera_pipelines.draw.drift import in_short
from hera_pipelines.draw.model import Dot, Ending, Lane, Lineage, Place
from tiphys.lineage import AttemptNode, CheckpointNode, LineageTree, StepLineage
from tiphys.records import CheckpointRef, Facts


def lineages_of(tree: LineageTree) -> list[Lineage]:
    """One `Lineage` per training step of the run."""
    return [
        Lineage(
            tree.run,
            step.step,
            tuple(_lane(attempt, _facts(step), step.lineage) for attempt in step.attempts),
            step.note,
            step.item,
        )
        for step in tree.steps
    ]


def _facts(step: StepLineage) -> Mapping[CheckpointRef, Facts]:
    return {node.ref: node.facts for attempt in step.attempts for node in attempt.checkpoints if node.committed_at}


def _lane(attempt: AttemptNode, facts: Mapping[CheckpointRef, Facts], lineage: str) -> Lane:
    origin = _origin(attempt)
    own = origin is not None and origin.lineage == lineage
    return Lane(
        attempt=attempt.attempt,
        submission=attempt.submission,
        origin=Place(origin.attempt, origin.global_step) if origin and own else None,
        fork=f"step {origin.global_step} of attempt {origin.attempt} of {origin.lineage}" if origin and not own else "",
        ending=Ending(attempt.outcome.value) if attempt.outcome else Ending.OPEN,
        message=_message(attempt),
        dots=tuple(_dot(node, facts) for node in attempt.checkpoints),
        report=attempt.preemption.message if attempt.preemption else "",
    )


def _origin(attempt: AttemptNode) -> CheckpointRef | None:
    """What the attempt really went on from.

    Admission proposes a checkpoint by its sizes; the trainer reads the bytes
    and may have to take an older one. Each of its commits names that one; the
    first may be gone by retention.
    """
    restored = (node.restored for node in attempt.checkpoints if node.committed_at)
    return next(restored, attempt.starts_from)


def _message(attempt: AttemptNode) -> str:
    cause = attempt.cause.value.replace("_", " ") if attempt.cause else ""
    return ": ".join(part for part in (cause, attempt.message) if part)


def _dot(node: CheckpointNode, known: Mapping[CheckpointRef, Facts]) -> Dot:
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in node.metrics.items())
    size = size_text(node.size_bytes) if node.size_bytes else ""
    why = f"saved after {node.saved_because}" if node.saved_because in ("asked", "sigterm") else ""
    made_with = in_short(node.facts, known.get(node.parent) if node.parent else None)
    facts = tuple(fact for fact in (size, metrics, *made_with, why, node.reason) if fact)
    return Dot(Place(node.ref.attempt, node.ref.global_step), node.status, metrics, facts)


def size_text(size_bytes: int) -> str:
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
