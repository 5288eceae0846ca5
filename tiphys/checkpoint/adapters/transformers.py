"""A callback for Hugging Face's Trainer, which commits the checkpoints that the Trainer writes.

    from tiphys import checkpoint
    from tiphys.checkpoint.adapters.transformers import TiphysCallback

    with checkpoint.session() as session:
        callback = TiphysCallback(session)
        trainer = Trainer(…, args=TrainingArguments(output_dir, save_steps=50), callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.restore(output_dir))

Only the Trainer knows everything that it needs to resume, so the callback saves
the files of its checkpoint folder and restores them for it. ``save_steps`` sets
how often the Trainer writes a checkpoint; the session commits those that are
due.

Under torchrun or ``accelerate launch`` every process opens the session. They
agree in each step whether one of them got SIGTERM. Rank 0 saves the folder,
with the random generators that the other ranks wrote into it, also on the disks
of other nodes.
"""

import mmap
import os
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch.distributed as dist
from transformers import TrainerCallback

from tiphys.checkpoint.adapters.ranks import RankAgreement
from tiphys.checkpoint.session import Session
from tiphys.errors import UsageError


class TiphysCallback(TrainerCallback):
    """Saves and restores one Trainer through ``session``, which each of its processes opens around it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._agreement: RankAgreement | None = None

    def restore(self, output_dir: str | Path) -> str | None:
        """Write the newest valid checkpoint into ``output_dir``; return its folder, or None without a checkpoint.

        Of several processes one on each node writes. All of them call this, after they made their `TrainingArguments`.

        Raises:
            UsageError: the processes have not joined yet.
        """
        ranks, step = self._join_ranks(), None
        if _is_first_of_node() and (state := self._session.restore()) is not None:
            step = state["global_step"]
            for name, content in state["files"].items():
                path = Path(output_dir) / PurePosixPath(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        steps = [found for found in ranks.gather_all(step) if found is not None]
        return str(Path(output_dir) / f"checkpoint-{steps[0]}") if steps else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Learn the total of steps, and where the best model is now; raise `UsageError` as `restore` does."""
        if (joined := self._join_ranks().world_size) != args.world_size:
            raise UsageError(
                f"the Trainer has {args.world_size} processes, but {joined} joined; start it with torchrun"
            )
        self._session.total_steps = self._session.total_steps or state.max_steps
        if state.best_model_checkpoint:  # the folder of the output may have another name in this attempt
            state.best_model_checkpoint = str(Path(args.output_dir) / Path(state.best_model_checkpoint).name)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Report progress; after SIGTERM in any process, request a checkpoint from the Trainer at once."""
        self._session.report(state.global_step, _last_logged_metrics(state))
        if self._join_ranks().any_rank(self._session.should_stop)[0]:
            control.should_save = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Pass the checkpoint that the Trainer wrote to the session, which ends the program after SIGTERM."""
        step, output = state.global_step, Path(args.output_dir)
        names = [f"checkpoint-{step}"]
        if args.load_best_model_at_end and state.best_model_checkpoint:
            names.append(Path(state.best_model_checkpoint).name)
        self._join_ranks().gather_all(None)  # each rank has written its files
        paths = {
            path.relative_to(output).as_posix(): path
            for name in names
            for path in sorted((output / name).rglob("*"))
            if path.is_file()
        }
        elsewhere = self._gather_from_other_nodes(paths)
        self._session.step(
            step,
            lambda: {"global_step": step, "files": elsewhere | {name: _map_file(path) for name, path in paths.items()}},
            _last_logged_metrics(state),
            epoch=int(state.epoch or 0),
            data_position={"epoch": float(state.epoch or 0)},  # from which the Trainer skips what was consumed
        )

    def _join_ranks(self) -> RankAgreement:
        """Agree with the other processes from now on; the first call must be at the same point in all of them."""
        if self._agreement is None:
            if not (dist.is_available() and dist.is_initialized()) and int(os.environ.get("WORLD_SIZE") or 1) > 1:
                raise UsageError("make the TrainingArguments, which join the processes, before callback.restore()")
            self._agreement = RankAgreement()
            self._session.agree_by(self._agreement, restores=_is_first_of_node())
        return self._agreement

    def _gather_from_other_nodes(self, paths: dict[str, Path]) -> dict[str, Any]:
        """Return the random generators that rank 0 does not see.

        Raises:
            UsageError: other nodes hold parts of the model, which are too large for that.
        """
        ranks = self._join_ranks()
        seen = set(ranks.gather_all(set(paths))[0])
        own = {name: path.read_bytes() for name, path in paths.items() if name not in seen and "rng_state" in name}
        unseen = [name for name in paths if name not in seen and name not in own]
        gathered = ranks.gather_all((own, unseen))
        if parts := sorted(name for _, names in gathered for name in names):
            raise UsageError(
                f"rank 0 does not see {parts[0]} and {len(parts) - 1} more files of other nodes; give all nodes one "
                "output_dir, on a volume that they share, or save with tiphys.checkpoint.adapters.dcp"
            )
        return {
            name: np.frombuffer(content, dtype=np.uint8) for files, _ in gathered for name, content in files.items()
        }


def _is_first_of_node() -> bool:
    return (os.environ.get("LOCAL_RANK") or "0") == "0"


def _map_file(path: Path) -> Any:
    """Map a file into memory as an array, which is read when it is copied."""
    if not path.stat().st_size:
        return np.empty(0, dtype=np.uint8)
    with path.open("rb") as stream:
        return np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)


def _last_logged_metrics(state: Any) -> dict[str, float]:
    """Return the numbers that the Trainer logged last."""
    last = state.log_history[-1] if state.log_history else {}
    return {name: value for name, value in last.items() if isinstance(value, float)}
