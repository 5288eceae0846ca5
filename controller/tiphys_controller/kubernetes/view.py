"""What the watches have seen of the cluster, shared between those who watch and those who act."""

import threading
from collections.abc import Callable, Hashable
from typing import TypeVar

from tiphys.kube import Change, ChangeType, Object, Synced
from tiphys_controller.kubernetes.agent_pods import StuckAgent, stuck_agent
from tiphys_controller.kubernetes.seen import SeenWorkflow, see

FactsT = TypeVar("FactsT")
Uid = str


class _Kept(dict[Uid, FactsT]):
    """Facts by uid, of several scopes (namespaces, or all): a new list of one scope replaces only its own."""

    def __init__(self, facts_of: Callable[[Object], FactsT | None]) -> None:
        super().__init__()
        self._facts_of = facts_of
        self._scopes: dict[Uid, Hashable] = {}

    def take(self, scope: Hashable, seen: Synced | Change) -> list[FactsT]:
        """Take in what a watch says; answers the facts of objects that are gone."""
        if isinstance(seen, Synced):
            present = {one["metadata"]["uid"] for one in seen.objects}
            gone = [uid for uid, of in self._scopes.items() if of == scope and uid not in present]
            changed = seen.objects
        else:
            gone = [seen.object["metadata"]["uid"]] if seen.type is ChangeType.DELETED else []
            changed = [] if gone else [seen.object]
        lost = [found for uid in gone if (found := self._drop(uid)) is not None]
        for one in changed:
            self._put(scope, one)
        return lost

    def _put(self, scope: Hashable, document: Object) -> None:
        uid, facts = document["metadata"]["uid"], self._facts_of(document)
        if facts is None:
            self._drop(uid)
        else:
            self[uid] = facts
            self._scopes[uid] = scope

    def _drop(self, uid: Uid) -> FactsT | None:
        self._scopes.pop(uid, None)
        return self.pop(uid, None)


class ClusterView:
    """Workflows of Tiphys, and agent pods that have failed. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._workflows: _Kept[SeenWorkflow] = _Kept(see)
        self._agents: _Kept[StuckAgent] = _Kept(stuck_agent)
        self._deleted: list[SeenWorkflow] = []
        self._synced: set[Hashable] = set()
        self._version = 0

    def take_workflows(self, scope: Hashable, seen: Synced | Change) -> None:
        """Take in what a watch of Workflows says."""
        with self._changed:
            self._deleted += [gone for gone in self._workflows.take(scope, seen) if not gone.finished]
            self._note(("workflows", scope), seen)

    def take_agents(self, scope: Hashable, seen: Synced | Change) -> None:
        """Take in what a watch of agent pods says."""
        with self._changed:
            self._agents.take(scope, seen)
            self._note(("agents", scope), seen)

    def workflows(self) -> list[SeenWorkflow]:
        """All Workflows that exist."""
        with self._changed:
            return list(self._workflows.values())

    def namespaces(self) -> list[str]:
        """Those in which there is a Workflow."""
        with self._changed:
            return sorted({one.namespace for one in self._workflows.values()})

    def stuck_agents(self) -> list[StuckAgent]:
        """All agent pods that do not work."""
        with self._changed:
            return list(self._agents.values())

    def take_deleted(self) -> list[SeenWorkflow]:
        """Workflows that were deleted before they were over, each answered once."""
        with self._changed:
            deleted, self._deleted = self._deleted, []
            return deleted

    def wait(self, version: int, seconds: float) -> int:
        """Wait for something newer than ``version``, at most ``seconds``; answers the present version."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, seconds)
            return self._version

    def wake(self) -> None:
        """End every `wait`."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def synced(self) -> int:
        """How many watches have seen all that there is."""
        with self._changed:
            return len(self._synced)

    def _note(self, what: Hashable, seen: Synced | Change) -> None:
        if isinstance(seen, Synced):
            self._synced.add(what)
        self._version += 1
        self._changed.notify_all()
