"""Every dense tensor travels through a checkpoint bit for bit, and the others are refused by their path.

| tensor | outcome |
|---|---|
| any dtype, bfloat16 and 8-bit floats too | the same bits, dtype, shape |
| channels last, transposed, of no dimension | the same, in the same order in memory |
| sliced, expanded, empty | the same values |
| shared by two names | one array in storage, shared again |
| sparse, meta | refused |
| counters, ordered dicts, the metadata of modules | as they were |
"""

from collections import Counter, OrderedDict
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed here: make test-torch")

import torch

from tiphys.checkpoint.adapters.tensors import decode_tensors, encode_tensors
from tiphys.checkpoint.state.serialization import flatten_state, read_document, unflatten_state
from tiphys.errors import UsageError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def through_storage(value: Any) -> Any:
    """``value`` after it was taken apart, kept as JSON and arrays, and put together again."""
    flat = flatten_state(encode_tensors(value))
    tree, arrays = read_document(flat.encode_document())
    for array, named in zip(arrays, flat.arrays, strict=True):
        array[...] = named.array
    return decode_tensors(unflatten_state(tree, arrays))


def bits(tensor: Any) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def pattern(dtype: Any, *shape: int) -> Any:
    """Bytes of every kind, also NaNs of every kind, as a tensor of ``dtype``."""
    size = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    raw = (torch.arange(size) * 37 % 251).to(torch.uint8)
    return (raw % 2).view(torch.bool).view(shape) if dtype is torch.bool else raw.view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(dtype):
    tensor = pattern(dtype, 3, 4)

    restored = through_storage({"t": tensor})["t"]

    assert restored.dtype is dtype
    assert restored.shape == tensor.shape
    assert bits(restored) == bits(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(48.0).view(1, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.arange(12.0).view(3, 4).T,
        torch.arange(12.0).view(3, 4).T.to(torch.bfloat16),
        torch.tensor(2.5),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["channels_last", "transposed", "transposed bfloat16", "scalar", "parameter"],
)
def test_dense_tensors_keep_their_order_in_memory(tensor):
    restored = through_storage([tensor])[0]

    assert torch.equal(restored, tensor)
    assert restored.stride() == tensor.stride()
    assert restored.requires_grad == tensor.requires_grad


@pytest.mark.parametrize(
    "tensor", [torch.arange(12.0).view(3, 4)[:, 1:3], torch.ones(3, 1).expand(3, 4), torch.empty(0, 3)]
)
def test_a_tensor_without_dense_memory_keeps_its_values(tensor):
    assert torch.equal(through_storage([tensor])[0], tensor)


def test_conjugated_and_negated_views_keep_their_values():
    tensor = torch.tensor([1 + 2j, 3 - 4j])

    conjugated, imaginary = through_storage([tensor.conj(), tensor.conj().imag])

    assert conjugated.tolist() == [1 - 2j, 3 + 4j]
    assert imaginary.tolist() == [-2.0, 4.0]


def test_tied_weights_are_stored_once_and_stay_tied():
    weight = torch.arange(6.0).view(2, 3)

    assert len(flatten_state(encode_tensors({"embedding": weight, "head": weight.detach()})).arrays) == 1
    restored = through_storage({"embedding": weight, "head": weight.detach()})
    restored["embedding"][0, 0] = 99
    assert restored["head"][0, 0] == 99


def test_the_bits_of_a_tensor_on_the_cpu_are_not_copied():
    tensor = torch.zeros(3, dtype=torch.bfloat16)

    array = flatten_state(encode_tensors([tensor])).arrays[0].array
    tensor[0] = 1

    assert array[0] != 0


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")], ids=["sparse", "meta"])
def test_a_tensor_that_is_not_dense_is_refused_by_its_path(tensor):
    with pytest.raises(UsageError, match=r"state\.model\.weight"):
        encode_tensors({"model": {"weight": tensor}})


def test_containers_that_optimizers_and_modules_use_come_back():
    module_state = torch.nn.BatchNorm1d(2).state_dict()

    restored = through_storage({"module": module_state, "milestones": Counter({3: 1, 7: 2}), "pair": (1, [2.5, None])})

    assert restored["milestones"] == Counter({3: 1, 7: 2})
    assert type(restored["milestones"]) is Counter
    assert restored["pair"] == (1, [2.5, None])
    assert type(restored["module"]) is OrderedDict
    assert restored["module"]._metadata == module_state._metadata  # type: ignore[attr-defined]
