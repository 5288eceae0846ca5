"""A callback for Lightning: it restores before the fit begins and saves after optimizer steps.

    from tiphys import checkpoint
    from tiphys.checkpoint.adapters.lightning import CheckpointCallback

    with checkpoint.session() as session:
        trainer = Trainer(max_steps=10_000, callbacks=[CheckpointCallback(session)], enable_checkpointing=False)
        trainer.fit(model, data)

What is kept is what Lightning itself would write, and the random generators.
Lightning has no public way to hand it a checkpoint that is not a file, so this
takes two things of its trainer that are not documented, and refuses to train
if they have no effect. It works under both of Lightning's names.
"""

import sys
from typing import Any

from tiphys.checkpoint.adapters.pytorch import random_state, set_random_state
from tiphys.checkpoint.adapters.tensors import decode, encode
from tiphys.checkpoint.session import Session
from tiphys.errors import UsageError
from tiphys.protocol.environment import EX_TEMPFAIL

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

_RANDOM = "tiphys.random"


class CheckpointCallback(Callback):
    """Keeps the checkpoints of a fit in ``session``, which the program opens around it.

    In the middle of an epoch a run only goes on with the right batch if the data
    loader is resumable (``state_dict`` and ``load_state_dict``), as for
    Lightning's own checkpoints.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._restored_step: int | None = None
        self._random: dict[str, Any] | None = None
        self._last_step = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Hand the newest valid checkpoint to the trainer, before it would load one from a file."""
        if stage != "fit" or (state := self._session.restore()) is None:
            return
        held = decode(state)
        self._random = held.pop(_RANDOM)
        self._restored_step = self._last_step = held["global_step"]
        trainer._checkpoint_connector._loaded_checkpoint = held

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Refuse to train from anything else under the name of a resumed run."""
        if self._restored_step is None:
            return
        if trainer.ckpt_path:
            raise UsageError(
                f"there is a checkpoint of this run and fit() was given ckpt_path={str(trainer.ckpt_path)!r}; "
                "to start from other weights, load them into the module before fit()"
            )
        if trainer.global_step != self._restored_step:
            raise UsageError(
                f"Lightning did not take over the checkpoint of step {self._restored_step}, it is at step "
                f"{trainer.global_step}; use Lightning 2.5 or 2.6, or report this version"
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Only now: making the iterators of the data draws random numbers, too."""
        if self._random is not None:
            set_random_state(self._random)
            self._random = None

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Tell the session of each optimizer step; between them there are gradients that no checkpoint holds."""
        if (step := trainer.global_step) > self._last_step:
            self._last_step = step
            self._session.step(step, lambda: _state(trainer), trainer.callback_metrics, epoch=trainer.current_epoch)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Between two optimizer steps Lightning ends on SIGTERM by itself, with an exit code that says all is well."""
        if self._session.should_stop and not getattr(exception, "code", None):
            self._session.flush()
            raise SystemExit(EX_TEMPFAIL) from exception


def _state(trainer: Any) -> Any:
    return encode(
        trainer._checkpoint_connector.dump_checkpoint(weights_only=False) | {_RANDOM: random_state()}, pickled=True
    )
