"""Captures and restores a PyTorch training: weights, optimizer, schedule, data position and random generators.

    from tiphys import checkpoint
    from tiphys.checkpoint.adapters import pytorch

    with checkpoint.session(total_steps) as session:
        step = 0
        if (state := session.restore()) is not None:
            step = pytorch.load(state, model, optimizer=optimizer, scheduler=scheduler)["step"]
        while step < total_steps:
            train_one_step()
            step += 1
            now = step
            session.step(now, lambda: pytorch.capture(model, optimizer=optimizer, scheduler=scheduler, step=now))

A resumed run equals an uninterrupted one bit for bit, as far as its kernels are
deterministic. The captured generators are the global ones of Python and NumPy,
and those of PyTorch on each device.
"""

import random
from typing import Any

import numpy as np
import torch

from tiphys.checkpoint.adapters.tensors import decode_tensors, encode_tensors
from tiphys.errors import UsageError


def random_state() -> dict[str, Any]:
    """Return the states of all global random generators, for `set_random_state`."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set all global random generators to ``state``; devices that this machine lacks are skipped."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator, device)


_RANDOM = "random"


def capture(
    model: Any,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    sampler: Any = None,
    scaler: Any = None,
    **extra: Any,
) -> dict[str, Any]:
    """Return the state of a training, for `tiphys.checkpoint.Session.step` and ``save``.

    Tensors on the CPU are not copied, so pass the state to the session before the
    next step changes them.

    Args:
        model: A module, or any other object with ``state_dict()``.
        optimizer: The optimizer; None for none.
        scheduler: The learning rate scheduler; None for none.
        sampler: The position in the data, such as torchdata's ``StatefulDataLoader``; None for none.
        scaler: The gradient scaler of mixed precision; None for none.
        extra: More objects with ``state_dict()``, or plain values such as a step count.

    Raises:
        UsageError: a tensor cannot be saved exactly, or ``extra`` uses a reserved name.
    """
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler, "scaler": scaler}
    parts = {name: part for name, part in parts.items() if part is not None} | extra
    if _RANDOM in parts:
        raise UsageError(
            f"the name {_RANDOM!r} is reserved for the state of the random generators; choose another name"
        )
    state: dict[str, Any] = encode_tensors(
        {name: _state_of(part) for name, part in parts.items()} | {_RANDOM: random_state()}
    )
    return state


def load(
    state: dict[str, Any],
    model: Any,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    sampler: Any = None,
    scaler: Any = None,
    **extra: Any,
) -> dict[str, Any]:
    """Load a state of `capture` into the same objects and return its plain values by name. Nothing is unpickled.

    Args:
        state: The restored state.
        model: The module.
        optimizer: The optimizer; None for none.
        scheduler: The learning rate scheduler; None for none.
        sampler: The position in the data; None for none.
        scaler: The gradient scaler; None for none.
        extra: The further objects that were captured, by the same names.

    Raises:
        UsageError: an object has no captured state, or a captured state has no object.
    """
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler, "scaler": scaler}
    parts = {name: part for name, part in parts.items() if part is not None} | extra
    remaining: dict[str, Any] = decode_tensors(state)
    generators = remaining.pop(_RANDOM)
    for name, part in parts.items():
        if name not in remaining:
            raise UsageError(f"the checkpoint has no state of {name}; it has {', '.join(remaining)}")
        part.load_state_dict(remaining.pop(name))
    unused = [name for name in ("optimizer", "scheduler", "sampler", "scaler") if name in remaining]
    if unused:
        raise UsageError(
            f"the checkpoint has a state of {', '.join(unused)}, for which no object was given; pass them to load()"
        )
    set_random_state(generators)  # last, because loading the objects may draw random numbers
    return remaining


def _state_of(part: Any) -> Any:
    return part.state_dict() if callable(getattr(part, "state_dict", None)) else part
