"""A Trainer of Hugging Face that was interrupted goes on as if it had not been.

| interrupted | outcome |
|---|---|
| in an epoch and at its end, with dropout and shuffled data | weights and optimizer equal in every bit |
| by SIGTERM | a checkpoint at once, exit code 75 |
| as one of several processes | refused |
"""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed here: make test-torch")

import torch
from support.lineage import LINEAGE, ref
from support.memory import MemoryStore
from support.sessions import open_session

from tiphys.checkpoint.session import Session
from tiphys.checkpoint.settings import SaveInterval
from tiphys.errors import UsageError
from tiphys.lineage.select import list_commits
from tiphys.lineage.training_progress import read_training_progress

# The Trainer warns of what its own dependencies deprecate.
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 12
EPOCH = 5


def train(
    store: MemoryStore,
    folder: Path,
    until: int,
    *,
    seed: int,
    restored: int = 0,
    stop_at: int = -1,
    save_steps: int = 1,
) -> Any:
    import transformers

    from tiphys.checkpoint.adapters.transformers import CheckpointCallback

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
            self.batches = 0

        def forward(self, x: Any) -> dict[str, Any]:
            self.batches += 1
            if self.batches == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return {"loss": self.layers(x).square().mean()}

    transformers.set_seed(seed)
    start = ref(1, restored) if restored else None
    with open_session(store, 2 if start else 1, resume_from=start, every=SaveInterval(2, "steps")) as session:
        callback = CheckpointCallback(session)
        arguments = transformers.TrainingArguments(
            str(folder),
            max_steps=STEPS,
            per_device_train_batch_size=4,
            save_steps=save_steps,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=7,
        )
        trainer = transformers.Trainer(
            Model(),
            arguments,
            train_dataset=[{"x": torch.full((8,), n / 20) + torch.arange(8) / 8} for n in range(4 * EPOCH)],
            callbacks=[callback, *([stopper(until)] if until < STEPS else [])],
        )
        trainer.train(resume_from_checkpoint=callback.restore(folder))
    return trainer


def stopper(until: int) -> Any:
    """A callback that ends the training; its base takes seconds to import, so it is made late."""
    import transformers

    class Stopper(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_training_stop = state.global_step >= until
            return control

    return Stopper()


def bits(trainer: Any) -> Any:
    weights = [value.numpy().tobytes() for value in trainer.model.state_dict().values()]
    moments = [
        v.numpy().tobytes() for state in trainer.optimizer.state_dict()["state"].values() for v in state.values()
    ]
    return weights, moments, trainer.lr_scheduler.state_dict(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("interrupted", [2, 2 * EPOCH])
def test_a_training_that_was_interrupted_is_the_one_that_was_not(tmp_path, interrupted):
    straight = bits(train(MemoryStore(), tmp_path / "straight", STEPS, seed=1))
    store = MemoryStore()

    train(store, tmp_path / "first", interrupted, seed=1)
    resumed = train(store, tmp_path / "second", STEPS, seed=2, restored=interrupted)

    assert resumed.state.global_step == STEPS
    assert bits(resumed) == straight


def test_sigterm_saves_at_once_and_exits_with_75(tmp_path):
    store = MemoryStore()

    with pytest.raises(SystemExit) as end:
        train(store, tmp_path, STEPS, seed=1, stop_at=3, save_steps=100)

    assert end.value.code == 75
    assert list_commits(store, LINEAGE) == [ref(1, 3)]


def test_steps_total_and_loss_are_reported_without_a_line_of_the_program(tmp_path):
    train(store := MemoryStore(), tmp_path, STEPS, seed=1)

    reported = read_training_progress(store, LINEAGE)
    assert reported is not None
    assert (reported.global_step, reported.total_steps) == (STEPS, STEPS)
    assert reported.metrics["loss"] > 0


def test_several_processes_are_refused():
    from tiphys.checkpoint.adapters.transformers import CheckpointCallback

    with pytest.raises(UsageError, match="runs in 4 processes"):
        CheckpointCallback(Session()).on_train_begin(SimpleNamespace(world_size=4), None, None)
