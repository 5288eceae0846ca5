"""Knows which tensors only the optimizers of PyTorch change, and is called before each of their steps.

An optimizer changes its parameters and its state in ``step()`` alone, and PyTorch calls a hook before it. Only an
optimizer whose hook was called counts: one that is compiled as a whole calls none, and its parameters may change at
any time. A tensor is recognized by its storage, which a ``state_dict()`` shares with the parameters.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any


class OptimizerWatch:
    """Observes all optimizers of this process that step while it is open.

    Args:
        before_step: Called in each step of an optimizer before it changes a weight, by the thread that steps.
    """

    def __init__(self, before_step: Callable[[], object]) -> None:
        import torch
        from torch.optim import optimizer

        self._torch: Any = torch
        self._before_step = before_step
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        register = getattr(optimizer, "register_optimizer_step_pre_hook", None)  # PyTorch has it since 2.1
        self._handle = register(self._on_step) if register else None

    def prepare(self) -> Callable[[Any], Callable[[], int] | None]:
        """Return a function that finds the version counter of a tensor that only optimizers change, else None."""
        storages = {_storage_address(tensor) for tensor in self._tensors()}

        def find_version(owner: Any) -> Callable[[], int] | None:
            if not isinstance(owner, self._torch.Tensor) or _storage_address(owner) not in storages:
                return None
            return lambda: int(owner._version)

        return find_version

    def close(self) -> None:
        """Observe nothing more."""
        if self._handle:
            self._handle.remove()

    def _on_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if self._torch.compiler.is_compiling():
            return None  # a compiled step calls no hook
        self._optimizers.add(optimizer)
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if not callable(closure):
            self._before_step()
            return None

        def evaluate() -> Any:
            result = closure()
            self._before_step()
            return result

        # Lightning computes the gradients within the step: optimizers call the closure before they change a weight.
        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluate}
        return (args[0], evaluate, *args[2:]), kwargs

    def _tensors(self) -> Iterator[Any]:
        for optimizer in list(self._optimizers):
            groups = (group["params"] for group in optimizer.param_groups)
            states = (state.values() for state in optimizer.state.values())
            for tensors in (*groups, *states):
                yield from filter(self._is_private, tensors)

    def _is_private(self, tensor: Any) -> bool:
        """Whether it is a tensor in this process's own memory that has a version counter."""
        return (
            isinstance(tensor, self._torch.Tensor)
            and tensor.device.type == "cpu"
            and tensor.layout is self._torch.strided
            and not tensor.is_inference()
            and not tensor.is_shared()
        )


def _storage_address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())
