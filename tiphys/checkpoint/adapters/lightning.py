"""A callback for Lightning that restores before the fit and saves after optimizer steps.

    from tiphys import checkpoint
    from tiphys.checkpoint.adapters.lightning import TiphysCheckpoint

    with checkpoint.session() as session:
        trainer = Trainer(max_steps=10_000, callbacks=[TiphysCheckpoint(session)], enable_checkpointing=False)
        trainer.fit(model, data)

A checkpoint contains what Lightning itself would write, and the random
generators. Lightning has no public API for a checkpoint that is not a file, so
the callback uses two private attributes of the trainer, and refuses to train if
they have no effect. With a third it keeps Lightning from ending between two
steps. It supports both packages, ``lightning`` and ``pytorch_lightning``.

Such a checkpoint may hold any object, for example hyperparameters. They are
pickled, so a restore runs the code that the checkpoint names.
"""

import math
import sys
from typing import Any

from tiphys.checkpoint.adapters.pytorch import random_state, set_random_state
from tiphys.checkpoint.adapters.tensors import decode_tensors, encode_tensors
from tiphys.checkpoint.session import Session
from tiphys.checkpoint.telemetry.events import log_once
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


class TiphysCheckpoint(Callback):
    """Saves and restores a fit through ``session``, which the program opens around it.

    As with Lightning's own checkpoints, a run resumes at the right batch of an
    epoch only if the data loader is resumable (``state_dict`` and
    ``load_state_dict``).
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._restored_step: int | None = None
        self._random: dict[str, Any] | None = None
        self._ended_epoch = False
        """Whether the restored step was the last of its epoch."""
        self._loaders: list[Any] = []
        """States of the loaders, if the restored step was the last of its epoch."""
        self._last_step = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Pass the newest valid checkpoint to the trainer, before it would load one from a file."""
        if stage != "fit":
            return
        # A save comes after all that its step changes: other callbacks update averaged weights, and so does the hook of
        # many modules, which Lightning calls after those of callbacks.
        trainer.callbacks = [*(callback for callback in trainer.callbacks if callback is not self), self]
        self._follow_hook(trainer, pl_module)
        if (state := self._session.restore()) is None:
            return
        checkpoint = decode_tensors(state, pickled=True)
        self._random = checkpoint.pop(_RANDOM)
        self._restored_step = self._last_step = checkpoint["global_step"]
        fit = checkpoint["loops"]["fit_loop"]
        self._ended_epoch = fit["epoch_loop.batch_progress"]["is_last_batch"]
        if self._ended_epoch:
            self._loaders = fit["state_dict"].get("combined_loader") or []
        trainer._checkpoint_connector._loaded_checkpoint = checkpoint

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Learn the number of steps; raise `UsageError` unless the trainer resumed from the restored checkpoint."""
        # A module that steps its optimizers itself makes any number of steps in a batch.
        is_known = pl_module.automatic_optimization or trainer.max_steps != -1
        total = trainer.estimated_stepping_batches if is_known else math.inf
        if self._session.total_steps is None and math.isfinite(total):
            self._session.total_steps = int(total)
        if trainer.fit_loop._data_fetcher.length is None and hasattr(trainer.train_dataloader, "state_dict"):
            log_once(
                "Lightning reads one batch ahead of data whose length is unknown, so a restore leaves that batch out; "
                "give the data set, or the loader, a __len__ with the length of an epoch"
            )
        if self._restored_step is None:
            return
        if trainer.ckpt_path:
            raise UsageError(
                f"this run has a checkpoint, but fit() was called with ckpt_path={str(trainer.ckpt_path)!r}; "
                "to start from other weights, load them into the module before fit()"
            )
        if trainer.global_step != self._restored_step:
            raise UsageError(
                f"Lightning ignored the checkpoint of step {self._restored_step} and is at step "
                f"{trainer.global_step}; use Lightning 2.5 or 2.6, or report this version"
            )
        if self._ended_epoch and trainer.fit_loop._data_fetcher.length is None:
            # Lightning counts the restored batch next, and begins anew only at a length that it knows.
            trainer.fit_loop.epoch_loop.batch_progress.current.completed = -1
        if self._loaders:
            self._end_epoch(trainer.fit_loop)

    def _end_epoch(self, fit_loop: Any) -> None:
        """Take the end of the restored epoch from the loaders: Lightning would take it for that of the next one."""
        try:
            next(fit_loop._data_fetcher)
        except StopIteration:
            pass
        else:  # they are in the next epoch already
            fit_loop._combined_loader._load_state_dicts(self._loaders)
        iter(fit_loop._data_fetcher)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Set the random generators, now that the data iterators exist: creating them draws random numbers."""
        if self._random is not None:
            set_random_state(self._random)
            self._random = None

    def _follow_hook(self, trainer: Any, pl_module: Any) -> None:
        """Report each optimizer step once the module's hook at the end of a batch has returned."""
        hook = pl_module.on_train_batch_end

        def call(*args: Any, **kwargs: Any) -> Any:
            result = hook(*args, **kwargs)
            self._report_step(trainer)
            return result

        pl_module.on_train_batch_end = call

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Give the module its own hook back."""
        vars(pl_module).pop("on_train_batch_end", None)

    def _report_step(self, trainer: Any) -> None:
        """Report a step to the session; between steps there are gradients that no checkpoint contains."""
        if (step := trainer.global_step) > self._last_step:
            self._last_step = step
            has_position = hasattr(trainer.train_dataloader, "state_dict")
            self._session.step(
                step,
                lambda: _capture_trainer(trainer),
                trainer.callback_metrics,
                epoch=trainer.current_epoch,
                data_position={"batch": trainer.fit_loop.batch_idx + 1} if has_position else None,
            )
        else:
            self._go_on_to_next_step(trainer)

    def on_validation_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Go on to the next optimizer step after SIGTERM."""
        self._go_on_to_next_step(trainer)

    def _go_on_to_next_step(self, trainer: Any) -> None:
        """Keep Lightning from ending after SIGTERM before the session has saved, which it does at the next step."""
        if self._session.should_stop and trainer.world_size == 1:  # several ranks end when Lightning has told all
            trainer._signal_connector.received_sigterm = False

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Exit with code 75 after SIGTERM: Lightning itself ends between optimizer steps with exit code 0."""
        self.teardown(trainer, pl_module, "fit")
        if self._session.should_stop and not getattr(exception, "code", None):
            self._session.flush()
            raise SystemExit(EX_TEMPFAIL) from exception


def _capture_trainer(trainer: Any) -> Any:
    return encode_tensors(
        trainer._checkpoint_connector.dump_checkpoint(weights_only=False) | {_RANDOM: random_state()}, pickled=True
    )
