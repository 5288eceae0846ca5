"""A training that was interrupted goes on in plain PyTorch as if it had not been.

| interrupted | outcome |
|---|---|
| after any step, with dropout, momentum, a schedule | weights, optimizer and random numbers equal in every bit |
| in an epoch of a loader whose position no state holds | said once, before the first save |
| and the program forgets an object at restore, or has one too many | refused, by its name |
"""

import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed here: make test-torch")

import torch
import torchdata.stateful_dataloader
from support.builders.lineage import ref
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import open_session

from tiphys.checkpoint.adapters.pytorch import capture, load
from tiphys.checkpoint.adapters.tensors import encode_tensors
from tiphys.checkpoint.telemetry.events import log_once
from tiphys.errors import UsageError
from tiphys.records import CheckpointRef

STEPS = 12


class Sampler:
    """Goes through the data in an order of its own; knows where it is."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> Any:
        self.position += 1
        return torch.full((4, 8), float(self.position)) + torch.arange(8)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Training:
    """A model whose every step depends on all that a state must hold."""

    def __init__(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8)
        )
        self.model[3].weight = self.model[0].weight  # tied
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, milestones=[4, 4, 9], gamma=0.5)
        self.sampler = Sampler()
        self.done = 0

    @property
    def parts(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "scheduler": self.scheduler, "sampler": self.sampler}

    def step(self) -> None:
        batch = next(self.sampler) * random.random() + float(np.random.normal())
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.done += 1

    def capture(self) -> dict[str, Any]:
        return capture(self.model, **self.parts, done=self.done)

    def bits(self) -> Any:
        def plain(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                return value.dtype.str, value.shape, value.tobytes()
            if isinstance(value, dict):
                return {key: plain(item) for key, item in value.items()}
            return [plain(item) for item in value] if isinstance(value, list | tuple) else value

        return plain(encode_tensors(self.capture()))


def run(store: MemoryStore, until: int, seed: int, start: CheckpointRef | None = None) -> Training:
    training = Training(seed)
    with open_session(store, 2 if start else 1, resume_from=start) as session:
        if (state := session.restore()) is not None:
            training.done = load(state, training.model, **training.parts)["done"]
        while training.done < until:
            training.step()
            session.step(training.done, training.capture)
    return training


@pytest.mark.parametrize("interrupted", [1, 4, 11])
def test_a_run_that_was_interrupted_is_the_run_that_was_not(interrupted):
    straight = run(MemoryStore(), STEPS, seed=1)
    store = MemoryStore()

    run(store, interrupted, seed=1)
    resumed = run(store, STEPS, seed=2, start=ref(1, interrupted))

    assert resumed.bits() == straight.bits()
    assert resumed.model[3].weight is resumed.model[0].weight


def test_runs_of_other_seeds_differ_so_that_the_comparison_means_something():
    assert run(MemoryStore(), 2, seed=1).bits() != run(MemoryStore(), 2, seed=2).bits()


def test_an_object_that_was_not_captured_cannot_be_loaded():
    training = Training(1)
    state = capture(training.model)

    with pytest.raises(UsageError, match="no state of optimizer"):
        load(state, training.model, optimizer=training.optimizer)


def test_an_object_that_was_captured_must_not_be_forgotten():
    training = Training(1)

    with pytest.raises(UsageError, match="state of optimizer, scheduler, sampler, for which no object was given"):
        load(training.capture(), training.model)


def test_the_name_of_the_random_generators_is_not_free():
    with pytest.raises(UsageError, match="choose another name"):
        capture(Training(1).model, random=1)


class Positioned(torch.utils.data.SequentialSampler):
    def state_dict(self) -> dict[str, int]:
        return {}


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        while True:
            yield torch.zeros(8)


DATA = torch.utils.data.TensorDataset(torch.zeros(12, 8))


@pytest.mark.filterwarnings("ignore:.*set_vital")  # of torchdata
@pytest.mark.parametrize(
    ("make_loader", "said"),
    [
        (lambda: torch.utils.data.DataLoader(DATA, shuffle=True), "begins again, in another order; use torchdata's"),
        (lambda: torch.utils.data.DataLoader(DATA, shuffle=True, num_workers=1), "begins again, in another order; use"),
        (lambda: torch.utils.data.DataLoader(DATA), "the epoch of the DataLoader begins again; use torchdata's"),
        (lambda: torch.utils.data.DataLoader(Endless()), "the epoch of the DataLoader begins again; use torchdata's"),
        (lambda: torch.utils.data.DataLoader(DATA, sampler=Positioned(DATA)), ""),
        (lambda: torchdata.stateful_dataloader.StatefulDataLoader(DATA, shuffle=True), ""),
        (lambda: torch.utils.data.DataLoader(DATA, batch_size=12), ""),  # one batch is the whole epoch
    ],
    ids=["shuffled", "workers", "in order", "endless", "own position", "torchdata", "complete"],
)
def test_position_that_no_state_holds_is_said_at_the_first_step(make_loader, said, capsys):
    log_once.cache_clear()
    with open_session(MemoryStore()) as session:
        for step, _ in zip(range(1, 4), make_loader(), strict=False):
            session.step(step, {"step": step})
    error = capsys.readouterr().err
    assert error.count("the position in the data is not part of the state") == bool(said)
    assert said in error


def test_position_that_the_program_names_is_its_own_affair(capsys):
    log_once.cache_clear()
    with open_session(MemoryStore()) as session:
        for batch, _ in enumerate(torch.utils.data.DataLoader(DATA), 1):
            session.step(batch, {"step": batch}, data_position={"batch": batch})
    assert "the position in the data" not in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*set_vital")  # of torchdata
def test_unfinished_evaluation_says_nothing_of_the_position_in_the_training(capsys):
    log_once.cache_clear()
    evaluation = iter(torch.utils.data.DataLoader(DATA))
    next(evaluation)
    with open_session(MemoryStore()) as session:
        for step, _ in enumerate(torchdata.stateful_dataloader.StatefulDataLoader(DATA), 1):
            session.step(step, {"step": step})
    assert "the position in the data" not in capsys.readouterr().err
