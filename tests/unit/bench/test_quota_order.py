"""Random jobs of the benchmark of queue orders, and the picture of what bounds on overtaking cost."""

from math import fsum
from xml.etree import ElementTree

import pytest
from bench.quota.frontier_svg import render_frontier
from bench.quota.order import FAMILIES, GPUS, families, jobs_of


@pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.name)
def test_a_family_asks_for_its_load_and_a_seed_gives_the_same_jobs(family):
    jobs = jobs_of(family, 3, 200)
    assert jobs == jobs_of(family, 3, 200)
    assert jobs != jobs_of(family, 4, 200)
    assert {job.gpus for job in jobs} <= set(family.sizes)
    if not family.per_burst:
        asked = fsum(job.gpus * job.duration_seconds for job in jobs)
        assert asked / (GPUS * jobs[-1].submit_seconds) == pytest.approx(family.load, rel=0.1)


def test_every_family_and_seed_has_a_ratio():
    found = families([0, 1], 4)
    assert found["ratios"].keys() == {family.name for family in FAMILIES}
    assert all(set(by_seed) == {"0", "1"} for by_seed in found["ratios"].values())
    assert found["worst_ratio"] == max(max(by_seed.values()) for by_seed in found["ratios"].values())


def test_the_picture_has_every_point_of_every_trace():
    points = {name: {"ratio": 1.2, "gang_wait_hours": 5} for name in ("skip", "strict", "24", "48")}
    picture = ElementTree.fromstring(render_frontier({"one": points, "three": points}))
    circles = [one for one in picture if one.tag.endswith("circle")]
    assert len(circles) == 2 * len(points)
