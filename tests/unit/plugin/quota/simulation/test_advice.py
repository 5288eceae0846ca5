"""Queues that lose to a plain one on a trace, and the settings under which they lose less."""

import pytest
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.simulation.advice import find_losses, list_alternatives, with_settings
from tiphys_plugin.quota.simulation.jobs import PreemptionCosts, TraceJob
from tiphys_plugin.quota.simulation.replay import POLICIES, replay_jobs
from tiphys_plugin.quota.simulation.results import SimulationOutcome, measure_replay

HOUR = 3600.0
EQUAL_LONG_JOBS = [TraceJob("fit", 0.0, 60 * HOUR, 2, "lab") for _ in range(8)]
"""Taking turns makes each of them end late."""
A_GANG_AND_SHORT_JOBS = [
    TraceJob("fit", 0.0, 400 * HOUR, 3, "lab"),
    TraceJob("gang", HOUR, HOUR, 4, "lab"),
    *(TraceJob("short", 2 * HOUR * number, HOUR, 1, "lab") for number in range(1, 150)),
]
"""A line that closes for a gang keeps the fourth GPU from the short jobs."""


def queues(**settings) -> Queues:
    return Queues.model_validate({"queues": [{"name": "lab", "gpus": {"*": 4}, **settings}]})


def losses(rules: Queues, jobs: list[TraceJob]):
    def measure(tried: Queues, policy: str = "tiphys") -> SimulationOutcome:
        costs = PreemptionCosts() if policy == "tiphys" else None
        return measure_replay(replay_jobs(tried, jobs, POLICIES[policy], costs=costs))

    return find_losses(rules, measure(rules), measure(rules, "skip"), measure)


def test_trainings_of_equal_length_lose_by_taking_turns():
    (loss,) = losses(queues(order="attained", preempts_longer=True, attained_gpu_hours=(1, 10)), EQUAL_LONG_JOBS)
    assert loss.queue == "lab"
    assert loss.factor > 1.02
    assert loss.alternatives[0].settings == {"order": None, "preempts_longer": None, "attained_gpu_hours": None}
    assert loss.alternatives[0].completion_seconds == pytest.approx(loss.plain_completion_seconds)


def test_a_line_that_closes_for_a_gang_loses_and_preemption_cures_it():
    (loss,) = losses(queues(), A_GANG_AND_SHORT_JOBS)
    assert loss.factor > 1.02
    assert {"order": "attained", "preempts_longer": True} in [one.settings for one in loss.alternatives]
    completions = [one.completion_seconds for one in loss.alternatives]
    assert completions == sorted(completions)
    assert completions[-1] < loss.completion_seconds


def test_a_queue_that_does_as_well_as_a_plain_one_is_not_named():
    assert losses(queues(), EQUAL_LONG_JOBS) == []


def test_a_setting_that_makes_all_jobs_together_wait_longer_is_not_recommended():
    rules = queues()
    outcome, plain = (
        measure_replay(replay_jobs(rules, A_GANG_AND_SHORT_JOBS, POLICIES[policy])) for policy in ("tiphys", "skip")
    )

    def measure(_: Queues) -> SimulationOutcome:
        worse = outcome.total.completion_seconds * 2
        total = outcome.total.__class__(**{**vars(outcome.total), "completion_seconds": worse})
        return SimulationOutcome(plain.queues, total, *list(vars(outcome).values())[2:])

    (loss,) = find_losses(rules, outcome, plain, measure)
    assert loss.alternatives == ()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"backfill": "strict"},
        {"backfill": "preemptible"},
        {"backfill_hours": 0},
        {"order": "attained"},
        {"order": "attained", "preempts_longer": True, "min_runtime_seconds": 60, "attained_gpu_hours": (2,)},
        {"order": "attained", "preempts_longer": True, "backfill": "strict"},
    ],
)
def test_every_alternative_is_a_queue_file_and_another_one(settings):
    rules = queues(**settings)
    for changes in list_alternatives(rules.queues[0]):
        assert with_settings(rules, "lab", changes).queues[0] != rules.queues[0]
