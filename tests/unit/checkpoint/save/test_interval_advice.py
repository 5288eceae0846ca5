"""What a run has measured about its checkpoints, and what follows from it."""

from datetime import UTC, datetime, timedelta

import pytest
from support.builders.lineage import LINEAGE, START_TIMES, claim_of, end_of

from tiphys.checkpoint.save.interval import IntervalLimit, advise_interval, daly_interval_seconds
from tiphys.checkpoint.settings import IntervalBounds
from tiphys.records import CheckpointManifest, Shard
from tiphys.store import Attempt

BEGAN = datetime(2030, 1, 1, tzinfo=UTC)
DAY = 24 * 3600.0


def manifest(attempt, step, seconds, stall=1.0, upload=4.0):
    return CheckpointManifest(
        lineage=LINEAGE,
        run="digits-1",
        step="fit",
        attempt=attempt,
        global_step=step,
        shards=(Shard(key="k", size=400, sha256="0" * 64),),
        began=START_TIMES,
        stage_seconds=stall,
        upload_seconds=upload,
        written_at=BEGAN + timedelta(seconds=seconds),
    )


def attempt(number, began, ended):
    claim = claim_of(number).model_copy(update={"written_at": BEGAN + timedelta(seconds=began)})
    end = end_of(number).model_copy(update={"written_at": BEGAN + timedelta(seconds=ended)})
    return Attempt(claim, end)


def test_medians_of_what_was_measured():
    saves = [manifest(1, 10, 600), manifest(1, 20, 1200), manifest(2, 30, 1900), manifest(2, 40, 2500, stall=50.0)]
    found = advise_interval(saves, [attempt(1, 0, 1300), attempt(2, 1400, 3000)], None)
    assert (found.saves, found.stall_seconds, found.upload_seconds, found.size_bytes) == (4, 1.0, 4.0, 400)
    assert found.bytes_per_second == 100
    assert found.failures == {"preemption": 2}
    assert found.training_seconds == 1300 + 1600
    assert found.mtbf_seconds == pytest.approx((2900 + DAY / 10) / 2.1)
    assert found.restart_seconds == 100
    assert found.used_seconds == 600  # the gap between the attempts is none between saves
    assert found.advised_seconds == pytest.approx(daly_interval_seconds(1.4, found.mtbf_seconds))


def test_the_advised_interval_loses_less_than_the_used_one():
    saves = [manifest(1, step, 5.0 * step) for step in range(1, 20)]
    found = advise_interval(saves, [attempt(1, 0, 3600)], None)
    assert found.lost_share > found.advised_lost_share > 0


def test_a_single_save_says_nothing_of_how_often():
    found = advise_interval([manifest(1, 10, 600)], [], None)
    assert (found.used_seconds, found.lost_share, found.restart_seconds) == (None, None, 0.0)


def test_without_bounds_the_advice_is_the_interval_that_loses_least():
    saves = [manifest(1, step, 5.0 * step, stall=0.002, upload=0.1) for step in range(1, 20)]
    found = advise_interval(saves, [attempt(number, 0, 60) for number in range(1, 9)], None)
    assert found.advised_seconds == found.daly_seconds < 10
    assert found.advised_lost_share < found.lost_share
    assert found.limit is None


def test_bounds_of_the_author_hold_and_are_named():
    found = advise_interval([manifest(1, 10, 600)], [], IntervalBounds(1000, 2000))
    assert (found.advised_seconds, found.limit) == (1000, IntervalLimit.BOUNDS)
    assert found.daly_seconds < 1000


def test_an_interval_is_never_shorter_than_an_upload():
    found = advise_interval([manifest(1, 10, 600, stall=0.0, upload=4000.0)], [], IntervalBounds(1, 2000))
    assert (found.advised_seconds, found.limit) == (4000, IntervalLimit.UPLOAD)


def test_uploads_of_no_time_have_no_bandwidth():
    assert advise_interval([manifest(1, 10, 600, upload=0.0)], [], None).bytes_per_second is None


def test_an_interval_that_would_never_end_has_no_share_of_lost_time():
    saves = [manifest(1, step, 1e9 * step) for step in (1, 2)]
    assert advise_interval(saves, [attempt(number, 0, 60) for number in range(1, 50)], None).lost_share is None
