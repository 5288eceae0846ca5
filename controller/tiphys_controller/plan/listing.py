"""Collects what a run's storage listings show of the results of its steps, by step.

A run may have hundreds of thousands of objects, so each row is parsed as its
page arrives and no listing is kept. The planner and the automatic resumes read
the same rows, and `tiphys.store.layout.parse_listed_key` is their only parser.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from tiphys.store import ObjectInfo
from tiphys.store.layout import (
    DoneMarkerKey,
    OutputKey,
    ReusedAttemptKey,
    ReuseRecordKey,
    parse_listed_key,
)
from tiphys.store.runs import AttemptNumbers
from tiphys.store.workflow_layout import OutputOrigin, parse_pod_output
from tiphys_controller.plan.step_state import StepListing


@dataclass
class RunListing:
    """What the listings of one run show, by step id.

    Threads may add different prefixes of the run at the same time: each prefix fills fields of its own.
    """

    projections: dict[str, dict[int, frozenset[str]]] = field(default_factory=lambda: defaultdict(dict))
    """Listing digests of done projections, by attempt."""
    outputs: dict[str, dict[int, dict[str, ObjectInfo]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    """Objects of outputs, by attempt and by key relative to the outputs of the attempt."""
    last_reuse: dict[str, int] = field(default_factory=dict)
    """The last submission that reused a result for the step."""
    reused_attempts: set[ReusedAttemptKey] = field(default_factory=set)
    """Reuses of an attempt of the same step; a reuse of another run's result leaves no such key."""

    def add(self, rows: Iterable[ObjectInfo]) -> Self:
        """Add the rows of a listing; keys of other kinds are ignored."""
        for row in rows:
            match parse_listed_key(row.key):
                case OutputKey() as output:
                    self.outputs[output.step][output.attempt][output.name] = row
                case DoneMarkerKey() as marker:
                    digests = self.projections[marker.step].get(marker.attempt, frozenset())
                    self.projections[marker.step][marker.attempt] = digests | {marker.listing_digest}
                case ReuseRecordKey() as reuse:
                    self.last_reuse[reuse.step] = max(reuse.submission, self.last_reuse.get(reuse.step, 0))
                case ReusedAttemptKey() as reused:
                    self.reused_attempts.add(reused)
        return self

    def add_pod_outputs(self, rows: Iterable[ObjectInfo], origins: Mapping[str, OutputOrigin]) -> None:
        """Add the rows below the uid of one Workflow; ``origins`` are the attempts of its pods."""
        for row in rows:
            parsed = parse_pod_output(row.key)
            if parsed is not None and (origin := origins.get(parsed.pod)) is not None:
                self.outputs[origin.step][origin.attempt][parsed.name] = row

    def build_steps(self, attempts: Mapping[str, AttemptNumbers], *, with_outputs: bool) -> dict[str, StepListing]:
        """The listing of each step that has an attempt or a reused result; ``with_outputs``: theirs were listed."""
        steps = dict.fromkeys(self.last_reuse, StepListing())
        for step, numbers in attempts.items():
            if numbers.claimed:
                steps[step] = StepListing(
                    attempts=frozenset(numbers.claimed),
                    ended_attempts=frozenset(numbers.ended),
                    projections=self.projections.get(step, {}),
                    outputs=self.outputs.get(step, {}) if with_outputs else None,
                )
        return steps
