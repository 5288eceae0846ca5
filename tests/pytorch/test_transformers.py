"""A Trainer of Hugging Face that was interrupted goes on as if it had not been.

| interrupted | outcome |
|---|---|
| in an epoch and at its end, with dropout and shuffled data | weights and optimizer equal in every bit |
| by SIGTERM | a checkpoint at once, exit code 75 |
| as one of several processes, with one disk or several | one checkpoint of all, the same weights in the end |
| with parts of the model on the disks of other nodes | refused |
"""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed here: make test-torch")

import torch
from support.builders.lineage import LINEAGE, claim_of, end_of, ref, write_claim, write_end
from support.fakes.memory_store import MemoryStore
from support.processes.torch_ranks import World, exits, ok
from support.stories.sessions import open_session

from tiphys.checkpoint.session import Session
from tiphys.checkpoint.settings import SaveInterval
from tiphys.errors import UsageError
from tiphys.lineage.select import list_commits
from tiphys.lineage.training_progress import read_training_progress

# The Trainer warns of what its own dependencies deprecate.
pytestmark = pytest.mark.filterwarnings("ignore")

PRELOADED = ["transformers.trainer", "accelerate", "tiphys.checkpoint.tracked_session"]
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

    from tiphys.checkpoint.adapters.transformers import TiphysCallback

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
        callback = TiphysCallback(session)
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


@pytest.fixture(scope="module")
def undisturbed(launcher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    world = World(launcher, folder)
    write_claim(world.store, claim_of(1))
    return ok(world(2, "trainer", folder=str(folder / "out")))


def resume(world: World, folder: Path, attempt: int, newest: int, **options: Any) -> list[dict[str, Any]]:
    write_claim(world.store, claim_of(attempt, ref(attempt - 1, newest)))
    write_end(world.store, end_of(attempt - 1))
    return ok(
        world(2, "trainer", attempt=attempt, resume_from=f"{attempt - 1}-{newest}", folder=str(folder), **options)
    )


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_sigterm_to_some_processes_ends_all_with_one_checkpoint(world, undisturbed, tmp_path, ranks):
    ended = world(2, "trainer", folder=str(tmp_path / "out"), stop=5, stopped_ranks=ranks)

    assert exits(ended) == [75, 75], "\n".join(rank["said"] for rank in ended)
    assert list_commits(world.store, LINEAGE)[0] == ref(1, 6)
    resumed = resume(world, tmp_path / "öther out", 2, 6)
    assert [rank["start"] for rank in resumed] == ["checkpoint-6"] * 2
    assert [rank | {"start": None} for rank in resumed] == undisturbed


@pytest.mark.parametrize("node_local", [False, True])
def test_processes_that_were_killed_resume_as_if_they_were_not(world, undisturbed, tmp_path, node_local):
    ended = world(2, "trainer", folder=str(tmp_path / "out"), killed=9, node_local=node_local)

    assert exits(ended) == [-9, -9], "\n".join(rank["said"] for rank in ended)
    assert list_commits(world.store, LINEAGE)[0] == ref(1, 8)
    resumed = resume(world, tmp_path / "other", 2, 8, node_local=node_local)
    assert [rank["start"] for rank in resumed] == ["checkpoint-8"] * 2
    assert [rank | {"start": None} for rank in resumed] == undisturbed


def test_the_best_model_is_restored_with_the_newest_checkpoint(world, tmp_path):
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    best |= {"metric_for_best_model": "eval_loss", "greater_is_better": True, "save_total_limit": 1}
    world(2, "trainer", folder=str(tmp_path / "out"), killed=7, **best)
    resumed = resume(world, tmp_path / "other", 2, 6, **best)

    assert [rank["best"] for rank in resumed] == [str(tmp_path / "other" / "checkpoint-2")] * 2
    assert resumed[0]["weights"] == resumed[1]["weights"]


def test_parts_of_the_model_on_other_nodes_are_refused(tmp_path):
    from tiphys.checkpoint.adapters.transformers import TiphysCallback

    class OtherNode:
        world_size = 2

        def gather_all(self, own: Any) -> Any:
            return [own, ({}, ["checkpoint-1/global_step1/zero_pp_rank_1.pt"])] if isinstance(own, tuple) else [own]

    callback = TiphysCallback(Session())
    callback._agreement = OtherNode()  # type: ignore[assignment]
    arguments = SimpleNamespace(output_dir=str(tmp_path), load_best_model_at_end=False)
    with pytest.raises(UsageError, match=r"rank 0 does not see checkpoint-1/global_step1/zero_pp_rank_1\.pt"):
        callback.on_save(arguments, SimpleNamespace(global_step=1, epoch=0, log_history=[]), None)


def test_processes_that_have_not_joined_are_refused(monkeypatch):
    from tiphys.checkpoint.adapters.transformers import TiphysCallback

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="make the TrainingArguments"):
        TiphysCallback(Session()).restore("out")


def test_sessions_of_single_processes_are_refused_in_a_training_of_several():
    session = open_session(MemoryStore())
    with pytest.raises(UsageError, match="sets RANK and WORLD_SIZE"):
        session.agree_by(SimpleNamespace(world_size=2), restores=True)
