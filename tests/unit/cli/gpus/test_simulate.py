"""``tiphys simulate``: a trace and a queue file in, the numbers of each queue and a picture out."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from hera_pipelines.cli import main

QUEUES = (
    'queues:\n  - {name: research, gpus: {"*": 4}, cohort: lab}\n  - {name: nightly, gpus: {"*": 0}, cohort: lab}\n'
)
LARGER = (
    'queues:\n  - {name: research, gpus: {"*": 8}}\n  - {name: nightly, gpus: {"*": 2}}\n'
    '  - {name: guests, gpus: {"*": 1}}\n'
)
TRACE = (
    "submit_seconds,duration_seconds,gpus,queue\n"
    "0,3600,4,research\n"
    "0,3600,4,research\n"
    "0,1800,2,nightly\n"
    "60,60,9,research\n"
)
PAGE = Path(__file__).parents[4] / "docs" / "simulate.md"


class Desk:
    """A folder with a trace and queue files, and the command in it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys
        self.write("jobs.csv", TRACE)
        self.write("queues.yaml", QUEUES)
        self.write("larger.yaml", LARGER)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def read(self) -> str:
        """What was written since."""
        return "".join(self._capsys.readouterr())

    def simulate(self, *arguments: str) -> tuple[int, str, str]:
        code = main(["simulate", "jobs.csv", "--queues", "queues.yaml", *arguments])
        return (code, *self._capsys.readouterr())

    def document(self, *arguments: str) -> dict:
        code, out, _ = self.simulate("-o", "json", *arguments)
        assert code == 0
        return json.loads(out)


@pytest.fixture
def desk(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Desk(tmp_path, capsys)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_the_table_has_a_row_for_each_queue_and_one_for_all(desk):
    code, out, err = desk.simulate()
    assert code == 0
    header, *lines = [cells(line) for line in out.splitlines()]
    assert header[:4] == ["QUEUE", "JOBS", "REJECTED", "MEAN WAIT"]
    assert [line[0] for line in lines] == ["research", "nightly", "all"]
    research = dict(zip(header, lines[0], strict=True))
    assert research["JOBS"] == "3"
    assert research["MEAN WAIT"] == "30m"
    assert research["MAX"] == "1h"
    assert research["GPU-HOURS"] == "8"
    assert research["SLOWDOWN"] == "1.50"
    assert "queues.yaml: 1 job rejected: ExceedsMaxQuota" in err
    assert "from first submission to last end: 2h 30m" in err


def test_columns_that_would_be_zero_are_left_out(desk):
    desk.write("jobs.csv", "submit_seconds,duration_seconds,gpus,queue\n0,10,1,research\n")
    out = desk.simulate()[1]
    assert "REJECTED" not in out
    assert "NOT STARTED" not in out


def test_queue_files_are_shown_side_by_side(desk):
    code, out, err = desk.simulate("--against", "larger.yaml")
    assert code == 0
    lines = [cells(line) for line in out.splitlines()]
    assert lines[0] == ["QUEUE", "MEASURE", "queues.yaml", "larger.yaml", "CHANGE"]
    assert lines[1] == ["research", "jobs", "3", "3"]
    assert ["mean wait", "30m", "0s", "-100%"] in lines
    assert ["of quota", "80.0%", "100.0%", "+20.0 points"] in lines
    assert [line[0] for line in lines if line[1] == "jobs"] == ["research", "nightly", "guests", "all"]
    assert "queues.yaml: ran 3 of 4 jobs, from first submission" in err
    assert "larger.yaml: ran 3 of 4 jobs, from first submission" in err


@pytest.mark.parametrize(("file", "arguments"), [("queues.yaml", ()), ("larger.yaml", ("--against", "larger.yaml"))])
def test_queue_that_a_file_does_not_have_is_refused_with_those_that_it_has(desk, file, arguments):
    desk.write(file, 'queues: [{name: nightly, gpus: {"*": 4}}, {name: guests, gpus: {"*": 4}}]')
    code, out, err = desk.simulate(*arguments)
    assert (code, out) == (2, "")
    assert f"queue file {file} has no queue 'research', for which 3 jobs of the trace ask" in err
    assert "it has: nightly, guests" in err


def test_files_are_compared_over_the_jobs_that_both_admit(desk):
    desk.write("larger.yaml", LARGER.replace("8", "16"))
    code, out, err = desk.simulate("--against", "larger.yaml")
    assert code == 0
    assert ["research", "jobs", "2", "2"] in [cells(line) for line in out.splitlines()]
    assert "left out: 1 job that only one of the files admits" in err
    assert err.count("ran 3 of 3 jobs") == 2


def test_files_without_a_common_job_are_refused(desk):
    desk.write("jobs.csv", "submit_seconds,duration_seconds,gpus,queue\n0,60,5,research\n")
    code, out, err = desk.simulate("--against", "larger.yaml")
    assert (code, out) == (2, "")
    assert "queues.yaml and larger.yaml admit no job of jobs.csv both" in err


def test_programs_get_a_document(desk):
    found = desk.document("--against", "larger.yaml", "--policy", "skip")
    assert (found["kind"], found["policy"], found["trace"]["jobs"]) == ("Simulation", "skip", 4)
    assert [one["queue_file"] for one in found["replays"]] == ["queues.yaml", "larger.yaml"]
    research = found["replays"][0]["queues"][0]
    assert research["rejected"] == {"ExceedsMaxQuota": 1}
    assert research["wait"]["most"] == 3600
    assert found["replays"][0]["total"]["queue"] is None
    as_yaml = yaml.safe_load(desk.simulate("-o", "yaml", "--against", "larger.yaml", "--policy", "skip")[1])
    assert as_yaml == found


def test_jobs_without_a_queue_are_drawn_or_given(desk):
    desk.write("jobs.csv", "submit_seconds,duration_seconds,gpus\n" + "0,60,1\n" * 40)
    _, _, err = desk.simulate("--seed", "3")
    assert "40 jobs without a queue drawn over the queues by their quotas, with seed 3" in err
    drawn, again = desk.document("--seed", "3"), desk.document("--seed", "3")
    assert drawn == again != desk.document("--seed", "4")
    given = desk.document("--queue", "nightly")
    assert [one["jobs"] for one in given["replays"][0]["queues"]] == [0, 40]


def test_declared_durations_let_others_go_first(desk):
    desk.write("queues.yaml", 'queues: [{name: research, gpus: {"*": 4}, backfill: strict}]')
    desk.write(
        "jobs.csv",
        "submit_seconds,duration_seconds,gpus,queue\n0,100,3,research\n1,100,4,research\n2,50,1,research\n",
    )
    silent, declared = desk.document(), desk.document("--declare-durations")
    waits = [found["replays"][0]["total"]["wait"]["mean"] for found in (silent, declared)]
    assert waits[0] > waits[1] == pytest.approx(33)


def test_rows_columns_and_time_limits_left_out_of_a_replay_are_reported(desk):
    desk.write("jobs.csv", "num_gpu,gpu_milli,creation_time,deletion_time,scheduled_time\n1,1000,0,9,0\n1,500,0,9,0\n")
    assert "left out: 1 row with a part of a GPU" in desk.simulate()[2]
    desk.write("jobs.csv", "submit_seconds,duration_seconds,gpus,limit_seconds,color\n0,10,1,5,red\n")
    err = desk.simulate()[2]
    assert "ignored columns: color" in err
    assert "1 job ended at limit_seconds, before the duration was over" in err


def test_jobs_of_a_stopped_queue_are_reported(desk):
    desk.write("queues.yaml", 'queues: [{name: research, gpus: {"*": 4}, stopped: true}]\n')
    desk.write("jobs.csv", "submit_seconds,duration_seconds,gpus\n0,10,1\n")
    code, out, err = desk.simulate("--plot", "out.svg")
    assert code == 0
    assert "NOT STARTED" in out
    assert "queues.yaml: 1 job never started: the queue is stopped" in err
    ElementTree.parse(desk.folder / "out.svg")


def test_the_picture_is_written(desk):
    code, _, err = desk.simulate("--against", "larger.yaml", "--plot", "out.svg")
    assert code == 0
    assert "wrote out.svg" in err
    root = ElementTree.parse(desk.folder / "out.svg").getroot()
    assert [label.text for label in root.iter() if label.get("class") == "section"] == ["queues.yaml", "larger.yaml"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--queue", "nobody"], "there is no queue 'nobody' for the jobs of the trace"),
        (["--queue", "guests"], "there is no queue 'guests'"),
        (["--against", "none.yaml"], "queue file none.yaml cannot be read"),
        (["--policy", "random"], "random"),
    ],
)
def test_a_wrong_call_is_refused(desk, arguments, words):
    code, out, err = desk.simulate(*arguments)
    assert (code, out) == (2, "")
    assert words in err


def test_a_wrong_cell_is_refused_with_its_place(desk):
    desk.write("jobs.csv", "submit_seconds,duration_seconds,gpus\n0,10,many\n")
    code, _, err = desk.simulate()
    assert code == 2
    assert "trace jobs.csv, line 2, column gpus: 'many' is not a whole number from 1" in err


def test_a_picture_that_cannot_be_written_is_an_error(desk):
    code, _, err = desk.simulate("--plot", "missing/out.svg")
    assert code == 2
    assert "cannot write the picture to missing/out.svg" in err


def test_the_page_shows_what_happens(desk):
    page = PAGE.read_text()
    (jobs,) = blocks(page, "csv")
    desk.write("jobs.csv", jobs)
    for name, text in zip(("queues.yaml", "proposed.yaml"), blocks(page, "yaml"), strict=True):
        desk.write(name, text)
    calls = [call.splitlines() for console in blocks(page, "console") for call in console.split("$ tiphys ")[1:]]
    assert [len(shown) for shown in calls] == [5, 10]
    for command, *shown in calls:
        assert main(command.split()) == 0
        found = iter(desk.read().splitlines())
        assert [line for line in shown if line != "…" and line not in found] == []


ATTAINED = 'queues: [{name: research, gpus: {"*": 4}, order: attained, preempts_longer: true}]'
LONG_AND_SHORT = "submit_seconds,duration_seconds,gpus,queue\n0,36000,4,research\n6300,600,4,research\n"


def test_trainings_that_go_are_counted_with_what_it_cost(desk):
    desk.write("jobs.csv", LONG_AND_SHORT)
    desk.write("queues.yaml", ATTAINED)
    code, out, _ = desk.simulate("--save-seconds", "100", "--restart-seconds", "800")
    assert code == 0
    header, line, _ = [cells(row) for row in out.splitlines()]
    row = dict(zip(header, line, strict=True))
    assert (row["PREEMPTED"], row["LOST"], row["MAX"]) == ("1", "1", "21m 40s")
    found = desk.document("--checkpoint-every", "30m")
    assert found["costs"]["checkpoint_every_seconds"] == 1800
    assert found["replays"][0]["total"]["lost_gpu_hours"] == pytest.approx(4 * (30 + 60) / 3600)


def test_a_plain_policy_preempts_no_lease(desk):
    desk.write("jobs.csv", LONG_AND_SHORT)
    desk.write("queues.yaml", ATTAINED)
    code, out, _ = desk.simulate("--policy", "skip")
    assert code == 0
    assert "PREEMPTED" not in out


@pytest.mark.parametrize("text", ["0s", "soon"])
def test_an_interval_that_is_none_is_refused(desk, text):
    code, _, err = desk.simulate("--checkpoint-every", text)
    assert code == 2
    assert "--checkpoint-every" in err
