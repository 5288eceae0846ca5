"""What of Philly's job log is replayed, and what is left out and counted."""

import json

import pytest
from bench import philly
from bench.philly import parse_philly_jobs
from tiphys_plugin.quota.simulation.jobs import TraceJob
from tiphys_plugin.quota.simulation.trace import read_trace

from tiphys.errors import UsageError


def attempt(start, end, gpus=2, servers=1):
    return {"start_time": start, "end_time": end, "detail": [{"ip": "m1", "gpus": ["gpu"] * gpus}] * servers}


def job(name, *attempts, submitted="2017-10-07 01:00:00"):
    return {"status": "Pass", "vc": "ee9e8c", "jobid": name, "attempts": attempts, "submitted_time": submitted}


def test_a_job_holds_its_gpus_for_all_attempts_in_the_queue_of_its_virtual_cluster():
    first = job("a", attempt("2017-10-07 01:00:10", "2017-10-07 01:01:10"))
    second = job(
        "b",
        attempt("2017-10-07 01:02:00", "2017-10-07 01:02:30"),
        attempt("2017-10-07 01:03:00", "2017-10-07 01:03:40", gpus=8, servers=2),
        submitted="2017-10-07 01:01:00",
    )
    jobs, skipped = parse_philly_jobs(json.dumps([first, second]), "trace log")
    assert jobs == [TraceJob("a", 0, 60, 2, queue="ee9e8c"), TraceJob("b", 60, 70, 16, queue="ee9e8c")]
    assert not skipped


def test_jobs_that_cannot_be_replayed_are_counted_by_reason():
    entries = [
        job("never"),
        job("running", attempt("2017-10-07 01:00:10", None)),
        job("cpu", attempt("2017-10-07 01:00:10", "2017-10-07 01:01:10", gpus=0)),
        job("back", attempt("2017-10-07 01:00:10", "2017-10-07 01:00:00")),
        job("unsubmitted", attempt("2017-10-07 01:00:10", "2017-10-07 01:01:10"), submitted="None"),
    ]
    jobs, skipped = parse_philly_jobs(json.dumps(entries), "trace log")
    assert jobs == []
    assert sum(skipped.values()) == len(skipped) == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "trace log is no JSON"),
        ("{}", "trace log, the whole file: Input should be a valid list"),
        ('[{"vc": "a"}]', "trace log, 0.jobid: Field required"),
        (json.dumps([job("a", submitted="yesterday")]), "trace log, 0.submitted_time:"),
    ],
)
def test_an_invalid_job_log_is_refused_with_the_place(text, words):
    with pytest.raises(UsageError) as refused:
        parse_philly_jobs(text, "trace log")
    assert words in str(refused.value)


def test_the_trace_is_one_that_simulate_reads_sorted_by_submission(tmp_path, monkeypatch, capsys):
    later = job("b", attempt("2017-10-07 01:00:10", "2017-10-07 01:01:10"), submitted="2017-10-07 01:00:05")
    first = job("a", attempt("2017-10-07 01:00:10", "2017-10-07 01:01:10"))
    (tmp_path / "cluster_job_log").write_text(json.dumps([later, job("never"), first]))
    monkeypatch.setattr("sys.argv", ["philly", str(tmp_path / "cluster_job_log")])
    philly.main()
    written = capsys.readouterr()
    (tmp_path / "jobs.csv").write_text(written.out)
    trace = read_trace(tmp_path / "jobs.csv")
    assert [(one.name, one.submit_seconds, one.gpus) for one in trace.jobs] == [("a", 0, 2), ("b", 5, 2)]
    assert written.err == "left out: 1 never started, so without a duration\n"
