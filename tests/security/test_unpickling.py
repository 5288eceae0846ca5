"""Restoring a checkpoint runs no code that the checkpoint brought along, and a state may use every name.

| stored | read by | outcome |
|---|---|---|
| bytes of a pickle where a state has a value | `pytorch.load` | they stay bytes |
| the same | the Lightning callback, which asks for pickles | the value |
| a mapping of the author's with a name of the format in it | any | the mapping as it was |

Where PyTorch is not installed, a stand-in for its names is enough, because no state here holds a tensor.
"""

import importlib
import pickle
import sys
from collections import Counter
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiphys.checkpoint.state.serialization import flatten_state, read_document, unflatten_state

ADAPTERS = "tiphys.checkpoint.adapters"
TAGS = ["torch.tensor", "counter", "torch.state_dict", "pickle", "tiphys.mapping"]
COMPANIONS = ["bits", "order", "requires_grad", "metadata"]
"""Names that a form of the format has beside its tag."""


class _Torch(ModuleType):
    """The names of PyTorch that the adapters use when they are imported."""

    Tensor = type("Tensor", (), {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"torch.{name}"


def adapter(name: str) -> Any:
    """A module of the adapters, with PyTorch or with its stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        if not importlib.util.find_spec("torch"):
            patch.setitem(sys.modules, "torch", _Torch("torch"))
            for module in ("tensors", "pytorch"):
                patch.delitem(sys.modules, f"{ADAPTERS}.{module}", raising=False)
        module = importlib.import_module(f"{ADAPTERS}.{name}")
        if isinstance(sys.modules["torch"], _Torch):
            for made in ("tensors", "pytorch"):
                sys.modules.pop(f"{ADAPTERS}.{made}", None)
        return module


tensors = adapter("tensors")


class Trap:
    """Its unpickling is seen."""

    sprung = 0

    def __reduce__(self) -> Any:
        return _spring, ()


def _spring() -> str:
    Trap.sprung += 1
    return "code of the checkpoint ran"


def pickled(value: Any) -> dict[str, Any]:
    return {"pickle": np.frombuffer(pickle.dumps(value), dtype=np.uint8)}


@pytest.fixture(autouse=True)
def armed() -> None:
    Trap.sprung = 0


def through_storage(encoded: Any) -> Any:
    flat = flatten_state(encoded)
    tree, arrays = read_document(flat.encode_document())
    for array, named in zip(arrays, flat.arrays, strict=True):
        array[...] = named.array
    return unflatten_state(tree, arrays)


def test_a_state_is_decoded_without_running_its_code() -> None:
    state = through_storage({"step": 3, "extra": [pickled(Trap())]})

    decoded = tensors.decode_tensors(state)

    assert Trap.sprung == 0
    assert decoded["step"] == 3
    assert decoded["extra"][0]["pickle"].tobytes() == pickle.dumps(Trap())


def test_pytorch_load_runs_no_code_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    pytorch = adapter("pytorch")
    monkeypatch.setattr(pytorch, "set_random_state", lambda state: None)

    class Model:
        def load_state_dict(self, state: Any) -> None:
            self.state = state

    pytorch.load({"model": {"weights": pickled(Trap())}, "random": {}, "extra": pickled(Trap())}, Model())

    assert Trap.sprung == 0


def test_a_reader_that_asks_for_pickles_gets_their_values() -> None:
    """As Lightning's callback does: its checkpoints hold whatever hyperparameters an author has."""
    state = {"hyperparameters": {1, 2}, "when": complex(1, 2)}

    stored = through_storage(tensors.encode_tensors(state, pickled=True))

    assert tensors.decode_tensors(stored, pickled=True) == state
    assert tensors.decode_tensors(through_storage({"extra": pickled(Trap())}), pickled=True)["extra"].endswith("ran")


VALUES = st.recursive(
    st.one_of(st.integers(), st.text(max_size=3), st.none(), st.just([["a", 1]])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from([*TAGS, *COMPANIONS, "weight"]), inner, max_size=4),
    ),
    max_leaves=8,
)


@given(state=VALUES, asked=st.booleans())
def test_a_state_may_use_every_name(state: Any, asked: bool) -> None:
    stored = through_storage(tensors.encode_tensors(state, pickled=asked))

    assert tensors.decode_tensors(stored, pickled=asked) == state


@pytest.mark.parametrize("tag", TAGS)
def test_an_array_under_each_name_comes_back(tag: str) -> None:
    state: dict[str, Any] = {tag: np.arange(3, dtype=np.uint8), "bits": np.arange(3)}
    for stored in ({tag: state[tag]}, state):
        decoded = tensors.decode_tensors(through_storage(tensors.encode_tensors(stored)))
        assert {name: value.tolist() for name, value in decoded.items()} == {
            name: value.tolist() for name, value in stored.items()
        }


def test_a_buffer_of_a_module_may_be_named_so() -> None:
    class State(dict):  # type: ignore[type-arg]
        """As a module's ``state_dict()`` is."""

        _metadata = {"": {"version": 1}}

    stored = through_storage(tensors.encode_tensors({"model": State(counter=[["a", 1]], pickle=5)}))

    decoded = tensors.decode_tensors(stored)["model"]
    assert dict(decoded) == {"counter": [["a", 1]], "pickle": 5}
    assert decoded._metadata == {"": {"version": 1}}


def test_a_counter_stays_one() -> None:
    state = {"milestones": Counter({3: 1, 7: 2}), "counter": Counter(a=1)}

    decoded = tensors.decode_tensors(through_storage(tensors.encode_tensors(state)))

    assert decoded == state
    assert type(decoded["counter"]) is Counter
