"""What the ranks of the tests run: a training whose state at each step is known, with a part of it in each rank."""

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from support.builders.lineage import claim_of, write_claim
from tiphys.checkpoint.adapters import dcp as checkpoints
from tiphys.checkpoint.adapters import dcp_session as dcp_tracked
from tiphys.store import open_store

ROWS, COLUMNS = 16, 1000


def state_at(step: int, replicated: bool = True) -> dict[str, Any]:
    """Matrices of which each rank has some rows; and what all ranks have, tensors and other things.

    Any rank may save what all of them have. Without it, a rank reads what it saved and nothing else.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    matrix = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + 1e6 * step
    state: dict[str, Any] = {
        "matrix": distribute_tensor(matrix, mesh, [Shard(0)]),
        "half": distribute_tensor((matrix / 3).to(torch.bfloat16), mesh, [Shard(0)]),
    }
    if replicated:
        state["vector"] = torch.full((5,), float(step), dtype=torch.float64)
        state["schedule"] = {"epoch": step, "rates": [0.1 / (step + 1)]}
    return state


def digest_of(state: dict[str, Any]) -> str:
    """Equal only for states that are equal in every bit, however they are spread over ranks."""
    whole = hashlib.sha256()
    for name in sorted(set(state) - {"schedule"}):
        tensor = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
        whole.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    whole.update(repr(state.get("schedule")).encode())
    return whole.hexdigest()


def train(
    total: int, stop: int = -1, stopped_rank: int = 0, replaced: int = -1, replicated: bool = True
) -> dict[str, Any]:
    """Restore, then save after each step up to ``total``.

    At step ``stop`` one rank gets SIGTERM; at step ``replaced`` another attempt takes this one's place.
    """
    state = state_at(0, replicated)
    with checkpoints.session() as session:
        done = session.restore(state)
        restored = digest_of(state)
        for step in range(done + 1, total + 1):
            if step == stop and dist.get_rank() == stopped_rank:
                os.kill(os.getpid(), signal.SIGTERM)
            if step == replaced and dist.get_rank() == 0:
                write_claim(open_store(os.environ["TIPHYS_STORE"]), claim_of(int(os.environ["TIPHYS_ATTEMPT"]) + 1))
            session.step(step, state_at(step, replicated))
            session.flush()
    return {"done": done, "restored": restored, "last": str(session.last_committed)}


def by_hand(step: int, background: bool) -> dict[str, Any]:
    """Save and load by DCP's own functions."""
    with checkpoints.session() as session:
        save = dcp.async_save if background else dcp.save
        saved = save(state_at(step), storage_writer=session.writer(step))
        if background:
            saved.result()
        state = state_at(0)
        dcp.load(state, storage_reader=session.reader())
    return {"restored": digest_of(state)}


def expected(step: int, replicated: bool = True) -> str:
    """The digest of the state after ``step``, as every rank must restore it."""
    return digest_of(state_at(step, replicated))


def trainer(
    folder: str,
    stop: int = -1,
    stopped_ranks: tuple[int, ...] = (),
    killed: int = -1,
    node_local: bool = False,
    save_steps: int = 4,
    **options: Any,
) -> dict[str, Any]:
    """Train 12 steps by Hugging Face's Trainer under DDP.

    At step ``stop`` some ranks get SIGTERM; at step ``killed`` rank 1 ends as by SIGKILL.
    """

    import transformers

    from tiphys.checkpoint import session as open_session
    from tiphys.checkpoint.adapters.transformers import TiphysCallback

    rank = dist.get_rank()
    output = Path(folder) / str(rank) if node_local else Path(folder)
    os.environ["LOCAL_RANK"] = "0" if node_local else str(rank)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # only looked at: the ranks have joined
    os.environ["LOCAL_WORLD_SIZE"] = "1" if node_local else str(dist.get_world_size())

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

        def forward(self, x: Any, return_loss: bool = True) -> dict[str, Any]:
            return {"loss": self.layers(x).square().mean()}

    class Fault(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == stop and rank in stopped_ranks:
                os.kill(os.getpid(), signal.SIGTERM)
            if state.global_step == killed:
                session.flush()
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)

    transformers.set_seed(1)
    with open_session() as session:
        arguments = transformers.TrainingArguments(
            str(output),
            max_steps=12,
            per_device_train_batch_size=4,
            save_steps=save_steps,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=7,
            ddp_backend="gloo",
            **options,
        )
        callback = TiphysCallback(session)
        rows = [{"x": torch.full((8,), n / 20) + torch.arange(8) / 8} for n in range(40)]
        trainer = transformers.Trainer(
            Model(), arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=[callback, Fault()]
        )
        start = callback.restore(output)
        trainer.train(resume_from_checkpoint=start)
    whole = hashlib.sha256()
    for value in trainer.model.state_dict().values():
        whole.update(value.numpy().tobytes())
    return {
        "start": start and Path(start).name,
        "step": trainer.state.global_step,
        "weights": whole.hexdigest(),
        "random": torch.get_rng_state().sum().item(),
        "best": trainer.state.best_model_checkpoint,
    }


__all__ = ["by_hand", "dcp_tracked", "expected", "train", "trainer"]
