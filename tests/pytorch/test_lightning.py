"""A fit of Lightning that was interrupted goes on as if it had not been, under both of Lightning's names.

| interrupted | outcome |
|---|---|
| in an epoch, at its end, after gradients were accumulated | weights, optimizer and schedule equal in every bit |
| in an epoch, at its end, twice | the same batches in the same epochs, if the loader can be resumed |
| while a callback or the module itself averages weights | the averages, too |
| by SIGTERM | saved at the next optimizer step, exit code 75 |
| by SIGTERM between two optimizer steps, or in a validation | saved at the next optimizer step, exit code 75 |
| while fit() is given another checkpoint, or Lightning does not take ours | refused |
"""

import importlib
import itertools
import os
import signal
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed here: make test-torch")

import torch
from support.builders.lineage import LINEAGE, ref
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import open_session
from torchdata.stateful_dataloader import StatefulDataLoader

from tiphys.checkpoint.save import overlap
from tiphys.checkpoint.save.overlap import LatePiece
from tiphys.checkpoint.settings import SaveInterval
from tiphys.errors import UsageError
from tiphys.lineage.select import list_commits
from tiphys.lineage.training_progress import read_training_progress

# Lightning warns of loggers, of worker processes and of what its own dependencies deprecate.
pytestmark = pytest.mark.filterwarnings("ignore")

EPOCH = 6
STEPS = 15


class Loader:
    """Batches in an order that is drawn anew in each epoch; can be resumed in the middle of one."""

    def __init__(self) -> None:
        self.epoch, self.position = 0, 0

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Any:
        if self.position == EPOCH:  # Lightning counts batches, and takes none beyond the last
            self.epoch, self.position = self.epoch + 1, 0
        order = torch.randperm(EPOCH, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.position < EPOCH:
            self.position += 1
            yield torch.full((4, 8), float(order[self.position - 1])) + torch.arange(8)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def fit(
    store: MemoryStore, until: int, *, name: str, seed: int, restored: int = 0, stop_at: int = -1, **options: Any
) -> Any:
    """Train to optimizer step ``until``, from ``restored`` on; the module and its trainer."""
    lightning: Any = importlib.import_module(name)
    from tiphys.checkpoint.adapters.lightning import TiphysCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
            self.register_buffer("average", torch.zeros(8))
            self.batches = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.average.lerp_(self.layers[0].bias.detach(), 0.5)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.batches += 1
            if self.batches == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            loss = self.layers(batch / 8).square().mean()
            if not self.automatic_optimization:
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.layers(batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    torch.manual_seed(seed)
    attempt = options.pop("attempt", 2 if restored else 1)
    start = ref(attempt - 1, restored) if restored else None
    with open_session(
        store,
        attempt,
        resume_from=start,
        every=options.pop("every", SaveInterval(1, "steps")),
        asynchronous=options.pop("asynchronous", False),
    ) as session:
        trainer = lightning.Trainer(
            **({"max_epochs": options.pop("epochs")} if "epochs" in options else {"max_steps": until}),
            callbacks=[TiphysCheckpoint(session), *options.pop("callbacks", ())],
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
            enable_model_summary=False,
            accumulate_grad_batches=options.pop("accumulate", 1),
        )
        module = Module()
        module.automatic_optimization = not options.pop("manual", False)
        loader = options.pop("loader") if "loader" in options else Loader()
        trainer.fit(module, loader, **options)
    return trainer


def bits(trainer: Any) -> Any:
    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.numpy(force=True).tobytes()
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    parts = trainer.model, *trainer.optimizers, *(config.scheduler for config in trainer.lr_scheduler_configs)
    return plain([part.state_dict() for part in parts]), torch.get_rng_state().tolist()


@pytest.mark.parametrize("interrupted", [4, EPOCH, 13])
def test_a_fit_that_was_interrupted_is_the_fit_that_was_not(name, interrupted):
    straight = bits(fit(MemoryStore(), STEPS, name=name, seed=1))
    store = MemoryStore()

    fit(store, interrupted, name=name, seed=1)
    resumed = fit(store, STEPS, name=name, seed=2, restored=interrupted)

    assert resumed.global_step == STEPS
    assert bits(resumed) == straight


class LoaderOfOneState(Loader):
    """Says at the last batch that it is at the begin of the next epoch."""

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch + self.position // EPOCH, "position": self.position % EPOCH}


class Stream(torch.utils.data.IterableDataset[Any]):
    """Rows in their order; Lightning does not know how many."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        self.position %= 4 * EPOCH
        while self.position < 4 * EPOCH:
            self.position += 1
            yield torch.full((8,), float(self.position))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class StreamWithLength(Stream):
    def __len__(self) -> int:
        return 4 * EPOCH


def stream_loader() -> Any:
    return StatefulDataLoader(StreamWithLength(), 4)


def test_data_of_unknown_length_are_said_to_lose_a_batch(capsys):
    said = "one batch ahead of data whose length is unknown"
    for data, is_said in ((Stream(), True), (StreamWithLength(), False)):
        fit(MemoryStore(), 2, name="lightning.pytorch", seed=1, loader=StatefulDataLoader(data, 4))
        assert (said in capsys.readouterr().err) == is_said


def stateful_loader() -> Any:
    return StatefulDataLoader(torch.arange(EPOCH).repeat(8, 1).T.repeat_interleave(4, 0).float(), 4, shuffle=True)


@pytest.mark.parametrize("make_loader", [Loader, LoaderOfOneState, stateful_loader, stream_loader])
@pytest.mark.parametrize("interrupted", [(4, 9), (EPOCH, 2 * EPOCH), (EPOCH - 1, EPOCH, EPOCH + 1)])
def test_batches_and_epochs_of_a_loader_that_resumes_are_those_of_a_fit_that_was_not(make_loader, interrupted):
    """Lightning alone passes an epoch without a step after a restore at the end of one."""
    from lightning.pytorch import Callback

    def train(store: MemoryStore, until: int, restored: int = 0, attempt: int = 1) -> None:
        torch.manual_seed(1)
        given = {"loader": make_loader(), "callbacks": [Recorder()], "attempt": attempt}
        fit(store, until, name="lightning.pytorch", seed=2, restored=restored, **given)

    class Recorder(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append((trainer.current_epoch, batch_idx, batch[:, 0].tolist()))

    seen: list[Any] = []
    train(MemoryStore(), STEPS)
    straight, seen = seen, []
    store = MemoryStore()
    for attempt, (restored, until) in enumerate(itertools.pairwise((0, *interrupted, STEPS)), 1):
        train(store, until, restored, attempt)
    assert seen == straight


@pytest.mark.parametrize("make_loader", [torch.utils.data.DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("interrupted", [(EPOCH,), (EPOCH, 2 * EPOCH)])
def test_batches_of_unknown_number_are_counted_anew_in_the_epoch_after_a_restore(make_loader, interrupted):
    from lightning.pytorch import Callback

    class Recorder(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append((trainer.current_epoch, batch_idx, batch[:, 0].tolist()))

    def train(*stops: int) -> list[Any]:
        store = MemoryStore()
        seen.clear()
        for attempt, (restored, until) in enumerate(itertools.pairwise((0, *stops, STEPS)), 1):
            given = {"loader": make_loader(Stream(), 4), "callbacks": [Recorder()], "attempt": attempt}
            fit(store, until, name="lightning.pytorch", seed=2, restored=restored, **given)
        return [*seen]

    seen: list[Any] = []
    assert train(*interrupted) == train()


def test_weights_are_copied_beside_the_next_step_without_a_line_of_the_program(name, monkeypatch):
    monkeypatch.setattr(overlap, "MIN_BYTES", 1)
    straight = bits(fit(MemoryStore(), STEPS, name=name, seed=1))
    store, copy, late = MemoryStore(), LatePiece.is_copied_exactly, []
    monkeypatch.setattr(LatePiece, "is_copied_exactly", lambda piece: late.append(piece.path) or copy(piece))

    fit(store, 8, name=name, seed=1, asynchronous=True)
    assert len(list_commits(store, LINEAGE)) == 8
    assert any("exp_avg" in path for path in late)
    assert bits(fit(store, STEPS, name=name, seed=2, restored=8)) == straight


@pytest.mark.parametrize("interrupted", [4, EPOCH])
def test_weights_that_a_callback_averages_are_those_of_a_fit_that_was_not_interrupted(name, interrupted):
    averaging = importlib.import_module(f"{name}.callbacks").EMAWeightAveraging

    def train(store: MemoryStore, until: int, **options: Any) -> Any:
        callback = averaging(decay=0.5)
        trainer = fit(store, until, name=name, callbacks=[callback], **options)
        return bits(trainer), [value.tolist() for value in callback._average_model.state_dict().values()]

    straight = train(MemoryStore(), STEPS, seed=1)
    store = MemoryStore()

    train(store, interrupted, seed=1)
    assert train(store, STEPS, seed=2, restored=interrupted) == straight


def test_a_module_gets_its_own_hook_back(name):
    assert "on_train_batch_end" not in vars(fit(MemoryStore(), 2, name=name, seed=1).lightning_module)


def test_steps_and_total_are_reported_without_a_line_of_the_program(name):
    fit(store := MemoryStore(), STEPS, name=name, seed=1)

    reported = read_training_progress(store, LINEAGE)
    assert reported is not None
    assert (reported.global_step, reported.total_steps) == (STEPS, STEPS)


@pytest.mark.parametrize(("manual", "total"), [(False, EPOCH), (True, None)])
def test_total_is_unknown_where_the_module_steps_its_optimizers_itself(manual, total):
    """Lightning counts the steps of all optimizers, and estimates batches."""
    fit(store := MemoryStore(), 0, name="lightning.pytorch", seed=1, epochs=1, manual=manual)

    reported = read_training_progress(store, LINEAGE)
    assert (reported.total_steps if reported else None) == total
    assert list_commits(store, LINEAGE)[0] == ref(1, EPOCH)


def test_accumulated_gradients_are_never_lost_between_two_checkpoints():
    straight = bits(fit(MemoryStore(), 5, name="lightning.pytorch", seed=1, accumulate=2))
    store = MemoryStore()

    fit(store, 2, name="lightning.pytorch", seed=1, accumulate=2)
    resumed = fit(store, 5, name="lightning.pytorch", seed=2, restored=2, accumulate=2)

    assert bits(resumed) == straight


def test_sigterm_saves_after_the_optimizer_step_and_exits_with_75(name):
    store = MemoryStore()

    with pytest.raises(SystemExit) as end:
        fit(store, STEPS, name=name, seed=1, stop_at=4, every=SaveInterval(100, "steps"))

    assert end.value.code == 75
    assert list_commits(store, LINEAGE) == [ref(1, 4)]


def test_sigterm_between_two_optimizer_steps_saves_the_next_one_and_exits_with_75(name):
    store = MemoryStore()

    with pytest.raises(SystemExit) as end:
        fit(store, STEPS, name=name, seed=1, stop_at=3, accumulate=2, every=SaveInterval(100, "steps"))

    assert end.value.code == 75
    assert list_commits(store, LINEAGE) == [ref(1, 2)]


def test_sigterm_in_a_validation_saves_the_next_step_and_exits_with_75(name):
    store, stop = MemoryStore(), importlib.import_module(name).Callback()
    stop.on_validation_batch_start = lambda *args: os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as end:
        fit(
            store,
            STEPS,
            name=name,
            seed=1,
            every=SaveInterval(100, "steps"),
            callbacks=[stop],
            val_dataloaders=Loader(),
        )

    assert end.value.code == 75
    assert list_commits(store, LINEAGE) == [ref(1, EPOCH + 1)]


def test_a_second_place_to_start_from_is_refused(tmp_path):
    store = MemoryStore()
    fit(store, 2, name="lightning.pytorch", seed=1).save_checkpoint(tmp_path / "other.ckpt")

    with pytest.raises(UsageError, match="load them into the module before fit"):
        fit(store, STEPS, name="lightning.pytorch", seed=1, restored=2, ckpt_path=tmp_path / "other.ckpt")


def test_a_lightning_that_does_not_take_the_checkpoint_must_not_train(monkeypatch):
    store = MemoryStore()
    fit(store, 2, name="lightning.pytorch", seed=1)
    connector = importlib.import_module("lightning.pytorch.trainer.connectors.checkpoint_connector")
    monkeypatch.setattr(connector._CheckpointConnector, "restore_training_state", lambda self: None)

    with pytest.raises(UsageError, match="ignored the checkpoint of step 2"):
        fit(store, STEPS, name="lightning.pytorch", seed=1, restored=2)
