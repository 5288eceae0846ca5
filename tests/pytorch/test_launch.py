"""PyTorch's trainings below the launcher, whose whole process group gets SIGTERM, as Argo sends it.

| program | outcome |
|---|---|
| a loader with two workers | the training saves before they end |
| torchrun | all ranks save together, and torchrun gives them the grace period of the step |

Each rank prints ``ready`` when it may be signalled. Only SIGTERM makes it save.
"""

import random
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed here: make test-torch")

from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, write_claim
from support.processes.launched_program import Launched

from tiphys.lineage.select import list_commits
from tiphys.store import DirectoryStore, read_events

pytestmark = pytest.mark.timeout(1800)  # only a deadlock takes so long

KILLS = 10
GRACE = "300"
TRAIN = """
import os, sys, time
import numpy, torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from tiphys import checkpoint

class Images(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((8,), float(index))

def train(workers):
    with checkpoint.session() as session:
        state = session.restore(default={"step": 0, "weights": numpy.zeros(8)})
        for images in DataLoader(Images(), batch_size=4, num_workers=workers):
            gradient = images.sum(0)
            if dist.is_initialized():
                dist.all_reduce(gradient)
            state["weights"] += gradient.numpy()
            state["step"] += 1
            session.step(state["step"], state)
            if state["step"] == 2:
                os.write(1, b"ready" + bytes([10]))

if __name__ == "__main__":
    if sys.argv[1] == "ranks":
        dist.init_process_group("gloo")
    train(1 if sys.argv[1] == "ranks" else 2)
"""


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    found = DirectoryStore(tmp_path / "store")
    write_claim(found, claim_of(1))
    return found


def launched(store: DirectoryStore, tmp_path: Path, *words: str, ready: int = 1) -> Launched:
    """``python`` with ``words``, where ``{}`` stands for the training."""
    script = tmp_path / "träning v2.0.py"
    script.write_text(TRAIN)
    environ = {
        "TIPHYS_STORE": store.url,
        "TIPHYS_RUN": RUN,
        "TIPHYS_STEP": STEP,
        "TIPHYS_ATTEMPT": "1",
        "TIPHYS_LINEAGE": LINEAGE,
        "TIPHYS_SAVE_EVERY": "1h",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, *(str(script) if word == "{}" else word for word in words)]
    return Launched(command, GRACE, ready, only_ready=False, **environ)


def saves(program: Launched, store: DirectoryStore) -> None:
    """SIGTERM to the group ends ``program`` with 75, with one checkpoint of all ranks and without a lost step."""
    program.signal_group()
    code, out = program.ended()
    assert code == 75, out
    assert "forcefully exiting" not in out
    [ref] = list_commits(store, LINEAGE)
    cards = [event for event in read_events(store, RUN) if event.name == "checkpoint.preempted"]
    assert {(card.data["committed"], card.data["steps_lost"]) for card in cards} == {(str(ref), 0)}


@pytest.mark.parametrize("kill", range(KILLS))
def test_training_with_loader_workers_saves(store: DirectoryStore, tmp_path: Path, kill: int) -> None:
    program = launched(store, tmp_path, "{}", "alone")
    time.sleep(random.Random(kill).random() / 4)  # somewhere between two steps
    saves(program, store)


def test_ranks_below_torchrun_save_and_have_the_whole_grace(store: DirectoryStore, tmp_path: Path) -> None:
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "{}", "ranks")
    program = launched(store, tmp_path, *words, ready=2)
    lines = program.lines().items()
    torchrun = next(pid for pid, line in lines if "distributed.run" in line and "tiphys.launch" not in line)
    assert f"PET_SHUTDOWN_TIMEOUT={GRACE}" in Path(f"/proc/{torchrun}/environ").read_text().split("\0")
    saves(program, store)
