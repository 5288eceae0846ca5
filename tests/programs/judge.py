"""What a run of a program that was killed again and again shows, compared with an undisturbed run. Pure.

| finding | when |
|---|---|
| silent loss | it resumes before a committed checkpoint, or before what was whole at SIGTERM, and Tiphys says nothing |
| wrong state | it resumes with weights, an optimizer or generators that no earlier start had at that step |
| exit code | not 75 after SIGTERM, nor 143 before the restore or after the last save; 0 without the last step |
| process left | a process outlived the first process of its attempt |
| hang | an attempt did not end within its grace period |
"""

import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from programs.attempts import AttemptRecord
from programs.catalogue import Program
from programs.faults import MEMORY, TERM
from programs.trace import Line, consumed, last_step, starts_of
from tiphys.protocol.environment import EX_TEMPFAIL, LOG_PREFIX
from tiphys.records import CheckpointRef

_SAYS_LOSS = re.compile(
    r"lost|not committed|could not be|not saved|no checkpoint|nothing|incomplete|half written|skipped|corrupt|damaged|"
    r"quarantine|was not|from the beginning|cannot"
)
_PROMISES = "stored once it is complete again"
"""Ends a line of Tiphys about a file that it stores later: what is lost nevertheless has to be said."""
_ENDS_BY_SIGTERM = (128 + signal.SIGTERM, -signal.SIGTERM)
Samples = dict[int, list[int]]
"""Ids of the samples that each optimizer step consumed, in the order of ranks."""


class Finding(NamedTuple):
    kind: str
    attempt: int
    sentence: str


@dataclass
class Verdict:
    """What one run showed."""

    findings: list[Finding] = field(default_factory=list)
    losses_said: int = 0
    """Losses that a line of Tiphys announced."""
    samples: int = 0
    twice: int = 0
    """Samples consumed more often, within their epoch, than in the undisturbed run."""
    never: int = 0
    """Samples consumed less often."""
    same_order: bool = True
    restores: int = 0
    parts: dict[str, bool] = field(default_factory=dict)
    """Whether each part of the state came back equal at every restore."""


def judge(program: Program, undisturbed: AttemptRecord, attempts: Sequence[AttemptRecord]) -> Verdict:
    """Compare all attempts of one run, of which the last ended without a fault, with the undisturbed run."""
    verdict = Verdict()
    for record in attempts:
        _judge_end(verdict, record, last_step(undisturbed.lines, "finished"))
    _judge_restores(verdict, program, undisturbed, attempts)
    if any(line["event"] == "finished" for line in attempts[-1].lines):
        _compare_samples(verdict, program, undisturbed, attempts)
    return verdict


def _judge_end(verdict: Verdict, record: AttemptRecord, total: int | None) -> None:
    def find(kind: str, sentence: str) -> None:
        verdict.findings.append(Finding(kind, record.number, sentence))

    finished = last_step(record.lines, "finished")
    if record.hung:
        find("hang", "it did not end within its grace period")
    if record.left:
        find("process left", "; ".join(record.left))
    # A library that knows the epoch alone, as Keras, trains some steps again.
    is_complete = finished is not None and total is not None and finished >= total
    if record.code == 0 and not is_complete:
        find("exit code", f"0 after step {finished} of {total}")
    if record.struck and record.fault and record.fault.kind == TERM:
        # Before the restore and after the last step there is nothing to save: SIGTERM ends the program by itself.
        ends = {EX_TEMPFAIL} if _may_save(record, total) else {EX_TEMPFAIL, *_ENDS_BY_SIGTERM}
        if record.code not in ends and not is_complete:
            find("exit code", f"{record.code} after SIGTERM")
    elif record.struck and record.fault and record.fault.kind == MEMORY:
        if record.code == EX_TEMPFAIL:
            find("exit code", "75 without a SIGTERM")
    elif not record.struck and record.code != 0:
        find("exit code", f"{record.code} without a fault: {record.log[-500:]}")


def _may_save(record: AttemptRecord, total: int | None) -> bool:
    """Whether it has restored a state, and has not saved its last step: a session ends with that."""
    steps = [step for event in ("resumed", "step") if (step := last_step(record.lines, event)) is not None]
    return bool(steps) and (max(steps) != total or all(ref.global_step != total for ref in record.committed))


def _judge_restores(
    verdict: Verdict, program: Program, undisturbed: AttemptRecord, attempts: Sequence[AttemptRecord]
) -> None:
    known: dict[tuple[int, int], list[Line]] = {}
    for line in _states(undisturbed.lines):
        if line["step"] == 0 or program.in_order:
            known.setdefault((line["step"], line["rank"]), []).append(line)
    floor, unsaid = 0, ""
    damaged: set[CheckpointRef] = set()
    for record in attempts:
        unsaid += "\n" + record.log
        for number, lines in enumerate(starts_of(record.lines)):
            if number and record.struck:
                floor = _kept_after(program, record, floor, damaged)
            begins = [line for line in lines if line["event"] == "resumed"]
            if begins:
                resumed = begins[0]["step"]
                verdict.restores += resumed > 0
                if resumed < floor:
                    _judge_loss(verdict, record, f"resumed at step {resumed}, although step {floor} was whole", unsaid)
                for line in begins:
                    # A rank may be killed before it has printed a step that the first one has saved, for all of them.
                    places = ((line["step"], rank) for rank in (line["rank"], 0))
                    earlier = next((known[place] for place in places if place in known), [])
                    _compare_state(verdict, program, record, line, earlier)
                floor, unsaid = resumed, record.log
            for line in _states(lines):
                known.setdefault((line["step"], line["rank"]), []).append(line)
        damaged |= {record.damaged} if record.damaged else set()
        floor = _kept_after(program, record, floor, damaged)


def _judge_loss(verdict: Verdict, record: AttemptRecord, sentence: str, log: str) -> None:
    if _says_loss(log):
        verdict.losses_said += 1
    else:
        verdict.findings.append(Finding("silent loss", record.number, sentence))


def _kept_after(program: Program, record: AttemptRecord, floor: int, damaged: set[CheckpointRef]) -> int:
    """The step at or after which the next attempt has to begin, if nothing is said."""
    commits = [ref for ref in record.committed if ref not in damaged]
    if program.names_steps:
        floor = max((ref.global_step for ref in commits), default=0)
    elif record.damaged:
        floor = 0  # no step is known of the checkpoint before
    elif commits and floor == 0:
        floor = 1
    if record.struck and record.fault and record.fault.kind == TERM:
        whole = last_step(record.lines, "saved" if program.folder else "step")
        floor = max(floor, whole or 0)
    return floor


def _compare_state(
    verdict: Verdict, program: Program, record: AttemptRecord, line: Line, known: Sequence[Line]
) -> None:
    if line["step"] == 0:
        return
    if not known:
        sentence = f"resumed at step {line['step']}, which no start had reached"
        verdict.findings.append(Finding("wrong state", record.number, sentence))
        return
    for part in ("weights", "optimizer", "generators"):
        if part in line:
            equal = any(line[part] == earlier.get(part) for earlier in known)
            verdict.parts[part] = verdict.parts.get(part, True) and equal
            if not equal and part in program.parts:
                sentence = f"resumed at step {line['step']} in rank {line['rank']} with other {part}"
                verdict.findings.append(Finding("wrong state", record.number, sentence))


def _states(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["event"] == "step" or (line["event"] == "resumed" and line["step"] == 0)]


def _says_loss(log: str) -> bool:
    lines = [line for line in log.splitlines() if LOG_PREFIX in line and _PROMISES not in line]
    return any(_SAYS_LOSS.search(line) for line in lines)


def _compare_samples(
    verdict: Verdict, program: Program, undisturbed: AttemptRecord, attempts: Sequence[AttemptRecord]
) -> None:
    expected, found = _samples([undisturbed]), _samples(attempts)
    last = max(expected, default=0)
    # Hugging Face's Trainer trains one step more each time that it resumes at its last, or after it.
    if (last_step(attempts[-1].lines, "resumed") or 0) >= last:
        found = {step: ids for step, ids in found.items() if step <= last}
    verdict.samples = sum(map(len, expected.values()))
    verdict.same_order = expected == found
    per_epoch, per_epoch_found = (_by_epoch(samples, program.epoch_steps) for samples in (expected, found))
    for epoch in per_epoch.keys() | per_epoch_found.keys():
        wanted, seen = per_epoch.get(epoch, Counter()), per_epoch_found.get(epoch, Counter())
        verdict.twice += (seen - wanted).total()
        verdict.never += (wanted - seen).total()
    if program.in_order and not verdict.same_order:
        first = min(step for step in expected.keys() | found.keys() if expected.get(step) != found.get(step))
        sentence = f"step {first} consumed other samples than the undisturbed run"
        verdict.findings.append(Finding("wrong state", attempts[-1].number, sentence))


def _samples(attempts: Sequence[AttemptRecord]) -> Samples:
    """The steps that made the final state: a later start replaces the steps after the one it resumed at."""
    steps: dict[tuple[int, int], list[int]] = {}
    for lines in (lines for record in attempts for lines in starts_of(record.lines)):
        if (resumed := next((line["step"] for line in lines if line["event"] == "resumed"), None)) is None:
            continue
        steps = {place: ids for place, ids in steps.items() if place[0] <= resumed}
        steps |= {(step, rank): ids for step, rank, ids in consumed(lines)}
    together: Samples = {}
    for (step, _), ids in sorted(steps.items()):
        together.setdefault(step, []).extend(ids)
    return together


def _by_epoch(samples: Mapping[int, list[int]], epoch_steps: int) -> dict[int, Counter[int]]:
    epochs: dict[int, Counter[int]] = {}
    for step, ids in samples.items():
        epochs.setdefault((step - 1) // epoch_steps, Counter()).update(ids)
    return epochs
