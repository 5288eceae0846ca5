"""Ends what makes the pods of a training on several nodes, once its Workflow is stopped or over.

Argo stops its own pods. Of what a step has created it stops only the pod that
watched; the members would train on, and hold their GPUs, until the Workflow is
deleted.
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import structlog

from tiphys.errors import ConflictError, FencedError, TiphysError
from tiphys.kube import KubeApi, Object
from tiphys.kube.gangs import RESOURCES, stage_of
from tiphys.protocol.gang import GANG_LABEL, WORKFLOW_UID_LABEL, Backend, Stage
from tiphys_controller.kubernetes.metrics import Metrics
from tiphys_controller.kubernetes.seen import SeenWorkflow
from tiphys_controller.kubernetes.view import ClusterView
from tiphys_controller.kubernetes.writer import Writer

_PAUSE_SECONDS = 2.0
LATE_SECONDS = 30.0
"""When to look a second time: a pod of Argo that was just about to create something does so before it ends."""
_log = structlog.get_logger()


class _Watched(NamedTuple):
    """A Workflow in the state in which it was seen: stopped, or over, or both."""

    uid: str
    namespace: str
    state: tuple[str, bool]


def is_ended(workflow: SeenWorkflow) -> bool:
    """Whether no pod of a gang of this Workflow shall live."""
    return bool(workflow.gangs) and (bool(workflow.shutdown) or workflow.finished)


class Gangs:
    """One round looks after the gangs of every Workflow that ended since the last."""

    def __init__(
        self,
        view: ClusterView,
        api: KubeApi,
        writer: Writer,
        metrics: Metrics,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._api = api
        self._writer = writer
        self._metrics = metrics
        self._monotonic = monotonic
        self._first_looks: dict[_Watched, float] = {}
        self._done: set[_Watched] = set()

    def run(self, over: threading.Event) -> None:
        """Work until ``over``."""
        version = -1
        while not over.is_set():
            version = self._view.wait(version, _PAUSE_SECONDS)
            self.end()

    def end(self) -> None:
        """Delete what goes on for an ended Workflow; what could not be looked at is so in the next round."""
        ended = {_watched(one): one for one in self._view.workflows() if is_ended(one)}
        self._done &= ended.keys()
        self._first_looks = {key: at for key, at in self._first_looks.items() if key in ended}
        due = {key: one for key, one in ended.items() if self._is_due(key)}
        for namespace, backend in sorted({(one.namespace, kind) for one in due.values() for kind in one.gangs}):
            try:
                self._end_of(backend, namespace, {key.uid for key in due if key.namespace == namespace})
            except TiphysError as error:
                self._metrics.failures.labels("gang").inc()
                _log.warning("gang.not_ended", namespace=namespace, kind=backend.value, error=str(error))
                due = {key: one for key, one in due.items() if key.namespace != namespace}
        for key in due:
            self._note(key)

    def _is_due(self, key: _Watched) -> bool:
        first = self._first_looks.get(key)
        return key not in self._done and (first is None or self._monotonic() - first >= LATE_SECONDS)

    def _note(self, key: _Watched) -> None:
        if key in self._first_looks:
            self._done.add(key)
        else:
            self._first_looks[key] = self._monotonic()

    def _end_of(self, backend: Backend, namespace: str, uids: set[str]) -> None:
        for found in self._api.list(RESOURCES[backend], namespace, GANG_LABEL).items:
            if (found["metadata"].get("labels") or {}).get(WORKFLOW_UID_LABEL) in uids and _goes_on(found):
                try:
                    self._writer.end_gang(backend, found)
                except FencedError:
                    raise
                except ConflictError:
                    continue  # another one has its name by now


def _goes_on(found: Object) -> bool:
    return stage_of(found) is Stage.ACTIVE


def _watched(workflow: SeenWorkflow) -> _Watched:
    return _Watched(workflow.uid, workflow.namespace, (workflow.shutdown, workflow.finished))
