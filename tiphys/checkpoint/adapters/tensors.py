"""Converts tensors to NumPy arrays and back, bit for bit.

NumPy has no bfloat16, no 8-bit floats and no channels-last memory format. So a
tensor is saved as an array of its bits, together with the properties that NumPy
lacks. Dense tensors on the CPU are not copied. Tensors that share memory, such
as tied weights, become one array.
"""

import pickle
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tiphys.errors import UsageError

_TENSOR, _COUNTER, _MODULE, _PICKLE = "torch.tensor", "counter", "torch.state_dict", "pickle"
_MAPPING = "tiphys.mapping"
"""Tag of a mapping that has a tag among its own keys."""
_TAGS = {_TENSOR, _COUNTER, _MODULE, _PICKLE, _MAPPING}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_VALUES = (bool, int, float, str)
_PLAIN = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}
"""Types that NumPy has too; all other types are saved as integers of the same width."""


def encode_tensors(value: Any, *, pickled: bool = False) -> Any:
    """Replace every tensor in ``value`` by a dict with its array; mappings become plain dicts.

    Other values are pickled if ``pickled``, as torch.save does; otherwise they are returned unchanged, and the session
    refuses them.

    Raises:
        UsageError: a tensor is sparse, quantized, distributed or without memory.
    """
    return _Encoder(pickled).encode(value, "state")


def decode_tensors(value: Any, *, pickled: bool = False) -> Any:
    """Invert `encode_tensors`; all tensors are on the CPU.

    What was encoded with ``pickled`` is unpickled with it. That runs code that the checkpoint names, so write access to
    the checkpoint is the right to run code.
    """
    return _Decoder(pickled).decode(value)


class _Encoder:
    def __init__(self, pickled: bool) -> None:
        self._pickled = pickled
        self._forms: dict[Any, tuple[dict[str, Any], Any]] = {}

    def encode(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if type(value) is Counter:
            return {_COUNTER: [[key, count] for key, count in value.items()]}
        if isinstance(value, Mapping):
            members = {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
            if _TAGS & members.keys():
                members = {_MAPPING: members}
            metadata = getattr(value, "_metadata", None)
            return members if metadata is None else {_MODULE: members, "metadata": self.encode(metadata, path)}
        if type(value) in (list, tuple):
            return type(value)(self.encode(item, f"{path}.{index}") for index, item in enumerate(value))
        if not self._pickled or value is None or isinstance(value, np.ndarray | np.generic) or type(value) in _VALUES:
            return value
        return {_PICKLE: np.frombuffer(pickle.dumps(value), dtype=np.uint8)}

    def _tensor(self, tensor: Any, path: str) -> dict[str, Any]:
        _check(tensor, path)
        key = (
            tensor.data_ptr(),
            tensor.dtype,
            tensor.device,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.requires_grad,
        )
        if tensor.numel() and key in self._forms:
            return self._forms[key][0]
        bits, order = _bits(tensor.detach())
        form = {_TENSOR: str(tensor.dtype).removeprefix("torch."), "bits": bits}
        if order != sorted(order):
            form["order"] = order
        if tensor.requires_grad:
            form["requires_grad"] = True
        self._forms[key] = form, tensor  # the reference keeps the address from being reused
        return form


class _Decoder:
    def __init__(self, pickled: bool) -> None:
        self._pickled = pickled
        self._tensors: dict[int, tuple[Any, Any]] = {}

    def decode(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self._mapping(value)
        if type(value) in (list, tuple):
            return type(value)(self.decode(item) for item in value)
        return value

    def _mapping(self, value: dict[Any, Any]) -> Any:
        if _TENSOR in value:
            return self._tensor(value)
        if _PICKLE in value and self._pickled:
            return pickle.loads(value[_PICKLE].tobytes())  # noqa: S301  the caller has asked for it
        if _COUNTER in value:
            return Counter(dict(value[_COUNTER]))
        if _MODULE in value:
            state: Any = OrderedDict(self.decode(value[_MODULE]))
            state._metadata = OrderedDict(self.decode(value["metadata"]))
            return state
        return {key: self.decode(item) for key, item in value.get(_MAPPING, value).items()}

    def _tensor(self, form: dict[str, Any]) -> Any:
        bits = form["bits"]
        if id(bits) in self._tensors:  # shared memory stays shared
            return self._tensors[id(bits)][0]
        tensor = torch.from_numpy(bits).view(getattr(torch, form[_TENSOR]))
        if "order" in form:
            order = form["order"]
            tensor = tensor.permute([order.index(axis) for axis in range(len(order))])
        tensor.requires_grad_(form.get("requires_grad", False))
        self._tensors[id(bits)] = tensor, bits
        return tensor


def _check(tensor: Any, path: str) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or hasattr(tensor, "placements"):
        raise UsageError(
            f"{path}: a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device} cannot be saved as one array; "
            "pass a dense tensor, and save distributed tensors with tiphys.checkpoint.adapters.dcp"
        )


def _bits(tensor: Any) -> tuple[Any, list[int]]:
    """Return the array of a tensor, and the tensor's axes in the order of the array's axes."""
    order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
    dense = tensor.permute(order)
    if not dense.is_contiguous():  # not dense in any order of the axes, such as a slice
        dense, order = tensor.contiguous(), list(range(tensor.dim()))
    dense = dense.cpu().resolve_conj().resolve_neg()
    return (dense if tensor.dtype in _PLAIN else dense.view(_BITS[tensor.itemsize])).numpy(), order
