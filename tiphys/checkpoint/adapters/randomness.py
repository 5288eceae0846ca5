"""Every random generator that a training draws from unasked: Python's, NumPy's, PyTorch's on each device."""

import random
from typing import Any

import numpy as np
import torch


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
