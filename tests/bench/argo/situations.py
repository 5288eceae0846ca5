"""The situations that are measured. Each returns a part of the report, whose ``line`` holds what has an aim."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.argo.documents import Timeline, count_nodes, per_step, record_delays, recorder_delays, stored_bytes
from bench.argo.empty_plugin import answered
from bench.argo.installation import Installation
from bench.argo.workflows import LIMIT, Twins
from bench.samples import interleaved, percentile, ratio, significant, summary

from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.store import open_store

_LONGEST_SECONDS = 900.0
_LONGEST_OF_A_TASK = 30.0
_LEAST_CPU_SECONDS = 1.0
"""Clocks of processes tick a hundred times a second."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    steps: int = 10
    rounds: int = 3
    tasks: int = 500
    items: int = 1000


QUICK = Sizes(steps=3, rounds=1, tasks=20, items=20)


@dataclass(frozen=True)
class Situation:
    """Where is measured, with what, and how much."""

    here: Installation
    twins: Twins
    sizes: Sizes


def line(at: Situation) -> dict[str, Any]:
    """A line of steps, alone, with Tiphys, and with a plugin that does nothing; seconds, nodes and bytes of a step."""
    steps = at.sizes.steps
    kept = _rounds(at, at.twins.line(steps), at.sizes.rounds)
    single = _rounds(at, _without(at.twins.line(1), "empty"), 1)
    seconds = {form: [one.seconds for one in found] for form, found in kept.items()}
    alone = {form: found[-1].seconds for form, found in single.items()}
    growth = {form: [one - alone[form] for one in seconds[form]] for form in alone}
    first_pod = {form: [one.first_pod_seconds for one in found] for form, found in kept.items()}
    nodes = {form: _per_step(found[-1], single[form][-1], steps, count_nodes) for form, found in _twins(kept)}
    sizes = {form: _per_step(found[-1], single[form][-1], steps, stored_bytes) for form, found in _twins(kept)}
    return {
        "steps": steps,
        "seconds": {form: summary(found) for form, found in seconds.items()},
        "seconds_of_one_step": {form: significant(found) for form, found in alone.items()},
        "first_pod_seconds": {form: summary(found) for form, found in first_pod.items()},
        "ratio": ratio(seconds["tiphys"], seconds["plain"]),
        "nodes_per_step": nodes,
        "bytes_per_step": sizes,
        "size": {form: found[-1].size() for form, found in kept.items()},
        "line": {
            "added_seconds_per_step": summary(_differences(growth["tiphys"], growth["plain"], steps - 1)),
            "end_later_seconds": significant(alone["tiphys"] - alone["plain"]),
            "floor_seconds_per_step": summary(_differences(seconds["empty"], seconds["plain"], steps)),
            "first_pod_later_seconds": summary(_differences(first_pod["tiphys"], first_pod["plain"])),
            "nodes_of_step": nodes["tiphys"],
            "bytes_per_step": sizes["tiphys"],
            "bytes_per_step_over_plain": significant(sizes["tiphys"] / sizes["plain"]),
        },
    }


def train(at: Situation) -> dict[str, Any]:
    """A training with one attempt, and one whose first attempt exits with 75: nodes, and time between the attempts."""
    steps = {count: _rounds(at, _only(at.twins.line(count), "tiphys"), 1)["tiphys"][0] for count in (1, 2)}
    one = _rounds(at, _only(at.twins.train(exits=False), "tiphys"), 1)["tiphys"][0]
    kept = _rounds(at, at.twins.train(exits=True), at.sizes.rounds)
    nodes = {count: count_nodes(found.document) for count, found in steps.items()}
    around = nodes[1] - (nodes[2] - nodes[1])
    next_pod = {form: [found.next_pod_seconds() for found in all_found] for form, all_found in kept.items()}
    return {
        "nodes_around_steps": around,
        "seconds": {form: summary([one.seconds for one in found]) for form, found in kept.items()},
        "next_attempt_seconds": {form: summary(found) for form, found in next_pod.items()},
        "line": {
            "nodes_of_train": count_nodes(one.document) - around,
            "nodes_of_further_attempt": count_nodes(kept["tiphys"][-1].document) - count_nodes(one.document),
            "next_attempt_seconds": summary(next_pod["tiphys"]),
        },
    }


def fan(at: Situation) -> dict[str, Any]:
    """Many tasks, a few at a time."""
    return _wide(at, at.twins.fan(at.sizes.tasks), "fan", at.sizes.tasks)


def items(at: Situation) -> dict[str, Any]:
    """As many items as a first task prints, a few at a time."""
    return _wide(at, at.twins.items(at.sizes.items), "items", at.sizes.items)


SITUATIONS: dict[str, Callable[[Situation], dict[str, Any]]] = {
    "line": line,
    "train": train,
    "fan": fan,
    "items": items,
}


def _wide(at: Situation, manifests: dict[str, Manifest], name: str, count: int) -> dict[str, Any]:
    kept = _rounds(at, manifests, 1, _LONGEST_SECONDS + count * _LONGEST_OF_A_TASK)
    seconds = {form: [one.seconds for one in found] for form, found in kept.items()}
    return {
        "count": count,
        "at_a_time": LIMIT,
        "seconds": {form: summary(found) for form, found in seconds.items()},
        "size": {form: found[-1].size() for form, found in kept.items()},
        "cpu_seconds": {form: found[-1].cpu_seconds for form, found in kept.items()},
        "offloading": at.here.controller.offloading,
        "line": {
            f"{name}_ratio": ratio(seconds["tiphys"], seconds["plain"]),
            **{f"{name}_{part}": seconds for part, seconds in _record_seconds(at, kept["tiphys"][-1]).items()},
            **{f"{name}_{part}": used for part, used in _cpu_ratios(kept["tiphys"][-1], kept["plain"][-1]).items()},
        },
    }


def _cpu_ratios(tiphys: Timeline, plain: Timeline) -> dict[str, float]:
    """CPU of parts of the cluster over that for plain Argo, without what used too little to be compared."""
    return {
        f"{part}_cpu_ratio": significant(tiphys.cpu_seconds[part] / used)
        for part, used in plain.cpu_seconds.items()
        if used >= _LEAST_CPU_SECONDS and part in tiphys.cpu_seconds
    }


def _record_seconds(at: Situation, found: Timeline) -> dict[str, float]:
    """Seconds until the record is in the bucket, for 99 of 100 steps: from the end of a pod, and from Argo's word."""
    attempts = RunHistory(open_store(at.here.settings.store), found.document["metadata"]["name"]).attempts
    ended = (attempt for step in attempts.values() for attempt in step)
    written = {one.claim.instance: one.end.written_at for one in ended if one.end is not None}
    epoch = time.monotonic() - time.time()
    return {
        "record_seconds": percentile(record_delays(found.document, written), 99),
        "recorder_seconds": significant(percentile(recorder_delays(found.shown, written, epoch), 99)),
    }


def _rounds(
    at: Situation, manifests: dict[str, Manifest], rounds: int, longest_seconds: float = _LONGEST_SECONDS
) -> dict[str, list[Timeline]]:
    kept: dict[str, list[Timeline]] = {form: [] for form in manifests}

    def run(form: str) -> float:
        if form == "empty":
            with answered(at.here):
                found = at.here.run(manifests[form], longest_seconds)
        else:
            found = at.here.run(manifests[form], longest_seconds)
        kept[form].append(found)
        return found.seconds

    interleaved({form: lambda form=form: run(form) for form in manifests}, rounds)  # type: ignore[misc]
    return kept


def _differences(above: list[float], below: list[float], steps: int = 1) -> list[float]:
    return [(one - other) / steps for one, other in zip(above, below, strict=True)]


def _per_step(many: Timeline, one: Timeline, steps: int, measure: Callable[[Any], int]) -> float:
    return significant(per_step(measure(many.document), measure(one.document), steps))


def _twins(kept: dict[str, list[Timeline]]) -> list[tuple[str, list[Timeline]]]:
    return [(form, found) for form, found in kept.items() if form != "empty"]


def _only(manifests: dict[str, Manifest], form: str) -> dict[str, Manifest]:
    return {form: manifests[form]}


def _without(manifests: dict[str, Manifest], form: str) -> dict[str, Manifest]:
    return {name: manifest for name, manifest in manifests.items() if name != form}
