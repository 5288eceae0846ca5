"""A callback for the Trainer of Hugging Face: each checkpoint that the Trainer writes becomes one of the session.

    from tiphys import checkpoint
    from tiphys.checkpoint.adapters.transformers import CheckpointCallback

    with checkpoint.session() as session:
        callback = CheckpointCallback(session)
        trainer = Trainer(…, args=TrainingArguments(output_dir, save_steps=50), callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.restore(output_dir))

The Trainer alone knows all that it needs to go on, so the files of its folder
are what is kept, and what it resumes from. ``save_steps`` says how often it
writes them; those that are due are kept.
"""

import mmap
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from transformers import TrainerCallback

from tiphys.checkpoint.session import Session
from tiphys.errors import UsageError


class CheckpointCallback(TrainerCallback):
    """Keeps the checkpoints of one Trainer in ``session``, which the program opens around it. For one process."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def restore(self, output_dir: str | Path) -> str | None:
        """Write the newest valid checkpoint below ``output_dir``; its folder, or None if there is no checkpoint."""
        if (state := self._session.restore()) is None:
            return None
        folder = Path(output_dir) / f"checkpoint-{state['global_step']}"
        for name, content in state["files"].items():
            path = folder / PurePosixPath(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return str(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Refuse what would lose the random numbers of all processes but one."""
        if args.world_size > 1:
            raise UsageError(
                f"the Trainer runs in {args.world_size} processes, and this callback keeps the files of one; "
                "save by tiphys.checkpoint.adapters.dcp there"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """After SIGTERM, write a checkpoint at once."""
        if self._session.should_stop:
            control.should_save = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Offer what the Trainer has just written to the session, which ends the program after SIGTERM."""
        step = state.global_step
        folder = Path(args.output_dir) / f"checkpoint-{step}"
        self._session.step(step, lambda: _state(folder, step), _metrics(state), epoch=int(state.epoch or 0))


def _state(folder: Path, global_step: int) -> dict[str, Any]:
    names = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        "global_step": global_step,
        "files": {path.relative_to(folder).as_posix(): _content(path) for path in names},
    }


def _content(path: Path) -> Any:
    """The bytes of a file as an array, read when they are copied."""
    if not path.stat().st_size:
        return np.empty(0, dtype=np.uint8)
    with path.open("rb") as stream:
        return np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)


def _metrics(state: Any) -> dict[str, float]:
    """What the Trainer has logged last."""
    last = state.log_history[-1] if state.log_history else {}
    return {name: value for name, value in last.items() if isinstance(value, float)}
