"""A training in JAX that was interrupted goes on as if it had not been, and its arrays are saved without a wait.

| state | outcome |
|---|---|
| static fields, named tuples, random keys, bfloat16, weak types | equal in every bit after a restore |
| donated to the next steps while a save has not copied it yet | committed as it was |
| given to the session without `capture` | refused, with the remedy |
| leaves that the program lacks, or that have another shape | refused by name |
"""

import functools
import threading
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed here: make test-torch")

import jax
import jax.numpy as jnp
from support.builders.lineage import LINEAGE, ref
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import open_session

from tiphys.checkpoint.adapters.jax import capture, load
from tiphys.checkpoint.save import overlap
from tiphys.checkpoint.save.overlap import LatePiece
from tiphys.checkpoint.settings import SaveInterval
from tiphys.checkpoint.state.serialization import flatten_state
from tiphys.checkpoint.state.shards import plan_shards
from tiphys.errors import UsageError
from tiphys.lineage.select import list_commits
from tiphys.lineage.validity import read_manifest

WIDTH = 64
PATIENCE_SECONDS = 120


class Moments(NamedTuple):
    """As Optax has them."""

    count: Any
    mean: Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["step", "weights", "moments", "key"], meta_fields=["f"]
)
@dataclass
class TrainState:
    """As Flax has it, with a function that no checkpoint can hold."""

    step: Any
    weights: dict[str, Any]
    moments: tuple[Moments, None]
    key: Any
    f: Any = field(default=jnp.tanh)


def begin(seed: int = 0) -> TrainState:
    first, second, key = jax.random.split(jax.random.key(seed), 3)
    weights = {
        "in": jax.random.normal(first, (WIDTH, WIDTH)) / 8,
        "out": jax.random.normal(second, (WIDTH, WIDTH), jnp.bfloat16) / 8,
        "scale": jnp.asarray(1.0),
    }
    return TrainState(0, weights, (Moments(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, weights)), None), key)


def update(state: TrainState) -> TrainState:
    key, noise = jax.random.split(state.key)
    batch = jax.random.normal(noise, (4, WIDTH))

    def loss(weights: dict[str, Any]) -> Any:
        hidden = state.f(batch @ weights["in"] * weights["scale"])
        return jnp.square(hidden.astype(jnp.bfloat16) @ weights["out"]).mean().astype(jnp.float32)

    gradients = jax.grad(loss)(state.weights)
    mean = jax.tree.map(lambda old, gradient: 0.9 * old + gradient, state.moments[0].mean, gradients)
    weights = jax.tree.map(lambda old, moment: old - 0.01 * moment, state.weights, mean)
    return replace(
        state, step=state.step + 1, weights=weights, moments=(Moments(state.moments[0].count + 1, mean), None), key=key
    )


STEPS = {"kept": jax.jit(update), "donated": jax.jit(update, donate_argnums=0)}


def bits(state: TrainState) -> list[Any]:
    raw = [jax.random.key_data(leaf) if leaf is state.key else leaf for leaf in jax.tree.leaves(state)]
    return [(np.asarray(leaf).dtype, np.asarray(leaf).tobytes(), getattr(leaf, "weak_type", None)) for leaf in raw]


def digests(state: Any) -> list[bytes]:
    return [bytes(plan.data()) for plan in plan_shards(flatten_state(capture(state)))]


def shards(store: MemoryStore, step: int) -> list[bytes]:
    return [b"".join(store.chunks(shard.key)) for shard in read_manifest(store, ref(1, step)).shards]


@pytest.mark.parametrize("steps", STEPS)
def test_a_training_that_was_interrupted_is_the_one_that_was_not(steps):
    straight = begin()
    for _ in range(9):
        straight = STEPS[steps](straight)
    store, state = MemoryStore(), begin()
    with open_session(store, asynchronous=True) as session:
        for _ in range(4):
            state = STEPS[steps](state)
            session.step(int(state.step), functools.partial(capture, state))

    with open_session(store, 2, resume_from=ref(1, 4), asynchronous=True) as session:
        resumed = load(session.restore(), begin(seed=1))
        assert bits(resumed) == bits(state)
        while resumed.step < 9:
            resumed = STEPS[steps](resumed)
            session.step(int(resumed.step), functools.partial(capture, resumed))
    assert bits(resumed) == bits(straight)


@pytest.mark.parametrize("steps", STEPS)
def test_a_state_is_committed_as_it_was_although_later_steps_take_its_arrays(steps, monkeypatch):
    monkeypatch.setattr(overlap, "MIN_BYTES", 1)
    released, late, copy = threading.Event(), [], LatePiece.is_copied_exactly

    def copy_late(piece: LatePiece) -> bool:
        late.append(piece.path)
        assert threading.current_thread() is not threading.main_thread()
        assert released.wait(PATIENCE_SECONDS)
        return copy(piece)

    monkeypatch.setattr(LatePiece, "is_copied_exactly", copy_late)
    store, state = MemoryStore(), begin()
    with open_session(store, asynchronous=True, every=SaveInterval(600, "seconds")) as session:
        for _ in range(8):
            state = STEPS[steps](state)
            if state.step == 3:
                expected = digests(state)
                session.save(3, functools.partial(capture, state))
            else:
                session.step(int(state.step), functools.partial(capture, state))  # does not wait for the copy
        released.set()
    assert list_commits(store, LINEAGE) == [ref(1, 3)]
    assert shards(store, 3) == expected
    assert len(late) == len(jax.tree.leaves(state))


def test_arrays_without_capture_are_refused_with_the_remedy():
    with open_session(MemoryStore()) as session, pytest.raises(UsageError, match=r"adapters\.jax"):
        session.step(1, {"weights": jnp.zeros(3)})


def test_states_of_other_programs_are_refused_by_the_name_of_what_differs():
    saved = capture({"a": jnp.zeros(3), "b": 1})
    with pytest.raises(UsageError, match=r"only the checkpoint has state\['b'\]"):
        load(saved, {"a": jnp.zeros(3)})
    with pytest.raises(UsageError, match=r"only the program's state has state\['c'\]"):
        load(saved, {"a": jnp.zeros(3), "b": 1, "c": 2})
    with pytest.raises(UsageError, match=r"state\['a'\] is float32\[3\] in the checkpoint and float32\[4\]"):
        load(saved, {"a": jnp.zeros(4), "b": 1})


def test_arrays_with_parts_in_other_processes_are_refused(monkeypatch):
    array = jnp.zeros(3)
    for name in ("is_fully_addressable", "is_fully_replicated"):
        monkeypatch.setattr(type(array), name, property(lambda _: False))
    with pytest.raises(UsageError, match=r"state\[0\]: parts of this array are in other processes.*tiphys-exec"):
        capture([array])
