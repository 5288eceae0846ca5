"""A callback for Hugging Face's Trainer, which commits the checkpoints that the Trainer writes.

    from tiphys import checkpoint
    from tiphys.checkpoint.adapters.transformers import CheckpointCallback

    with checkpoint.session() as session:
        callback = CheckpointCallback(session)
        trainer = Trainer(…, args=TrainingArguments(output_dir, save_steps=50), callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.restore(output_dir))

Only the Trainer knows everything that it needs to resume, so the callback saves
the files of its checkpoint folder and restores them for it. ``save_steps`` sets
how often the Trainer writes a checkpoint; the session commits those that are
due.
"""

import mmap
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from transformers import TrainerCallback

from tiphys.checkpoint.session import Session
from tiphys.errors import UsageError


class CheckpointCallback(TrainerCallback):
    """Saves and restores one Trainer of one process through ``session``, which the program opens around it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def restore(self, output_dir: str | Path) -> str | None:
        """Write the newest valid checkpoint into ``output_dir``; return its folder, or None without a checkpoint."""
        if (state := self._session.restore()) is None:
            return None
        folder = Path(output_dir) / f"checkpoint-{state['global_step']}"
        for name, content in state["files"].items():
            path = folder / PurePosixPath(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return str(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Learn the total of steps; raise `UsageError` for several processes: the files hold random states of one."""
        if args.world_size > 1:
            raise UsageError(
                f"the Trainer runs in {args.world_size} processes, but this callback saves the files of one; "
                "save with tiphys.checkpoint.adapters.dcp instead"
            )
        self._session.total_steps = self._session.total_steps or state.max_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Report progress; after SIGTERM, request a checkpoint from the Trainer at once."""
        self._session.report(state.global_step, _last_logged_metrics(state))
        if self._session.should_stop:
            control.should_save = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Pass the checkpoint that the Trainer wrote to the session, which ends the program after SIGTERM."""
        step = state.global_step
        folder = Path(args.output_dir) / f"checkpoint-{step}"
        self._session.step(
            step, lambda: _folder_state(folder, step), _last_logged_metrics(state), epoch=int(state.epoch or 0)
        )


def _folder_state(folder: Path, global_step: int) -> dict[str, Any]:
    names = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        "global_step": global_step,
        "files": {path.relative_to(folder).as_posix(): _map_file(path) for path in names},
    }


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
