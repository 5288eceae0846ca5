"""What a worker makes of notifications and of listings.

| what happens | what must hold |
|---|---|
| a notification, again, in two replicas at once, and a listing | one run |
| the same content is uploaded again, also to a new controller | nothing is started, counted or reported again |
| a notification is lost, or came while storage was down | a listing makes the run |
| an object is old, deleted, of another tenant, of a run store, a folder | no run |
| a key may be encoded or not | the object that exists |
| the rate of a namespace is used up | the rest waits; other namespaces do not |
| a template, a bucket or a store of one tenant is broken | the others go on |
| very many objects | a turn looks at a limited number, and the next goes on behind them |
"""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.builders.irregular_samples import Irregular
from support.stories.triggers import TriggerWorld, template, version
from tiphys_controller.submit.triggers.notification import NotifiedObject

from tiphys.errors import ForbiddenError, StoreError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.store import DirectoryStore, Store, list_runs, read_events

NONE = {"started": 0, "repeated": 0, "delayed": 0, "waiting": 0, "refused": 0, "unwanted": 0}
PARALLEL = 8


@pytest.fixture
def open_store(tmp_path: Path) -> Callable[[str], Store]:
    return lambda namespace: DirectoryStore(tmp_path / "stores" / namespace, namespace=namespace)


@pytest.fixture
def world(tmp_path: Path, open_store: Callable[[str], Store]) -> TriggerWorld:
    return TriggerWorld(
        tmp_path,
        open_store,
        template(objects="s3://raw/ml/"),
        template("text", "nlp", objects="s3://raw/nlp/"),
    )


def notified(*keys: str, bucket: str = "raw") -> list[NotifiedObject]:
    return [NotifiedObject(bucket, (key,)) for key in keys]


def sweep(world: TriggerWorld, rounds: int = 1) -> None:
    """A listing, and so many turns of each trigger."""
    for number in range(rounds):
        world.worker.run_round(threading.Event(), begin=number == 0)


def test_a_delivered_object_starts_a_run_of_its_tenant(world: TriggerWorld) -> None:
    world.buckets.put(version("ml/a"), version("nlp/b"))
    with capture_logs() as log:
        assert world.worker.handle_notification(notified("ml/a", "nlp/b")) == NONE | {"started": 2}
    assert (world.sources("ml"), world.sources("nlp")) == (["s3://raw/ml/a"], ["s3://raw/nlp/b"])
    assert world.metrics.made == {"delivered": 2}
    started = [one for one in log if one["event"] == "trigger.started"]
    assert [(one["object"], one["source"]) for one in started] == [
        ("s3://raw/ml/a", "delivered"),
        ("s3://raw/nlp/b", "delivered"),
    ]


def test_a_repeated_notification_starts_no_second_run(world: TriggerWorld) -> None:
    world.buckets.put(version("ml/a"))
    counts = [world.worker.handle_notification(notified("ml/a", "ml/a")) for _ in range(2)]
    restarted = world.new_worker()
    counts.append(restarted.handle_notification(notified("ml/a")))
    restarted.run_round(threading.Event())
    sweep(world)

    assert counts == [NONE | {"started": 1, "repeated": 1}, NONE | {"repeated": 2}, NONE | {"repeated": 1}]
    assert world.sources() == ["s3://raw/ml/a"]
    assert world.metrics.made == {"delivered": 1}


@pytest.fixture
def twins(tmp_path: Path, open_store: Callable[[str], Store]) -> tuple[str, str, TriggerWorld]:
    """Two namespaces whose triggers have one name and look at one bucket."""
    near, far = Irregular().namespaces(2)
    shared = (template("digits", namespace, objects="s3://shared/") for namespace in (near, far))
    return near, far, TriggerWorld(tmp_path, open_store, *shared, source="s3://shared")


def test_an_object_starts_a_run_of_each_trigger_of_one_name(twins: tuple[str, str, TriggerWorld]) -> None:
    near, far, world = twins
    world.buckets.put(version("a", bucket="shared"))
    counts = [world.worker.handle_notification(notified("a", bucket="shared")) for _ in range(2)]
    assert counts == [NONE | {"started": 2}, NONE | {"repeated": 2}]
    assert world.sources(near) == world.sources(far) == ["s3://shared/a"]


def test_triggers_of_one_name_in_two_namespaces_list_and_report_each_for_itself(
    twins: tuple[str, str, TriggerWorld],
) -> None:
    near, far, world = twins
    world.buckets.page_objects = 1
    world.buckets.put(*(version(key, bucket="shared") for key in ("a", "b", "c", "{{d}}")))
    with capture_logs() as log:
        sweep(world, rounds=6)
    assert world.sources(near) == world.sources(far) == [f"s3://shared/{key}" for key in "abc"]
    assert sorted(one["namespace"] for one in log if one["event"] == "trigger.refused") == [near, far]


def test_the_same_content_uploaded_again_is_not_reported_again(
    world: TriggerWorld, open_store: Callable[[str], Store]
) -> None:
    world.rates["ml"] = 1
    world.buckets.put(version("ml/a"))
    assert world.worker.handle_notification(notified("ml/a")) == NONE | {"started": 1}
    [run] = list_runs(open_store("ml"))
    world.buckets.put(version("ml/a", after_seconds=90.0))
    restarted = world.new_worker()
    with capture_logs() as log:
        counts = restarted.handle_notification(notified("ml/a"))
        restarted.run_round(threading.Event())

    assert counts == NONE | {"repeated": 1}, "it takes nothing of the rate"
    assert (log, world.metrics.made, len(world.sources())) == ([], {"delivered": 1}, 1)
    assert [event.name for event in read_events(open_store("ml"), run)] == ["run.triggered"]


def test_replicas_that_are_notified_at_once_make_one_run(world: TriggerWorld) -> None:
    world.buckets.put(version("ml/a"))
    workers = [world.new_worker() for _ in range(PARALLEL)]
    barrier = threading.Barrier(PARALLEL)
    counts: list[dict[str, int]] = []

    def deliver(number: int) -> None:
        barrier.wait()
        counts.append(workers[number].handle_notification(notified("ml/a")))

    threads = [threading.Thread(target=deliver, args=(number,)) for number in range(PARALLEL)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sweep(world)

    assert len(counts) == PARALLEL
    assert sum(one["started"] for one in counts) == 1
    assert world.sources() == ["s3://raw/ml/a"]


@pytest.mark.parametrize(
    ("key", "bucket", "seconds"),
    [
        ("ml/old", "raw", -1.0),
        ("ml/folder/", "raw", 60.0),
        ("other/a", "raw", 60.0),
        ("ml/a", "other", 60.0),
    ],
)
def test_other_objects_start_nothing(world: TriggerWorld, key: str, bucket: str, seconds: float) -> None:
    world.buckets.put(version(key, bucket=bucket, after_seconds=seconds))
    assert world.worker.handle_notification(notified(key, bucket=bucket)) == NONE | {"unwanted": 1}
    sweep(world)
    assert world.sources() == []


def test_an_object_that_is_gone_starts_nothing(world: TriggerWorld) -> None:
    assert world.worker.handle_notification(notified("ml/gone")) == NONE | {"unwanted": 1}


def test_a_run_store_within_the_watched_prefix_starts_nothing(
    tmp_path: Path, open_store: Callable[[str], Store]
) -> None:
    world = TriggerWorld(tmp_path, open_store, template(namespace="runs", objects="s3://raw/runs/"))
    own = [version("ml/tiphys/control/x", bucket="runs"), version("ml/tiphys/data/x", bucket="runs")]
    world.templates["ml", "loop"] = template("loop", objects="s3://runs/")
    world.worker.catalog.sources._urls = ("s3://runs",)
    world.buckets.put(*own, version("ml/free", bucket="runs"))
    world.worker.handle_notification(notified(*(one.key for one in own), bucket="runs"))
    sweep(world)
    assert world.sources() == ["s3://runs/ml/free"]


@pytest.mark.parametrize(("stored", "made"), [("ml/a b", 1), ("ml/a+b", 1), ("ml/a%20b", 0)])
def test_a_key_that_was_encoded_or_not_leads_to_the_object(world: TriggerWorld, stored: str, made: int) -> None:
    world.buckets.put(version(stored))
    counts = world.worker.handle_notification([NotifiedObject("raw", ("ml/a b", "ml/a+b"))])
    assert counts["started"] == made
    sweep(world)
    assert world.sources() == [f"s3://raw/{stored}"], "a listing knows the key"


def test_while_the_store_does_not_answer_the_sender_must_repeat(
    world: TriggerWorld, open_store: Callable[[str], Store]
) -> None:
    def refuse(namespace: str) -> Store:
        if namespace == "ml":
            raise StoreError("the store does not answer")
        return open_store(namespace)

    world.buckets.put(version("ml/a"), version("nlp/b"))
    world._open_store = refuse
    broken = world.new_worker()
    with pytest.raises(StoreError):
        broken.handle_notification(notified("ml/a", "nlp/b"))
    assert world.sources("nlp") == ["s3://raw/nlp/b"], "the other tenant's storage answers"
    broken.run_round(threading.Event())
    assert world.worker.handle_notification(notified("ml/a", "nlp/b")) == NONE | {"started": 1, "repeated": 1}


def test_a_refusal_of_one_tenant_does_not_have_the_objects_of_others_repeated(
    world: TriggerWorld, open_store: Callable[[str], Store]
) -> None:
    def refuse(namespace: str) -> Store:
        if namespace == "ml":
            raise ForbiddenError("exceeded quota: count/workflows.argoproj.io")
        return open_store(namespace)

    world.buckets.put(version("ml/a"), version("nlp/b"))
    world._open_store = refuse
    assert world.new_worker().handle_notification(notified("ml/a", "nlp/b")) == NONE | {"refused": 1, "started": 1}


def test_names_of_objects_fill_neither_the_log_nor_the_turn(world: TriggerWorld) -> None:
    world.buckets.put(*(version(f"ml/{{{{{number:04}}}}}") for number in range(300)), version("nlp/b"))
    with capture_logs() as log:
        sweep(world)
    refused = [one for one in log if one["event"] == "trigger.refused"]
    assert len(refused) == 20, "as many as it may start in a turn"
    assert world.sources("nlp") == ["s3://raw/nlp/b"]
    with capture_logs() as log:
        for _ in range(20):
            world.worker.run_round(threading.Event(), begin=False)
    assert [one["reason"][:22] for one in log] == ["there are more reasons"]


def test_a_refused_trigger_takes_nothing_of_the_rate(world: TriggerWorld) -> None:
    world.rates["ml"] = 1
    world.templates["ml", "digits"] = template(objects="s3://raw/ml/", parameter="other")
    world.templates["ml", "foreign"] = template("foreign", objects="s3://raw/ml/")
    del world.templates["ml", "foreign"]["spec"]["workflowMetadata"]["annotations"]
    world.templates["ml", "fine"] = template("fine", objects="s3://raw/ml/")
    world.buckets.put(version("ml/a"))
    counts = world.worker.handle_notification(notified("ml/a"))
    assert counts == NONE | {"refused": 2, "started": 1}


def test_a_bucket_that_does_not_answer_is_looked_at_later(world: TriggerWorld) -> None:
    world.buckets.put(version("ml/a"))
    world.buckets.is_down = True
    with capture_logs() as log:
        sweep(world)
    assert {one["event"] for one in log} == {"trigger.refused"}
    world.buckets.is_down = False
    sweep(world)
    assert world.sources() == ["s3://raw/ml/a"]


def test_the_objects_of_one_tenant_use_up_its_own_rate(world: TriggerWorld) -> None:
    world.rates["ml"] = 2
    world.buckets.put(*(version(f"ml/{number}") for number in range(5)), version("nlp/b"))
    counts = world.worker.handle_notification(notified(*(f"ml/{number}" for number in range(4)), "nlp/b"))
    assert counts == NONE | {"started": 3, "delayed": 2}
    sweep(world)
    assert (len(world.sources("ml")), len(world.sources("nlp"))) == (2, 1)
    world.rates["ml"] = 100
    world.worker.run_round(threading.Event(), begin=False)
    assert len(world.sources("ml")) == 5, "the same listing goes on"


def test_a_broken_template_leaves_the_other_tenant_alone(world: TriggerWorld) -> None:
    world.templates["ml", "digits"]["spec"] = "no spec"
    world.buckets.put(version("ml/a"), version("nlp/b"))
    assert world.worker.handle_notification(notified("ml/a", "nlp/b")) == NONE | {"refused": 1, "started": 1}
    world.templates["ml", "digits"]["spec"] = {"arguments": [], "workflowMetadata": []}
    sweep(world)
    assert (world.sources("ml"), world.sources("nlp")) == ([], ["s3://raw/nlp/b"])
    world.templates["ml", "digits"] = template(objects="s3://raw/ml/")
    sweep(world)
    assert world.sources("ml") == ["s3://raw/ml/a"], "once it is repaired"


def test_a_reason_is_logged_once_and_counted_each_time(world: TriggerWorld) -> None:
    world.templates["ml", "foreign"] = template("foreign", objects="s3://raw/nlp/")
    world.buckets.put(version("ml/{{x}}"))
    with capture_logs() as log:
        sweep(world)
        sweep(world)
    refused = [(one["trigger"], one["reason"][:20]) for one in log if one["event"] == "trigger.refused"]
    assert refused == [("foreign", "it looks at s3://raw"), ("digits", "s3://raw/ml/{{x}}: t")]
    assert (world.metrics.failures, world.metrics.problems) == (4, 1)


def test_a_turn_looks_at_a_limited_number_of_objects(world: TriggerWorld) -> None:
    world.buckets.page_objects = 10
    world.buckets.put(*(version(f"ml/{number:03}", after_seconds=-1.0) for number in range(60)), version("ml/new"))
    sweep(world)
    assert world.buckets.requests == 3, "two pages of one, one of the other tenant"
    assert world.sources() == []
    sweep(world, rounds=4)
    assert world.sources() == ["s3://raw/ml/new"]


def test_a_turn_starts_a_limited_number_of_runs(world: TriggerWorld) -> None:
    world.buckets.put(*(version(f"ml/{number:03}") for number in range(45)), version("nlp/b"))
    counts = []
    for number in range(3):
        world.worker.run_round(threading.Event(), begin=number == 0)
        counts.append((len(world.sources("ml")), len(world.sources("nlp"))))
    assert counts == [(20, 1), (40, 1), (45, 1)]


def test_an_object_waits_until_the_run_that_it_resumes_has_ended(world: TriggerWorld) -> None:
    world.templates["ml", "digits"] = template(objects="s3://raw/ml/")
    world.buckets.put(version("ml/a"))
    sweep(world)
    [run] = world.submitter.names()
    world.templates["ml", "again"] = template("again", objects="s3://raw/ml/", resume=run)
    sweep(world)
    assert (world.metrics.waiting, world.submitter.names()) == (1, [run])
    world.submitter.end(run, namespace="ml")
    sweep(world)
    assert (world.metrics.waiting, world.submitter.names()) == (0, [run, f"{run}-2"])
    sweep(world)
    assert world.submitter.names() == [run, f"{run}-2"]


def test_the_objects_that_wait_for_all_triggers_are_counted_together(
    world: TriggerWorld, open_store: Callable[[str], Store]
) -> None:
    world.buckets.put(version("ml/a"), version("nlp/b"))
    sweep(world)
    world.templates.clear()
    for namespace in ("ml", "nlp"):
        [run] = list_runs(open_store(namespace))
        objects = f"s3://raw/{namespace}/"
        world.templates[namespace, "again"] = template("again", namespace, objects=objects, resume=run)
    world.buckets.put(version("ml/c"))
    sweep(world, rounds=2)
    assert world.metrics.waiting == 3


def test_objects_that_wait_are_not_counted_twice_while_the_next_listing_meets_them_again(world: TriggerWorld) -> None:
    world.buckets.put(version("ml/a"))
    sweep(world)
    [run] = world.submitter.names()
    world.templates = {("ml", "again"): template("again", objects="s3://raw/ml/", resume=run)}
    world.buckets.page_objects = 1
    world.buckets.put(*(version(f"ml/{name}") for name in Irregular().run_names(3)))
    sweep(world, rounds=3)
    assert world.metrics.waiting == 4
    counts = []
    for number in range(3):
        world.worker.run_round(threading.Event(), begin=number == 0)
        counts.append(world.metrics.waiting)
    assert counts == [4, 4, 4]


def test_a_pipeline_that_names_its_runs_alike_has_one_run_and_the_next_object_is_refused(world: TriggerWorld) -> None:
    [finalize] = [
        one for one in world.templates["ml", "digits"]["spec"]["templates"] if one["name"].endswith("finalize")
    ]
    finalize["plugin"]["tiphys"]["run"] = "nightly"
    world.buckets.put(version("ml/a"), version("ml/b"))
    assert world.worker.handle_notification(notified("ml/a")) == NONE | {"started": 1}
    assert world.worker.handle_notification(notified("ml/b")) == NONE | {"refused": 1}
    assert world.submitter.names() == ["nightly"]


def test_too_many_notifications_at_once_are_put_off(world: TriggerWorld) -> None:
    taken = [world.worker._deliveries.acquire(blocking=False) for _ in range(9)]
    assert taken == [True] * 8 + [False]
    with pytest.raises(StoreError, match="repeat this one"):
        world.worker.handle_notification(notified("ml/a"))
    world.worker._deliveries.release()
    assert world.worker.handle_notification(notified("ml/a")) == NONE | {"unwanted": 1}


class Ticks(threading.Event):
    """Time passes only while the worker waits; ``rounds`` are the times of its rounds, negative if one goes on."""

    def __init__(self, world: TriggerWorld, seconds: float) -> None:
        super().__init__()
        self.world, self.seconds = world, seconds
        self.rounds: list[float] = []
        self._run_round = world.worker.run_round
        world.worker.run_round = self._observe  # type: ignore[method-assign]

    def wait(self, timeout: float | None = None) -> bool:
        self.world.now += timeout or 0.0
        if self.world.now > self.seconds:
            self.set()
        return self.is_set()

    def _observe(self, stop: threading.Event, *, begin: bool = True) -> None:
        self.rounds.append(self.world.now if begin else -self.world.now)
        self._run_round(stop, begin=begin)


def test_the_leader_lists_at_an_interval_and_goes_on_at_once_with_a_long_listing(world: TriggerWorld) -> None:
    world.buckets.page_objects = 10
    world.buckets.put(*(version(f"ml/{number:03}") for number in range(35)))
    ticks = Ticks(world, 130.0)
    world.worker.run(ticks)

    assert ticks.rounds == [0.0, -1.0, 60.0, -61.0, 120.0, -121.0]
    assert len(world.sources()) == 35


def test_an_api_server_that_does_not_answer_is_asked_again(world: TriggerWorld) -> None:
    world.buckets.put(version("ml/a"))

    def refuse() -> list[Manifest]:
        if world.now < 60.0:
            raise StoreError("the API server does not answer")
        return list(world.templates.values())

    world.worker.catalog._list_templates = refuse
    world.worker.run(Ticks(world, 70.0))

    assert world.sources() == ["s3://raw/ml/a"]
    assert world.metrics.failures == 1
