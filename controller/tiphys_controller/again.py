"""Steps that a person wants to run again although they are done, and everything that hangs on them."""

from collections.abc import Iterable, Mapping

from tiphys.errors import UsageError
from tiphys.protocol.pipeline import CompiledPipeline
from tiphys_controller.graph import Graph


def renewed(pipeline: CompiledPipeline, wanted: Iterable[str]) -> Mapping[str, str]:
    """``wanted`` tasks and all behind them, in the order of the DAG, each with the reason.

    Raises:
        UsageError: there is no such task.
    """
    roots = list(dict.fromkeys(wanted))
    if not roots:
        return {}
    graph = Graph.of(pipeline)
    for name in roots:
        if name not in graph.tasks:
            known = ", ".join(graph.tasks)
            raise UsageError(f"pipeline {pipeline.name} has no step {name!r} to run from; it has: {known}")
    found = dict.fromkeys(roots, "it is asked to run again")
    for name, task in graph.tasks.items():
        if name not in found and (before := sorted(task.needs & found.keys(), key=graph.position.__getitem__)):
            found[name] = f"depends on {before[0]}, which is asked to run again"
    return {name: found[name] for name in graph.tasks if name in found}


def check_volumes(pipeline: CompiledPipeline, names: Iterable[str]) -> None:
    """Refuse to begin trainings anew within their run where only their programs choose what to go on from.

    Raises:
        UsageError: the checkpoints of one of ``names`` lie on a volume.
    """
    for name in names:
        if volume := pipeline.volume(name):
            raise UsageError(
                f"{name} would start again from the beginning, but its checkpoints lie on the volume {volume}, where "
                "its program goes on from the newest one; `tiphys fork` gives it a lineage of its own"
            )
