"""What the ranks of the tests run: a training whose state at each step is known, with a part of it in each rank."""

import hashlib
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from support.lineage import claim_of, write_claim
from tiphys.checkpoint.adapters import dcp as checkpoints
from tiphys.checkpoint.adapters import dcp_tracked
from tiphys.store import open_store

ROWS, COLUMNS = 16, 1000


def state_at(step: int) -> dict[str, Any]:
    """A matrix of which each rank has some rows, a replicated vector, and things that are no tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    matrix = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + 1e6 * step
    return {
        "matrix": distribute_tensor(matrix, mesh, [Shard(0)]),
        "half": distribute_tensor((matrix / 3).to(torch.bfloat16), mesh, [Shard(0)]),
        "vector": torch.full((5,), float(step), dtype=torch.float64),
        "schedule": {"epoch": step, "rates": [0.1 / (step + 1)]},
    }


def digest_of(state: dict[str, Any]) -> str:
    """Equal only for states that are equal in every bit, however they are spread over ranks."""
    whole = hashlib.sha256()
    for name in ("matrix", "half", "vector"):
        tensor = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
        whole.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    whole.update(repr(state["schedule"]).encode())
    return whole.hexdigest()


def train(total: int, stop: int = -1, stopped_rank: int = 0, replaced: int = -1) -> dict[str, Any]:
    """Restore, then save after each step up to ``total``.

    At step ``stop`` one rank gets SIGTERM; at step ``replaced`` another attempt takes this one's place.
    """
    state = state_at(0)
    with checkpoints.session() as session:
        done = session.restore(state)
        restored = digest_of(state)
        for step in range(done + 1, total + 1):
            if step == stop and dist.get_rank() == stopped_rank:
                os.kill(os.getpid(), signal.SIGTERM)
            if step == replaced and dist.get_rank() == 0:
                write_claim(open_store(os.environ["TIPHYS_STORE"]), claim_of(int(os.environ["TIPHYS_ATTEMPT"]) + 1))
            session.step(step, state_at(step))
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


def expected(step: int) -> str:
    """The digest of the state after ``step``, as every rank must restore it."""
    return digest_of(state_at(step))


__all__ = ["by_hand", "dcp_tracked", "expected", "train"]
