"""Weights and moments are copied beside the next step, and what is committed is the state of its step.

| the program | outcome |
|---|---|
| BatchNorm, averaged weights, dropout, a sampler, tied weights, several optimizers, a closure, a scaler | late, exact |
| weights change between step() and the optimizer, from the first save on | all is copied at once, and it is said |
| they change there only later | that save is dropped, the next step is saved at once, never a torn state |
| the optimizer is compiled as a whole, or there is none | all is copied at once |
| the program ends, waits or is stopped before the next optimizer step | the copy is completed and committed |
"""

import hashlib
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed here: make test-torch")

import accelerate
import torch
from support.builders.lineage import LINEAGE, ref
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import open_session
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tiphys.checkpoint.adapters.pytorch import capture
from tiphys.checkpoint.save import overlap
from tiphys.checkpoint.save.overlap import LateCopy, LatePiece
from tiphys.checkpoint.session import Session
from tiphys.checkpoint.settings import SaveInterval
from tiphys.checkpoint.state.serialization import flatten_state
from tiphys.checkpoint.state.shards import plan_shards
from tiphys.lineage.select import list_commits
from tiphys.lineage.validity import read_manifest

WIDTH = 72
"""Of a layer: its weights are large enough to be copied late."""
SAVES_OF_A_PROGRAM = 200
PATIENCE_SECONDS = 120
MAX_PAUSE_SECONDS, SHARE_OF_PAUSES = 0.003, 0.25


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums in one order, so that two runs of a program are equal in every bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def late_pieces(monkeypatch) -> list[str]:
    """Paths of the pieces that were copied late; many of them wait a moment, so that the training overtakes them."""
    paths, pauses, copy = [], random.Random(3), LatePiece.is_copied_exactly

    def copy_late(piece: LatePiece) -> bool:
        paths.append(piece.path)
        if pauses.random() < SHARE_OF_PAUSES:
            time.sleep(pauses.random() * MAX_PAUSE_SECONDS)
        return copy(piece)

    monkeypatch.setattr(LatePiece, "is_copied_exactly", copy_late)
    return paths


class Program:
    """A training with most of what a state may hold. ``after_step`` is what its author does after a save."""

    def __init__(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.done = 0
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.BatchNorm1d(WIDTH),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(WIDTH, WIDTH),
        )
        self.make()

    def make(self) -> None:
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.01, amsgrad=True)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)

    def loss(self) -> Any:
        batch = torch.randn(4, WIDTH) * random.random() + float(np.random.normal())
        return self.model(batch).square().mean()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.average.update_parameters(self.model)

    def capture(self) -> dict[str, Any]:
        parts = {"average": self.average, "scheduler": self.scheduler}
        return capture(self.model, optimizer=self.optimizer, done=self.done, **parts)

    def run(self, steps: int, session: Session, before_update: Callable[["Program"], object] = lambda _: None) -> None:
        for _ in range(steps):
            before_update(self)
            self.step()
            self.done += 1
            session.step(self.done, self.capture)


class Adversaries(Program):
    """Two optimizers, one with momentum and clipped weights, as in a Wasserstein GAN."""

    def make(self) -> None:
        self.critic = torch.nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=0.001, foreach=True)
        self.other = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)

    def step(self) -> None:
        for optimizer, sign in ((self.other, 1), (self.optimizer, -1)):
            self.model.zero_grad()
            self.critic.zero_grad()
            (sign * self.critic(self.model(torch.randn(4, WIDTH))).mean()).backward()
            optimizer.step()
            for weight in self.critic.parameters():
                weight.data.clamp_(-0.05, 0.05)

    def capture(self) -> dict[str, Any]:
        return capture(self.model, optimizer=self.optimizer, other=self.other, critic=self.critic, done=self.done)


class Scaled(Program):
    """Tied weights in bfloat16 and channels last, a gradient scaler, a fused optimizer, accumulated gradients."""

    def make(self) -> None:
        self.model[3].weight = self.model[0].weight
        self.stem = torch.nn.Conv2d(WIDTH, WIDTH, 3, padding=1).to(torch.bfloat16, memory_format=torch.channels_last)
        weights = [*self.model.parameters(), *self.stem.parameters()]
        self.optimizer = torch.optim.Adam(weights, lr=0.001, fused=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)

    def step(self) -> None:
        for _ in range(2):
            image = torch.randn(1, WIDTH, 2, 2, dtype=torch.bfloat16)
            self.scaler.scale(self.loss() + self.stem(image).float().square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def capture(self) -> dict[str, Any]:
        parts = {"optimizer": self.optimizer, "scaler": self.scaler, "stem": self.stem}
        return capture(self.model, done=self.done, **parts)


class Closure(Program):
    """An optimizer that evaluates the model several times in each step."""

    def make(self) -> None:
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=2, history_size=2)

    def step(self) -> None:
        def evaluate() -> Any:
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        self.optimizer.step(evaluate)

    def capture(self) -> dict[str, Any]:
        return capture(self.model, optimizer=self.optimizer, done=self.done)


class InBackward(Program):
    """One optimizer for each weight, which steps during the backward pass."""

    def make(self) -> None:
        self.optimizers = {weight: torch.optim.Adam([weight]) for weight in self.model.parameters()}
        for weight in self.optimizers:
            weight.register_post_accumulate_grad_hook(self.update)

    def update(self, weight: Any) -> None:
        self.optimizers[weight].step()
        self.optimizers[weight].zero_grad()

    def step(self) -> None:
        self.loss().backward()

    def capture(self) -> dict[str, Any]:
        parts = {f"optimizer{index}": optimizer for index, optimizer in enumerate(self.optimizers.values())}
        return capture(self.model, done=self.done, **parts)


class Accelerated(Program):
    """Accelerate's wrappers of optimizer and schedule, with accumulated and clipped gradients."""

    def make(self) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=True)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(self.model, optimizer, schedule)

    def step(self) -> None:
        for _ in range(2):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.loss())
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    def capture(self) -> dict[str, Any]:
        return capture(self.model, optimizer=self.optimizer, scheduler=self.scheduler, done=self.done)


PROGRAMS = [Program, Adversaries, Scaled, Closure, InBackward, Accelerated]


def digests(state: Any) -> list[str]:
    """Hashes of the shards of a state at this moment, which the training waits for."""
    return [hashlib.sha256(plan.data()).hexdigest() for plan in plan_shards(flatten_state(state))]


class Recorder(Session):
    """Stands for a session in the reference: hashes the state of every step before the training goes on."""

    def __init__(self) -> None:
        self.found: dict[int, list[str]] = {}

    def step(self, global_step: int, state: Any, *args: Any, **options: Any) -> None:
        self.found[global_step] = digests(state())


def reference(program: type[Program], seed: int, steps: int) -> dict[int, list[str]]:
    recorder = Recorder()
    program(seed).run(steps, recorder)
    return recorder.found


def committed(store: MemoryStore) -> dict[int, list[str]]:
    """Hashes of the shards of each committed step; the store has verified them against its objects."""
    commits = (read_manifest(store, commit) for commit in list_commits(store, LINEAGE))
    return {manifest.global_step: [shard.sha256 for shard in manifest.shards] for manifest in commits}


def saved(program: Program, steps: int, store: MemoryStore, **options: Any) -> dict[int, list[str]]:
    with open_session(store, asynchronous=True) as session:
        program.run(steps, session, **options)
    return committed(store)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_committed_states_are_those_of_a_run_that_was_never_overlapped(program, late_pieces):
    seed, steps = PROGRAMS.index(program), SAVES_OF_A_PROGRAM
    found = saved(program(seed), steps, MemoryStore())
    assert found == reference(program, seed, steps)
    assert len(late_pieces) > steps  # it was overlapped
    assert not any("average" in path or "running" in path or "random" in path for path in late_pieces)


def test_without_the_wait_before_an_update_torn_states_would_be_committed(late_pieces, monkeypatch):
    """The negative twin: the comparison above must notice a torn state."""
    trusted = Program(0)
    store = MemoryStore()
    with open_session(store, asynchronous=True) as session:
        trusted.run(3, session)
        monkeypatch.setattr(LateCopy, "settle", lambda self: None)
        monkeypatch.setattr(LateCopy, "confirm", lambda self: None)
        trusted.run(40, session)
    assert committed(store) != reference(Program, 0, 43)


def test_an_update_that_does_not_wait_is_noticed_and_nothing_torn_is_committed(late_pieces, capsys):
    store, program = MemoryStore(), Program(0)
    with open_session(store, asynchronous=True) as session:
        program.run(3, session)
        session._saver.overlap._optimizers._before_step = lambda: None
        program.run(20, session)
        assert session.failed_saves == 1
    expected = reference(Program, 0, 23)
    assert committed(store) == {step: state for step, state in expected.items() if step != 4 - 1}
    assert capsys.readouterr().err.count("each save stops the training for a copy of the whole state") == 1


def clamp(program: Program) -> None:
    with torch.no_grad():
        program.model[3].weight.clamp_(-0.01 / program.done, 0.01)


def scale_uncounted(program: Program) -> None:
    program.model[3].weight.data.mul_(0.999)


def project(program: Program) -> None:
    vector = torch.nn.utils.parameters_to_vector(program.model.parameters())
    program.model.load_state_dict({**program.model.state_dict(), "3.weight": program.model[3].weight / vector.norm()})


@pytest.mark.parametrize("change", [clamp, scale_uncounted, project])
def test_a_program_that_changes_weights_between_steps_is_never_overlapped(change, late_pieces, capsys):
    def before_update(program: Program) -> None:
        if program.done:
            change(program)

    recorder, store = Recorder(), MemoryStore()
    Program(0).run(8, recorder, before_update)
    assert saved(Program(0), 8, store, before_update=before_update) == recorder.found
    assert not late_pieces
    assert ".weight.bits changed after the call that saved it" in capsys.readouterr().err


@pytest.mark.parametrize("change", [clamp, scale_uncounted, project])
def test_a_state_that_changes_while_it_is_copied_is_dropped_and_the_next_step_is_saved(change, monkeypatch, capsys):
    changed = threading.Event()
    copy = LatePiece.is_copied_exactly

    def copy_late(piece: LatePiece) -> bool:
        assert changed.wait(PATIENCE_SECONDS)
        return copy(piece)

    monkeypatch.setattr(LatePiece, "is_copied_exactly", copy_late)

    def before_update(program: Program) -> None:
        if program.done == 20:
            change(program)
        if program.done >= 20:
            changed.set()

    recorder, store = Recorder(), MemoryStore()
    Program(0).run(40, recorder, before_update)
    changed.clear()
    with open_session(store, asynchronous=True, every=SaveInterval(10, "steps")) as session:
        Program(0).run(40, session, before_update)
        assert session.failed_saves == 1
    assert committed(store) == {step: recorder.found[step] for step in (10, 21, 30, 40)}
    error = capsys.readouterr().err
    assert "step 20 could not be saved: state.model.torch.state_dict." in error
    assert "changed while it was copied beside the next step" in error
    assert "each save stops the training for a copy of the whole state" in error


class Renormalized(Program):
    """A forward pass that changes a weight in place."""

    def make(self) -> None:
        self.rows = torch.nn.Embedding(WIDTH, WIDTH, max_norm=0.5)
        self.optimizer = torch.optim.SGD([*self.model.parameters(), *self.rows.parameters()], lr=0.1)

    def loss(self) -> Any:
        return self.model(self.rows(torch.randint(WIDTH, (4,)))).square().mean()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def capture(self) -> dict[str, Any]:
        return capture(self.model, optimizer=self.optimizer, rows=self.rows, done=self.done)


class ByHand(Renormalized):
    """Descends without an optimizer."""

    def step(self) -> None:
        self.loss().backward()
        with torch.no_grad():
            for weight in self.model.parameters():
                weight -= 0.1 * weight.grad
                weight.grad = None


class Compiled(Renormalized):
    """A step of the optimizer in one graph, in which no hook is called."""

    def make(self) -> None:
        super().make()
        self.update = torch.compile(self.optimizer.step, backend="eager")

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.update()


@pytest.mark.parametrize("program", [Renormalized, ByHand, Compiled], ids=lambda program: program.__name__)
def test_weights_that_change_elsewhere_are_copied_at_once(program, late_pieces):
    assert saved(program(0), 8, MemoryStore()) == reference(program, 0, 8)
    assert not late_pieces


@pytest.fixture
def held(monkeypatch) -> threading.Event:
    """Holds back other threads that copy late until it is set."""
    released, training, copy = threading.Event(), threading.get_ident(), LatePiece.is_copied_exactly

    def copy_late(piece: LatePiece) -> bool:
        assert threading.get_ident() == training or released.wait(PATIENCE_SECONDS)
        return copy(piece)

    monkeypatch.setattr(LatePiece, "is_copied_exactly", copy_late)
    return released


@pytest.mark.parametrize("by_name", [False, True])
def test_gradients_that_the_step_itself_computes_are_computed_beside_the_copy(by_name, held):
    """As Lightning computes them: in a closure of the optimizer."""
    store, program = MemoryStore(), Program(0)
    with open_session(store, asynchronous=True) as session:
        program.run(3, session)

        def evaluate() -> Any:
            loss = program.loss()
            loss.backward()
            held.set()
            return loss

        program.optimizer.step(closure=evaluate) if by_name else program.optimizer.step(evaluate)
        assert not session._saver.overlap._late
        session.flush()
    expected = reference(Program, 0, 3)
    assert committed(store) == expected


def end_block(session: Any, save: Any, program: Program) -> None:
    """The session's block ends."""


def wait_for_save(session: Any, save: Any, program: Program) -> None:
    assert save.wait(PATIENCE_SECONDS) == ref(1, 5)


def flush(session: Any, save: Any, program: Program) -> None:
    assert session.flush(PATIENCE_SECONDS) == ref(1, 5)


def wait_elsewhere(session: Any, save: Any, program: Program) -> None:
    """A thread of the program waits, while the training thread does something else."""
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(save.wait(PATIENCE_SECONDS)))
    other.start()
    other.join()
    assert found == [ref(1, 5)]


def stop(session: Any, save: Any, program: Program) -> None:
    session._stop.request()
    with pytest.raises(SystemExit):
        session.step(5, program.capture)


@pytest.mark.parametrize("end", [end_block, wait_for_save, flush, wait_elsewhere, stop])
def test_a_copy_is_completed_where_no_update_follows(end, held, monkeypatch):
    monkeypatch.setattr(overlap, "_SETTLE_SECONDS", 0.1)
    store, program = MemoryStore(), Program(0)
    timer = threading.Timer(0.05, held.set)
    with open_session(store, asynchronous=True, every=SaveInterval(600, "seconds")) as session:
        program.run(3, session)
        session.save(3, program.capture).wait()  # the first, which the next update is compared with
        program.run(2, session)
        save = session.save(5, program.capture)
        timer.start()
        end(session, save, program)
    expected = reference(Program, 0, 5)
    assert committed(store) == {step: expected[step] for step in (3, 5)}


def test_a_child_that_is_forked_during_the_copy_trains_on(held):
    """Its memory is its own, and the thread that copies does not exist in it."""
    store, program = MemoryStore(), Program(0)
    with open_session(store, asynchronous=True) as session:
        program.run(3, session)
        if (child := os.fork()) == 0:
            program.step()
            os._exit(7)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        held.set()
    assert os.waitstatus_to_exitcode(ended[1]) == 7
