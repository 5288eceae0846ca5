"""The campaign over programs of other libraries finds what it claims to find, and its page shows its report.

| planted | found as |
|---|---|
| an attempt that begins before a committed checkpoint | silent loss, unless a line of Tiphys says so |
| an attempt that begins before what was complete at SIGTERM | silent loss |
| other weights at the same step | wrong state |
| another exit code after SIGTERM, or success before the last step | exit code |
| a process with a session of its own that outlives its attempt | process left |
| a batch that is consumed again | samples twice, or other samples where the program keeps their order |
"""

import json
import random
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs import marked_processes, report
from programs.attempts import STEPS_PER_SAVE, AttemptRecord, compiled
from programs.catalogue import PROGRAMS, SCRIPTS, Program
from programs.faults import DAMAGE, KILL, KINDS, MEMORY, TERM, Fault, draw_fault, passages_of
from programs.judge import Verdict, judge
from programs.trace import TraceReader, consumed
from support.builders.lineage import ref
from support.processes.polling import until
from support.processes.process import lives

STEPS, EPOCH = 6, 3
SESSION = Program("session", "a session", "loop.sh", "", epoch_steps=EPOCH)
FOLDER = replace(SESSION, name="folder", folder="ckpt")
IN_ORDER = replace(SESSION, name="ordered", in_order=True)
Line = dict[str, Any]


def lines_of(start: int, end: int, *, saved: int = 0, weights: str = "w", first_id: int = 0) -> list[Line]:
    """What an attempt prints that resumes at ``start`` and ends after step ``end``."""
    lines: list[Line] = [{"event": "start"}, {"event": "resumed", "step": start, "weights": f"{weights}{start}"}]
    for step in range(start + 1, end + 1):
        lines.append({"event": "step", "step": step, "weights": f"w{step}", "ids": [step + first_id]})
        lines += [{"event": "saved", "step": step}] if step == saved else []
    return [line | {"rank": 0} for line in [*lines, *([{"event": "finished", "step": end}] if end == STEPS else [])]]


def ended(number: int, lines: list[Line], kind: str = "", *, committed: int = 0, **fields: Any) -> AttemptRecord:
    """An attempt that ``kind`` ended, or that succeeded."""
    fault = Fault(kind, "training", 1) if kind else None
    given = {"code": {TERM: 75, KILL: -9, MEMORY: 137}.get(kind, 0), "struck": bool(kind), "lines": lines} | fields
    checkpoints = [ref(number, committed)] if committed else []
    return AttemptRecord(number, fault, None, committed=checkpoints, **given)


UNDISTURBED = ended(1, lines_of(0, STEPS))


def judged(*attempts: AttemptRecord, program: Program = SESSION) -> Verdict:
    return judge(program, UNDISTURBED, attempts)


def kinds(verdict: Verdict) -> list[str]:
    return [finding.kind for finding in verdict.findings]


@pytest.mark.parametrize("kind", [TERM, KILL, MEMORY])
def test_run_that_goes_on_where_it_was_has_no_finding(kind):
    verdict = judged(ended(1, lines_of(0, 4), kind, committed=4), ended(2, lines_of(4, STEPS)), program=IN_ORDER)
    assert (verdict.findings, verdict.restores, verdict.twice, verdict.never) == ([], 1, 0, 0)


def test_resume_before_a_committed_checkpoint_is_a_silent_loss():
    verdict = judged(ended(1, lines_of(0, 4), KILL, committed=4), ended(2, lines_of(3, STEPS)))
    assert kinds(verdict) == ["silent loss"]


def test_loss_that_tiphys_announces_is_no_silent_loss():
    said = "tiphys: checkpoint 4 of attempt 1 is corrupt: …"
    verdict = judged(ended(1, lines_of(0, 4), KILL, committed=4), ended(2, lines_of(3, STEPS), log=said))
    assert (kinds(verdict), verdict.losses_said) == ([], 1)


@pytest.mark.parametrize(
    "said",
    [
        "ValueError: checkpoint 4 is corrupt",
        "tiphys: last.ckpt was written to while it was being stored, so it was not committed; "
        "it is stored once it is complete again",
    ],
    ids=["program", "promise"],
)
def test_loss_that_tiphys_does_not_announce_is_silent(said):
    verdict = judged(ended(1, lines_of(0, 4), KILL, committed=4), ended(2, lines_of(3, STEPS), log=said))
    assert kinds(verdict) == ["silent loss"]


@pytest.mark.parametrize("program", [SESSION, FOLDER], ids=lambda program: program.name)
def test_resume_before_what_was_complete_at_sigterm_is_a_silent_loss(program):
    first = ended(1, lines_of(0, 4, saved=4), TERM, committed=2)
    assert kinds(judged(first, ended(2, lines_of(3, STEPS)), program=program)) == ["silent loss"]


def test_folder_without_a_complete_save_loses_nothing_at_sigterm():
    first = ended(1, lines_of(0, 4, saved=2), TERM, committed=2)
    assert kinds(judged(first, ended(2, lines_of(2, STEPS)), program=FOLDER)) == []


def test_damaged_checkpoint_is_not_expected_back():
    first = ended(1, lines_of(0, 4), DAMAGE, committed=4, code=-9, damaged=ref(1, 4))
    assert kinds(judged(first, ended(2, lines_of(0, STEPS)))) == []


@pytest.mark.parametrize("program", [SESSION, replace(SESSION, names_steps=False)], ids=["named", "unnamed"])
def test_damaged_checkpoint_is_not_expected_back_by_later_attempts_either(program):
    first = ended(1, lines_of(0, 4), DAMAGE, committed=4, code=-9, damaged=ref(1, 4))
    later = [replace(ended(number, lines_of(0, 1), KILL), committed=[ref(1, 4)]) for number in (2, 3)]
    assert kinds(judged(first, *later, ended(4, lines_of(0, STEPS)), program=program)) == []


def test_other_weights_are_a_wrong_state():
    verdict = judged(ended(1, lines_of(0, 4), KILL, committed=4), ended(2, lines_of(4, STEPS, weights="torn")))
    assert (kinds(verdict), verdict.parts) == (["wrong state"], {"weights": False})


def test_step_that_no_start_reached_is_a_wrong_state():
    assert kinds(judged(ended(1, lines_of(0, 2), KILL), ended(2, lines_of(4, STEPS)))) == ["wrong state"]


@pytest.mark.parametrize(("weights", "found"), [("w", []), ("torn", ["wrong state"])])
def test_rank_that_was_killed_before_it_printed_a_step_is_compared_with_the_first_one(weights, found):
    def of_both(*lines: Line) -> list[Line]:
        return [line | {"rank": rank} for line in lines for rank in (0, 1)]

    first = [*of_both(*lines_of(0, 3)), lines_of(0, 4)[-1]]
    *begins, last = of_both(*lines_of(4, STEPS)[:2])
    second = [*begins, last | {"weights": f"{weights}4"}, *lines_of(4, STEPS)[2:]]
    assert kinds(judged(ended(1, first, KILL, committed=4), ended(2, second))) == found


def started_twice(resumed: int, **fields: Any) -> AttemptRecord:
    """An attempt that lost a process after step 4, and started its program again in its pod, at ``resumed``."""
    return replace(ended(1, lines_of(0, 4) + lines_of(resumed, STEPS, **fields), MEMORY, committed=4), code=0)


def test_program_that_is_started_again_in_its_attempt_goes_on_where_it_was():
    verdict = judged(started_twice(4), program=IN_ORDER)
    assert (verdict.findings, verdict.restores, verdict.twice, verdict.never) == ([], 1, 0, 0)


@pytest.mark.parametrize(
    ("attempt", "kind"),
    [
        (started_twice(3), "silent loss"),
        (started_twice(5), "wrong state"),
        (started_twice(4, weights="torn"), "wrong state"),
        (started_twice(4, first_id=1), "wrong state"),
    ],
    ids=["loss", "unreached", "torn", "order"],
)
def test_program_that_is_started_again_in_its_attempt_is_judged_as_a_new_attempt(attempt, kind):
    assert kinds(judged(attempt, program=IN_ORDER)) == [kind]


def test_program_that_sigterm_ends_before_it_has_restored_is_no_finding():
    verdict = judged(ended(1, [{"event": "start", "rank": 0}], TERM, code=143), ended(2, lines_of(0, STEPS)))
    assert verdict.findings == []


@pytest.mark.parametrize("start", [4, STEPS])
def test_program_that_sigterm_ends_after_its_last_save_is_no_finding(start):
    cut = ended(2, lines_of(start, STEPS)[:-1], TERM, committed=STEPS, code=143)
    verdict = judged(ended(1, lines_of(0, start), KILL, committed=start), cut, ended(3, lines_of(STEPS, STEPS)))
    assert verdict.findings == []


@pytest.mark.parametrize(
    ("attempt", "kind"),
    [
        (ended(1, lines_of(0, 4), TERM, committed=4, code=1), "exit code"),
        (ended(1, lines_of(0, STEPS)[:-1], TERM, committed=4, code=143), "exit code"),
        (ended(1, lines_of(0, 4), TERM, committed=4, code=0), "exit code"),
        (ended(1, lines_of(0, 4), TERM, committed=4, code=143), "exit code"),
        (ended(1, lines_of(0, 4), MEMORY, committed=4, code=75), "exit code"),
        (ended(1, lines_of(0, 4), KILL, committed=4, left=["python train.py"]), "process left"),
        (ended(1, lines_of(0, 4), TERM, committed=4, hung=True), "hang"),
    ],
)
def test_wrong_end_of_an_attempt_is_found(attempt, kind):
    assert kind in kinds(judged(attempt, ended(2, lines_of(4, STEPS))))


def test_step_beyond_the_last_one_is_no_finding_of_a_program_that_resumes_there():
    extra = {"event": "step", "rank": 0, "step": STEPS + 1, "weights": "w", "ids": [99]}
    cut, over = ended(1, lines_of(0, STEPS)[:-1], TERM, committed=STEPS), ended(2, [*lines_of(STEPS, STEPS), extra])
    assert (judged(cut, over, program=IN_ORDER).findings, judged(cut, over).twice) == ([], 0)
    again = ended(2, [*lines_of(STEPS, STEPS)[:-1], extra], TERM, committed=STEPS + 1)
    further = ended(3, [{"event": "resumed", "rank": 0, "step": STEPS + 1, "weights": "w"}, *over.lines[-2:]])
    assert judged(cut, again, further, program=IN_ORDER).findings == []


def test_samples_are_counted_twice_and_never_within_their_epoch():
    verdict = judged(ended(1, lines_of(0, 4), KILL, committed=4), ended(2, lines_of(4, STEPS, first_id=1)))
    assert (verdict.samples, verdict.twice, verdict.never, verdict.same_order) == (STEPS, 1, 1, False)


def test_other_samples_of_a_program_that_keeps_its_order_are_a_wrong_state():
    attempts = ended(1, lines_of(0, 4), KILL, committed=4), ended(2, lines_of(4, STEPS, first_id=1))
    assert kinds(judged(*attempts, program=IN_ORDER)) == ["wrong state"]


def test_samples_of_a_batch_belong_to_the_next_step_of_their_rank():
    lines = [
        {"event": "batch", "rank": 0, "ids": [1]},
        {"event": "batch", "rank": 1, "ids": [2]},
        {"event": "step", "rank": 1, "step": 1},
        {"event": "step", "rank": 0, "step": 1},
        {"event": "batch", "rank": 0, "ids": [3]},
    ]
    assert list(consumed(lines)) == [(1, 1, [2]), (1, 0, [1])]


def test_line_that_is_half_written_is_read_once_it_is_whole(tmp_path):
    reader = TraceReader(tmp_path / "trace")
    assert reader.new_lines() == []
    reader.path.write_text('{"event": "start"}\n{"event": "st')
    assert [line["event"] for line in reader.new_lines()] == ["start"]
    with reader.path.open("a") as stream:
        stream.write('ep"}\n')
    assert [line["event"] for line in reader.new_lines()] == ["step"]


def test_same_seed_draws_the_same_faults_of_every_kind():
    passages = passages_of([line["event"] for line in UNDISTURBED.lines], STEPS_PER_SAVE)
    first, second = (
        [draw_fault(generator, passages) for _ in range(200)] for generator in (random.Random(7), random.Random(7))
    )
    assert first == second
    assert {fault.kind for fault in first} == set(KINDS)
    assert {fault.moment for fault in first} == set(passages)
    assert all(1 <= fault.passage <= max(1, passages[fault.moment] // 2) for fault in first)


def test_loader_that_reads_ahead_changes_no_other_draw():
    passages = passages_of([line["event"] for line in UNDISTURBED.lines], STEPS_PER_SAVE)
    more = passages | {"training": passages["training"] + 1}
    first, second = (
        [draw_fault(generator, counts) for _ in range(200)]
        for generator, counts in ((random.Random(7), passages), (random.Random(7), more))
    )
    assert [(fault.kind, fault.moment) for fault in first] == [(fault.kind, fault.moment) for fault in second]


def test_process_with_a_session_of_its_own_is_found_and_ended(monkeypatch):
    monkeypatch.setattr(marked_processes, "PATIENCE_SECONDS", 0.5)
    mark = uuid.uuid4().hex
    code = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
        "start_new_session=True); print('started', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env={marked_processes.MARK: mark}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        until(lambda: len(marked_processes.marked(mark)) == 2, 120)
        child = next(pid for pid in marked_processes.marked(mark) if pid != process.pid)
        process.kill()
        process.wait()
        assert len(marked_processes.left_behind(mark)) == 1
    until(lambda: not lives(child), 120)  # it is no zombie until the kernel has freed its memory


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_program_has_at_most_three_lines_for_tiphys_and_its_command_is_compiled(program):
    assert program.own_lines <= (0 if program.folder else 3)
    command, variables = compiled(program)
    assert str(SCRIPTS / program.script) in command
    assert variables["TIPHYS_SAVE_EVERY"] == f"{STEPS_PER_SAVE} steps"


def test_page_has_the_table_of_the_committed_report():
    assert report.with_table(report.PAGE.read_text(), report.read()) == report.PAGE.read_text()


def test_page_marks_every_aim_that_the_committed_report_misses():
    results = report.read()["programs"]
    rows = report.table(report.read())[2:]
    assert list(results) == [program.name for program in PROGRAMS if program.name in results]
    for program, row in zip(PROGRAMS, rows, strict=True):
        result = results.get(program.name)
        assert row.startswith(f"| {program.title} |")
        assert ("not measured" in row) == (result is None)
        assert (f"(missed: {report.AIM_KILLS})" in row) == (result is None or result["kills"] < report.AIM_KILLS)
        assert ("missed: 0" in row) == bool(result and result["findings"])
        assert ("**no**" in row) == bool(result and result["samples"] and not result["same_order"])


RESULT = {
    "findings": {},
    "restored": {"weights": True},
    "samples": 9,
    "twice": 0,
    "never": 0,
    "kills": 50,
    "same_order": True,
}


@pytest.mark.parametrize(
    ("changes", "cells"),
    [
        ({"kills": 12}, ["12 (missed: 50)"]),
        ({"findings": {"silent loss": 2}}, ["50", "**2**, missed: 0", "0"]),
        ({"findings": {"hang": 1, "exit code": 1}}, ["0", "**2** (hang, exit code), missed: 0"]),
        ({"twice": 3, "never": 1, "same_order": False}, ["3, 1 of 9", "**no**"]),
    ],
)
def test_row_says_what_was_missed(changes, cells):
    (row,) = [row for row in report.table({"programs": {"bash": RESULT | changes}}) if "bash script" in row]
    assert f"| {' | '.join(cells)} |" in row


def test_publishing_one_program_keeps_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "REPORT", tmp_path / "programs.json")
    monkeypatch.setattr(report, "PAGE", tmp_path / "programs.md")
    report.PAGE.write_text(f"before\n{report.BEGIN}\n{report.END}\nafter\n")

    report.publish({"bash": RESULT}, {}, "programs")
    report.publish({"keras": RESULT | {"twice": 3}}, {}, "programs")

    assert list(json.loads(report.REPORT.read_text())["programs"]) == ["keras", "bash"]
    text = report.PAGE.read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    assert text.count("not measured") == 6 * (len(PROGRAMS) - 2)
    assert "| weights | " in text and "3, 0 of 9" in text


def test_page_without_a_place_for_the_table_is_refused():
    with pytest.raises(ValueError, match="needs the lines"):
        report.with_table("a page", {"programs": {}})


def test_scripts_of_the_catalogue_exist():
    assert {program.script for program in PROGRAMS} == {
        path.name for path in Path(SCRIPTS).iterdir() if path.suffix in (".py", ".sh") and path.stem != "printing"
    }
