"""All that a PyTorch training is: weights, optimizer, schedule, position in the data, and every random generator.

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

A run that resumes from such a state goes on bit by bit as if it had not been
interrupted, as far as its kernels are deterministic.

Every random generator that a training draws from unasked: Python's, NumPy's, PyTorch's on each device.
"""

import random
from typing import Any

import numpy as np
import torch

from tiphys.checkpoint.adapters.tensors import decode, encode
from tiphys.errors import UsageError


def random_state() -> dict[str, Any]:
    """Where they stand; `set_random_state` puts them back there."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Go on drawing where `random_state` was asked. Devices that this machine lacks are passed over."""
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
    """The state of a training, for `tiphys.checkpoint.Session.step` and ``save``.

    Tensors on the CPU are not copied, so give it to the session before the next
    step changes them.

    Args:
        model: A module, or anything else that has ``state_dict()``.
        optimizer: The same, and so are the next three; None where there is none.
        scheduler: Of the learning rate.
        sampler: Where in the data the next step goes on, such as torchdata's ``StatefulDataLoader``.
        scaler: Of mixed precision.
        extra: More of them, or plain values such as a step count.

    Raises:
        UsageError: a tensor is of a kind that cannot be kept exactly.
    """
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler, "scaler": scaler}
    parts = {name: part for name, part in parts.items() if part is not None} | extra
    if _RANDOM in parts:
        raise UsageError(f"the name {_RANDOM!r} is taken by the state of the random generators; choose another one")
    state: dict[str, Any] = encode({name: _state_of(part) for name, part in parts.items()} | {_RANDOM: random_state()})
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
    """Put a state of `capture` back into the objects it was taken from; answer its plain values by name.

    Raises:
        UsageError: an object was given whose state was not captured, or the other way round.
    """
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler, "scaler": scaler}
    parts = {name: part for name, part in parts.items() if part is not None} | extra
    held: dict[str, Any] = decode(state)
    generators = held.pop(_RANDOM)
    for name, part in parts.items():
        if name not in held:
            raise UsageError(f"the checkpoint has no state of {name}; it has {', '.join(held)}")
        part.load_state_dict(held.pop(name))
    forgotten = [name for name in ("optimizer", "scheduler", "sampler", "scaler") if name in held]
    if forgotten:
        raise UsageError(f"the checkpoint has a state of {', '.join(forgotten)}, for which no object was given")
    set_random_state(generators)  # last, for whatever the objects above drew
    return held


def _state_of(part: Any) -> Any:
    return part.state_dict() if callable(getattr(part, "state_dict", None)) else part
