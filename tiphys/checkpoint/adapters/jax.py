"""Captures and restores a JAX training: any tree of arrays and random keys, such as the states of Flax and Optax.

    from tiphys import checkpoint
    from tiphys.checkpoint.adapters.jax import capture, load

    with checkpoint.session(total_steps) as session:
        if (saved := session.restore()) is not None:
            state = load(saved, state)
        while state.step < total_steps:
            state = train_step(state, next_batch())
            session.step(int(state.step), lambda: capture(state))

Arrays of JAX never change, so the session copies those of a CPU while the training goes on. A step that was compiled
with ``donate_argnums`` may take them all the same: on a CPU, JAX copies what is referenced elsewhere. Arrays of other
devices are copied to the host by `capture`. Both wait until the device has computed them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tiphys.checkpoint.state.arrays import freeze
from tiphys.errors import UsageError

_ARRAY, _WEAK = "jax.array", "weak"


def capture(tree: Any) -> dict[str, Any]:
    """Return the leaves of ``tree`` by their paths, for `tiphys.checkpoint.Session.step` and ``save``.

    Leaves that are no arrays of JAX, such as a step count or the state of NumPy's generator, are saved as they are.

    Raises:
        UsageError: parts of an array are in other processes.
    """
    leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    for path, leaf in leaves:
        if isinstance(leaf, jax.Array):
            if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
                raise UsageError(
                    f"state{path}: parts of this array are in other processes, so this one cannot save it; let Orbax "
                    "write checkpoints into a folder, and run the program under tiphys-exec"
                )
            _bits(leaf).copy_to_host_async()
    return {path: _encode(leaf) if isinstance(leaf, jax.Array) else leaf for path, leaf in leaves}


def load(state: dict[str, Any], like: Any) -> Any:
    """Return ``state``, which `capture` returned, as a tree of the form of ``like``, on the devices of its arrays.

    Args:
        state: The restored state.
        like: A tree of the program, such as the one that it begins with; its values do not matter.

    Raises:
        UsageError: a leaf of the one is not in the other, or is an array of another shape or type.
    """
    leaves, form = jax.tree_util.tree_flatten_with_path(like)
    expected = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    if differing := sorted(expected.keys() ^ state.keys()):
        place = "the program's state" if differing[0] in expected else "the checkpoint"
        raise UsageError(f"only {place} has state{differing[0]}; load the state of the program that was saved")
    return jax.tree_util.tree_unflatten(form, [_decode(state[path], leaf, path) for path, leaf in expected.items()])


def _encode(leaf: Any) -> dict[str, Any]:
    source = _bits(leaf)
    bits = np.asarray(source)
    if source.sharding.memory_kind == "pinned_host":  # JAX refuses to donate such memory while a view of it exists
        bits = bits.copy()
    return {_ARRAY: freeze(bits), _WEAK: source.weak_type}


def _decode(value: Any, like: Any, path: str) -> Any:
    if not isinstance(value, dict):  # a leaf is no container
        return value
    bits = value[_ARRAY]
    if isinstance(like, jax.Array):
        found = _bits(like)
        if (found.shape, found.dtype) != (bits.shape, bits.dtype):
            raise UsageError(
                f"state{path} is {bits.dtype}{list(bits.shape)} in the checkpoint and {found.dtype}{list(found.shape)} "
                "in the program; restore with the model that was saved"
            )
    # Weak types decide how a number is promoted, and JAX has them of Python's numbers only.
    array = jnp.asarray(bits.item()) if value[_WEAK] and not bits.ndim else jnp.asarray(bits)
    if not isinstance(like, jax.Array):
        return array
    array = jax.device_put(array, found.sharding)
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like)) if _is_key(like) else array


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _bits(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf
