"""What would run, and why: the decision that a resume carries out.

A task runs again when its result is missing or damaged, and so does everything
behind it, because its inputs may change. Such a task is only *kept* in the next
Workflow: if its inputs turn out the same, its admit takes the old result over.

A plain task keeps no record. It runs again unless everything that reads it is
finished: those readers could only start after it had ended.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from tiphys.protocol.pipeline import CompiledPipeline, parameters_of
from tiphys_controller import conditions
from tiphys_controller.draft import Action, Draft, TaskPlan
from tiphys_controller.evidence import EndKey
from tiphys_controller.exports import exporting
from tiphys_controller.finished import TaskOutputs
from tiphys_controller.graph import Graph
from tiphys_controller.observe import RunState


@dataclass(frozen=True)
class Plan:
    """Decisions in the order of the DAG.

    While ``unread`` names end records, the plan is not final: read them into
    the state and plan again.
    """

    tasks: tuple[TaskPlan, ...]
    finished: Mapping[str, Mapping[str, TaskOutputs]]
    """For each task that runs, what the skipped tasks left that it reads."""
    unread: frozenset[EndKey] = frozenset()

    @cached_property
    def running(self) -> tuple[str, ...]:
        """Names of the tasks that run."""
        return tuple(task.name for task in self.tasks if task.action is Action.RUN)

    @cached_property
    def facts(self) -> conditions.Facts:
        """Results of the skipped tasks, for the conditions of the others."""
        return {task.name: task.facts for task in self.tasks if task.action is Action.SKIP and task.facts is not None}


def plan(pipeline: CompiledPipeline, state: RunState, graph: Graph | None = None) -> Plan:
    """Decide every task of the entry DAG; ``graph`` is that of ``pipeline``, where somebody has made it already.

    Raises:
        UsageError: the DAG cannot be read.
    """
    graph = graph or Graph.of(pipeline)
    judge = cache(state.verdict)
    parameters = parameters_of(pipeline.manifest)
    exported = dict(exporting(pipeline, graph))
    demands = {name: reason for name, reason in state.renewed.items() if name in graph.tasks}
    while True:
        draft = Draft(graph, state, judge, parameters, demands)
        found = {name: reason for name, reason in draft.new_demands(exported) if name not in demands}
        if not found:
            return _plan(graph, draft)
        demands |= found


def _plan(graph: Graph, draft: Draft) -> Plan:
    finished = {name: draft.finished(graph.tasks[name]) for name in draft.running()}
    return Plan(tuple(draft.decided.values()), finished, frozenset(draft.unread))
