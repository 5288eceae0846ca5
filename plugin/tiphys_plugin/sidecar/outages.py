"""Answers a call that service, storage, API server or ledger did not answer: Pending with the reason, up to a limit.

Argo repeats a 503 for some 15 seconds and then fails the node, so only a reply lets a step wait. The limit is on the
time since the first failed call about the step. Replicas of the service share no memory, but a sidecar lives as long
as the agent pod of its Workflow and gets all its calls. After a restart the time begins again, so that a step waits
longer, never shorter. The attempts of a training share one time.

The sidecar, the shared agent and the server of a single core use this module, so it needs only the standard library.
"""

import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

OUTAGE_LIMIT_VARIABLE = "TIPHYS_OUTAGE_LIMIT_SECONDS"
OUTAGE_LIMIT_SECONDS = 1800.0
"""How long a step waits by default: a roll-out or a lost node takes minutes, a repair of storage longer."""
_REQUEUE_SECONDS = (2.0, 15.0)
"""The pause between two calls grows with the outage, and delays the step by at most the longer one."""
_MAX_STEPS = 10_000
"""Steps of one namespace whose outages are remembered: no tenant may have those of another forgotten."""
_GAP_SECONDS = 300.0
"""Time without a failed call after which the next one begins another outage; a call comes a minute later at most."""
_WAITING = re.compile(r"Waiting(, for \S+ min at most)?: ")


class _Outage(NamedTuple):
    began_at: float
    failed_at: float


class OutageClock:
    """When the outage of each step began. Thread-safe."""

    def __init__(
        self, limit_seconds: float = OUTAGE_LIMIT_SECONDS, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_seconds = limit_seconds
        self._monotonic = monotonic
        self._outages: dict[str, dict[int, _Outage]] = defaultdict(dict)
        """By namespace and step, in the order of their last failed calls."""
        self._lock = threading.Lock()

    def end(self, document: dict[str, Any]) -> None:
        """Note that the call ``document`` was answered."""
        with self._lock:
            if outages := self._outages.get(_namespace(document)):
                outages.pop(_step_key(document), None)

    def answer(self, document: dict[str, Any], reason: str) -> dict[str, Any]:
        """The reply to the call ``document``, which failed for ``reason``: Pending, or final after the limit."""
        now, key = self._monotonic(), _step_key(document)
        with self._lock:
            outages = self._outages[_namespace(document)]
            outage = outages.pop(key, None)
            began_at = now if outage is None or now - outage.failed_at > _GAP_SECONDS else outage.began_at
            outages[key] = _Outage(began_at, now)
            while len(outages) > _MAX_STEPS or now - next(iter(outages.values())).failed_at > _GAP_SECONDS:
                del outages[next(iter(outages))]
        waited = now - began_at
        limit = f"{self._limit_seconds / 60:g} min"
        if waited >= self._limit_seconds:
            return {"node": _give_up(document, limit, reason)}
        pause = min(max(waited / 4, _REQUEUE_SECONDS[0]), _REQUEUE_SECONDS[1])
        message = f"Waiting, for {limit} at most: {reason}"
        return {"node": {"phase": "Pending", "message": message}, "requeue": f"{pause:.1f}s"}


def find_wait_reason(message: str) -> str:
    """The reason in the message of a call that waits; other messages as they are."""
    waiting = _WAITING.match(message)
    return message[waiting.end() :] if waiting else message


def _read_body(document: dict[str, Any]) -> dict[str, Any]:
    body = document["template"]["plugin"]["tiphys"]
    return body if isinstance(body, dict) else {}


def _read_metadata(document: dict[str, Any]) -> dict[str, Any]:
    workflow = document.get("workflow")
    metadata = workflow.get("metadata") if isinstance(workflow, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def _namespace(document: dict[str, Any]) -> str:
    return str(_read_metadata(document).get("namespace"))


def _step_key(document: dict[str, Any]) -> int:
    """A hash, because names of items are long and sidecars small. Finalize has no step."""
    body, workflow = _read_body(document), document.get("workflow")
    return hash(json.dumps([workflow, body.get("step"), body.get("item")]))


def take_nothing_over(template: dict[str, Any], why: str) -> dict[str, Any]:
    """The final node of the gate at a Workflow's start that cannot decide: all steps run, as without the gate.

    It has each output that the template declares: whether a step is taken over, and ``<step>__<output>``.
    """
    declared = (template.get("outputs") or {}).get("parameters") or []
    names = [str(output.get("name")) for output in declared]
    values = [{"name": name, "value": "" if "__" in name else "false"} for name in names]
    outputs = {"parameters": values, "artifacts": []}
    return {"phase": "Succeeded", "message": f"Nothing is taken over: {why}", "outputs": outputs}


def _give_up(document: dict[str, Any], limit: str, reason: str) -> dict[str, Any]:
    """The final node of a call. Failed ends the step; a training gets no other attempt."""
    run = _read_body(document).get("run") or _read_metadata(document).get("name", "RUN")
    if _read_body(document).get("op") == "finalize":  # what it would have recorded, the controller or a resume records
        message = f"No answer for {limit}: {reason}. The controller records the end of the run"
        return {"phase": "Succeeded", "message": message}
    if _read_body(document).get("op") == "reuse":
        return take_nothing_over(document["template"], f"no answer for {limit}: {reason}")
    message = f"No answer for {limit}: {reason}. When the cause is gone: `tiphys resume {run}`"
    return {"phase": "Failed", "message": message}
