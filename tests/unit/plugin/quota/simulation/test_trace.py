"""What a trace file may look like, and what is said about one that is wrong.

| form       | told by its columns                              | rows that are left out             |
|------------|--------------------------------------------------|------------------------------------|
| jobs       | submit_seconds, duration_seconds, gpus           | none: a wrong cell is refused      |
| Muri       | submit_time, duration, num_gpu (milliseconds)    | none                               |
| openb pods | num_gpu, gpu_milli, creation, deletion, scheduled | no GPU, part of one, never started |
"""

from dataclasses import replace
from pathlib import Path

import pytest
from support.builders.ledger import cohort, queues
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.simulation.jobs import TraceJob, build_lease_request
from tiphys_plugin.quota.simulation.prepare import assign_by_quota, assign_to_queue, declare_job_durations
from tiphys_plugin.quota.simulation.trace import read_trace

from tiphys.errors import UsageError

HEADER = "submit_seconds,duration_seconds,gpus"


@pytest.fixture
def written(tmp_path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "jobs.csv"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def test_the_columns_of_the_own_form_stand_in_any_order(written):
    trace = read_trace(
        written(
            "gpus,name,queue,submit_seconds,duration_seconds,priority,gpu_type,limit_seconds\n"
            "8,pretrain,research,60.5,7200,-3,A100,9000\n"
        )
    )
    assert trace.format_name == "jobs"
    assert trace.jobs == (TraceJob("pretrain", 60.5, 7200, 8, "research", "A100", -3, 9000),)


def test_optional_columns_may_be_missing_or_empty(written):
    short = read_trace(written(f"{HEADER}\n0,10,1\n"))
    empty = read_trace(written(f"{HEADER},queue,gpu_type,priority,name,limit_seconds\n0,10,1,,,,,\n"))
    assert short.jobs == empty.jobs == (TraceJob("line-2", 0, 10, 1),)


def test_a_job_says_how_it_uses_spot_nodes(written):
    trace = read_trace(written(f"{HEADER},spot\n0,10,1,only\n0,10,1,\n"))
    assert [job.spot for job in trace.jobs] == ["only", "no"]
    with pytest.raises(UsageError, match="line 2, column spot: 'yes' is not no, allowed or only"):
        read_trace(written(f"{HEADER},spot\n0,10,1,yes\n"))


def test_a_job_has_a_speed_on_each_of_its_types(written):
    trace = read_trace(written(f"{HEADER},gpu_type,speed\n0,100,1,A100|H100,1|2.5\n0,100,1,A100|H100,\n"))
    assert [job.speed for job in trace.jobs] == [(1, 2.5), ()]
    assert [build_lease_request(job, 1).gpu_types for job in trace.jobs] == [("H100", "A100"), ("A100", "H100")]
    assert [job.longest_seconds for job in trace.jobs] == [100, 100]
    [declared] = declare_job_durations([replace(trace.jobs[0], speed=(0.5, 2))])
    assert declared.limit_seconds == 200
    assert not declared.is_cut_short
    assert replace(declared, limit_seconds=49).is_cut_short


@pytest.mark.parametrize(
    ("types", "speed"),
    [
        ("A100|H100", "1"),
        ("A100|H100", "1|2|3"),
        ("A100", "2"),
        ("", "2"),
        ("A100|H100", "1|fast"),
        ("A100|H100", "1|0"),
        ("A100|H100", "1|-2"),
        ("A100|H100", "1|nan"),
        ("A100|H100", "1|inf"),
        ("A100|H100", "1|1e300"),
    ],
)
def test_a_speed_that_makes_no_sense_is_refused_with_its_place(written, types, speed):
    with pytest.raises(UsageError, match=r"line 2, column speed: .* is not a number from 0.001 to 1000 for each of"):
        read_trace(written(f"{HEADER},gpu_type,speed\n0,100,1,{types},{speed}\n"))


def test_a_job_names_its_namespace_and_is_sent_only_to_queues_that_it_may_use(written):
    trace = read_trace(written(f"{HEADER},namespace\n0,10,1,ml\n0,10,1,\n"))
    assert [job.namespace for job in trace.jobs] == ["ml", None]
    owned = [{"name": "a", "gpus": {"*": 8}, "namespaces": ["vision"]}, {"name": "b", "gpus": {"*": 8}}]
    assigned = assign_by_quota(trace.jobs[:1] * 20, Queues.model_validate({"queues": owned}), seed=1)
    assert {job.queue for job in assigned} == {"b"}


def test_jobs_come_in_order_of_submission_and_those_of_one_instant_as_they_stand(written):
    trace = read_trace(written(f"{HEADER},name\n9,1,1,late\n0,1,1,first\n0,1,1,second\n"))
    assert [job.name for job in trace.jobs] == ["first", "second", "late"]


def test_a_spreadsheets_file_is_read(written):
    trace = read_trace(written(b"\xef\xbb\xbfsubmit_seconds, duration_seconds, gpus\r\n\r\n0, 10, 1\r\n"))
    assert trace.jobs == (TraceJob("line-3", 0, 10, 1),)


def test_columns_of_others_are_named(written):
    assert read_trace(written(f"{HEADER},prioritty\n0,10,1,5\n")).ignored == ("prioritty",)


def test_times_of_muri_are_milliseconds(written):
    trace = read_trace(
        written("job_id,num_gpu,submit_time,model_name,duration,priority\n7,8,201694000,dqn,4472936000,1\n")
    )
    assert trace.format_name == "Muri"
    assert trace.jobs == (TraceJob("job-7", 201_694, 4_472_936, 8),)
    assert trace.ignored == ()


def test_pods_of_openb_that_are_no_jobs_with_whole_gpus_are_counted(written):
    columns = (
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
    )
    rows = (
        "whole,1,1,8,1000,,LS,Running,10,110,30",
        "typed,1,1,1,1000,V100M32,LS,Running,10,110,10",
        "either,1,1,1,1000,T4|P100,LS,Running,20,110,20",
        "none,1,1,0,0,,LS,Running,10,110,10",
        "part,1,1,1,460,,LS,Running,10,110,10",
        "part,1,1,1,810,,LS,Running,10,110,10",
        "never,1,1,1,1000,,LS,Pending,10,110,",
    )
    trace = read_trace(written("\n".join((columns, *rows))))
    assert trace.format_name == "openb pods"
    assert trace.jobs == (
        TraceJob("whole", 10, 80, 8),
        TraceJob("typed", 10, 100, 1, gpu_type="V100M32"),
        TraceJob("either", 20, 90, 1, gpu_type="T4|P100"),
    )
    assert trace.skipped == {
        "without a GPU": 1,
        "with a part of a GPU": 2,
        "never started, so without a duration": 1,
    }


def test_pods_of_openb_without_the_column_of_types_take_any_type(written):
    columns = "name,num_gpu,gpu_milli,creation_time,deletion_time,scheduled_time"
    trace = read_trace(written(f"{columns}\nwhole,8,1000,10,110,30\n"))
    assert trace.format_name == "openb pods"
    assert trace.jobs == (TraceJob("whole", 10, 80, 8),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{HEADER}\n0,10,1\n0,10,four\n", "line 3, column gpus: 'four' is not a whole number from 1"),
        (f"{HEADER}\n0,10,0\n", "line 2, column gpus: '0' is not a whole number from 1"),
        (f"{HEADER}\n0,10,\n", "line 2, column gpus: nothing is not a whole number from 1"),
        (f"{HEADER}\n0,-1,1\n", "line 2, column duration_seconds: '-1' is not a number of seconds from 0"),
        (f"{HEADER}\nnan,1,1\n", "line 2, column submit_seconds: 'nan' is not a number of seconds from 0"),
        (f"{HEADER}\n0,inf,1\n", "line 2, column duration_seconds: 'inf' is not a number"),
        (f"{HEADER}\n1e300,1,1\n", "line 2, column submit_seconds: '1e300' is not a number of seconds from 0 to 1e+10"),
        (f"{HEADER},limit_seconds\n0,1,1,0\n", "column limit_seconds: '0' is not a whole number from 1"),
        (f"{HEADER},priority\n0,1,1,high\n", "column priority: 'high' is not a whole number from -10000000000"),
        (f"{HEADER},limit_seconds\n0,1,1,99999999999\n", "'99999999999' is not a whole number from 1 to 10000000000"),
        (f"{HEADER}\n0,1\n", "line 2, column gpus: the line has 2 cells, the first line has 3"),
        (f"{HEADER}\n0,1,1,1\n", "line 2, column after the last: the line has 4 cells, the first line has 3"),
        (f'{HEADER}\n0,1,"1\n', "expected comma-separated values"),
        ("", "must name the columns, at least submit_seconds,gpus,duration_seconds; found nothing"),
        ("when,how long\n1,2\n", "must name the columns"),
        (f"{HEADER},gpus\n0,1,1,1\n", "names column gpus twice"),
        (f"{HEADER}\n", "has no job that can be replayed"),
        (f"{HEADER}\n" + "0,1e10,1\n" * 11, "its jobs take more than 1e+11 s"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_rubbish_is_refused_with_its_place(written, text, words):
    path = written(text)
    with pytest.raises(UsageError) as refused:
        read_trace(path)
    assert str(refused.value).startswith(f"trace {path}")
    assert words in str(refused.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.csv")


JOBS = tuple(TraceJob(f"j{n}", n, 10, 1) for n in range(900))


def test_jobs_without_a_queue_are_given_to_one():
    jobs = (TraceJob("a", 0, 1, 1), TraceJob("b", 0, 1, 1, queue="other"))
    assert [job.queue for job in assign_to_queue(jobs, queues(research={"*": 1}, other={"*": 1}), "research")] == [
        "research",
        "other",
    ]


def test_a_queue_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match=r"there is no queue 'nightly' .* the queues are: research"):
        assign_to_queue(JOBS, queues(research={"*": 1}), "nightly")


def test_jobs_are_drawn_in_proportion_to_the_quotas():
    drawn = assign_by_quota(JOBS, queues(large={"A100": 4, "*": 2}, small={"*": 3}, empty={"*": 0}), seed=1)
    count = {name: sum(job.queue == name for job in drawn) for name in ("large", "small", "empty")}
    assert count["empty"] == 0
    assert 1.6 < count["large"] / count["small"] < 2.4


def test_only_quotas_that_serve_the_job_count():
    job = TraceJob("typed", 0, 1, 4, gpu_type="A100")
    drawn = assign_by_quota([job] * 50, queues(fits={"A100": 4}, type={"T4": 90}, size={"A100": 3}), seed=1)
    assert {one.queue for one in drawn} == {"fits"}


def test_a_queue_that_only_borrows_is_drawn_as_well():
    rules = cohort(owner={"gpus": {"A100": 4}}, guest={"gpus": {"A100": 0}})
    assert {job.queue for job in assign_by_quota(JOBS, rules, seed=1)} == {"owner", "guest"}


def test_a_job_too_large_for_every_queue_is_drawn_as_well():
    assert assign_by_quota([TraceJob("huge", 0, 1, 100)], queues(one={"*": 1}), seed=1)[0].queue == "one"


def test_the_same_seed_draws_the_same():
    rules = queues(a={"*": 1}, b={"*": 1})
    assert assign_by_quota(JOBS, rules, 7) == assign_by_quota(JOBS, rules, 7) != assign_by_quota(JOBS, rules, 8)


def test_without_any_queue_there_is_nothing_to_draw():
    with pytest.raises(UsageError, match="the queue file has none"):
        assign_by_quota(JOBS, queues(), 1)


def test_a_declared_duration_covers_the_real_one():
    jobs = declare_job_durations(
        [TraceJob("a", 0, 10.2, 1), TraceJob("b", 0, 0, 1), TraceJob("c", 0, 5, 1, limit_seconds=99)]
    )
    assert [job.limit_seconds for job in jobs] == [11, 1, 5]
    assert not any(job.is_cut_short for job in jobs)
