"""What Tiphys does about failures that would repeat themselves, and what nobody has to do by hand any more.

| what happens | what follows |
|---|---|
| a checkpoint kills whoever loads it | two processes are lost to it, the next attempt goes on from the one before |
| the program needs more memory than it has | the next attempts get more, up to the ceiling |
| two ranks need more memory than they have | both get more |
| memory is short, and an eviction comes in between | what was learned about memory stays |
"""

from itertools import pairwise

from hera.workflows import Resources
from support.stories.interrupted_training.pipelines import expected_version, story
from support.stories.interrupted_training.scenarios import ended, version

from hera_pipelines import Retries
from tiphys.kube import Object
from tiphys.lineage.quarantine import read_quarantine_records
from tiphys.protocol.quantities import parse_memory_bytes
from tiphys.records import Cause
from tiphys.store import lineage_name

from .test_gangs import members
from .world import Workflow, World, evict

STEPS = 12
MEBIBYTE = 1 << 20


def limit_of(pod: Object) -> int:
    """Memory that its program may use."""
    main = next(one for one in pod["spec"]["containers"] if one["name"] == "main")
    return int(parse_memory_bytes(main["resources"]["limits"]["memory"], "the pod"))


def test_a_checkpoint_that_kills_its_readers_is_passed_over(world: World) -> None:
    training = {"retries": Retries(user_error=1, backoff="1s")}
    workflow = world.submit(story(world.place, steps=STEPS, fate="poison@6", training=training).compile())
    workflow.wait()
    attempts = workflow.attempts("train")
    starts = [one.claim.starts_from.global_step if one.claim.starts_from else 0 for one in attempts]
    assert starts == [0, 6, 4]  # two processes of the first two attempts have died of it
    [record] = read_quarantine_records(world.store, lineage_name(workflow.run, "train")).values()
    assert record.checkpoint.global_step == 6
    assert version(world.store, workflow.run) == expected_version(STEPS)


def hungry(world: World, nodes: int = 1, **story_options: object) -> Workflow:
    """A training that needs 256 MiB from step 7 on, and is given 160 at first."""
    retries = Retries(out_of_memory=3, memory_factor=1.5, memory_ceiling="1Gi", backoff="1s")
    several = {"nodes": nodes} if nodes > 1 else {}
    options = {"resources": Resources(memory_request="64Mi", memory_limit="160Mi")}
    made = story(
        world.place,
        steps=STEPS,
        fate="hungry@7",
        training={"retries": retries, **several},
        train_options=options,
        **story_options,  # type: ignore[arg-type]
    )
    return world.submit(made.compile())


def test_an_attempt_after_out_of_memory_gets_a_higher_memory_limit(world: World) -> None:
    workflow = hungry(world)
    workflow.wait()
    *short, last = workflow.attempts("train")
    assert short
    assert {ended(one).cause for one in short} == {Cause.OUT_OF_MEMORY}
    given = [limit_of(workflow.pods(step="train", attempt=str(one.claim.attempt))[-1]) for one in [*short, last]]
    assert given[0] == 160 * MEBIBYTE
    assert all(after >= 1.5 * before for before, after in pairwise(given))
    assert last.claim.escalation is not None
    assert last.claim.escalation.memory_bytes == given[-1]
    assert version(world.store, workflow.run) == expected_version(STEPS)


def test_ranks_that_ran_out_of_memory_all_get_more_of_it(world: World) -> None:
    workflow = hungry(world, nodes=2)
    workflow.wait()
    *short, last = workflow.attempts("train")
    assert short
    assert {ended(one).cause for one in short} == {Cause.OUT_OF_MEMORY}
    assert last.claim.escalation is not None
    grown = last.claim.escalation.memory_bytes
    assert grown is not None
    assert grown > 160 * MEBIBYTE
    assert [limit_of(pod) for pod in members(workflow, last.claim.attempt)] == [grown] * 2
    assert version(world.store, workflow.run) == expected_version(STEPS)


def test_an_eviction_does_not_make_it_forget_what_memory_it_takes(world: World) -> None:
    workflow = hungry(world, pause=1.0)
    enough = workflow.wait_for(
        "an attempt has more memory and gets further",
        lambda: [ref.attempt for ref in workflow.checkpoints() if ref.global_step >= 8],
    )[0]
    [pod] = workflow.pods(step="train", attempt=str(enough))
    evict(world, pod["metadata"]["name"])
    workflow.wait()
    last = workflow.attempts("train")[-1]
    assert last.claim.attempt == enough + 1
    assert ended(workflow.attempts("train")[-2]).cause is Cause.PREEMPTION
    assert limit_of(workflow.pods(step="train", attempt=str(enough + 1))[-1]) >= limit_of(pod)
    assert version(world.store, workflow.run) == expected_version(STEPS)
