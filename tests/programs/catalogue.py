"""The programs of the campaign: how each is started, what it restores, and the words of its row in the docs."""

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
MARK = "# Tiphys"
"""Ends each line of a script that its author wrote for Tiphys, besides imports."""

_TORCH, _OTHERS = ".venv-torch", ".venv-programs"
_RANKS = ("torchrun", "--standalone", "--nproc-per-node", "2")
_QUIET = ("--quiet", "200ms", "--interval", "50ms")


@dataclass(frozen=True)
class Program:
    """A training program, and what is true of its states after a restore."""

    name: str
    title: str
    script: str
    position: str
    """What comes back of the position in the data, for the docs."""
    environment: str = _TORCH
    starter: tuple[str, ...] = ("python",)
    folder: str = ""
    """Folder of its own checkpoints, which ``tiphys-exec`` keeps; empty for a program that opens a session."""
    parts: tuple[str, ...] = ("weights", "optimizer")
    """What a restored state holds, by the names of the script's lines."""
    in_order: bool = False
    """It consumes the samples of an undisturbed run, in the same order."""
    epoch_steps: int = 12
    names_steps: bool = True
    """The global step of a checkpoint is the program's step."""

    @property
    def command(self) -> list[str]:
        """What the author of a pipeline writes as the command of the step."""
        program = [*self.starter, str(SCRIPTS / self.script)]
        return ["tiphys-exec", "--dir", self.folder, *_QUIET, "--", *program] if self.folder else program

    @property
    def own_lines(self) -> int:
        """Lines of the script that its author wrote for Tiphys, besides imports."""
        return sum(line.rstrip().endswith(MARK) for line in (SCRIPTS / self.script).read_text().splitlines())


_BEGINS_EPOCH = "the epoch begins again, in another order"
_FROM_STEP = "position and order, which the program computes from its step"

PROGRAMS = (
    Program(
        "pytorch-workers",
        "PyTorch, `DataLoader` with 2 workers",
        "pytorch_workers.py",
        _BEGINS_EPOCH,
        parts=("weights", "optimizer", "generators"),
    ),
    Program(
        "pytorch-position",
        "PyTorch, `StatefulDataLoader` with 2 workers",
        "pytorch_position.py",
        "position and order, by the session (`sampler=`)",
        parts=("weights", "optimizer", "generators"),
        in_order=True,
    ),
    Program(
        "pytorch-ddp",
        "PyTorch DDP, torchrun with 2 ranks and a loader worker each",
        "pytorch_ddp.py",
        "the epoch begins again, in the same order (`set_epoch`)",
        starter=_RANKS,
        epoch_steps=8,
    ),
    Program(
        "hugging-face",
        "Hugging Face Trainer, 1 process",
        "hugging_face.py",
        "position and order, by the Trainer",
        in_order=True,
        epoch_steps=24,
    ),
    Program(
        "hugging-face-2",
        "Hugging Face Trainer, torchrun with 2 processes",
        "hugging_face.py",
        "position and order, by the Trainer",
        starter=_RANKS,
        in_order=True,
    ),
    Program(
        "lightning",
        "Lightning, `ModelCheckpoint(save_last=True)`",
        "lightning_last.py",
        "the epoch goes on, in another order",
        folder="ckpt",
    ),
    Program(
        "accelerate",
        "Accelerate, `save_state` with numbered states",
        "accelerate_states.py",
        "position, not order: the rest of the epoch comes in another order",
        folder="out",
        parts=("weights", "optimizer", "generators"),
        names_steps=False,
    ),
    Program(
        "keras",
        "Keras 3, `BackupAndRestore(save_freq=5)`",
        "keras_backup.py",
        "position, not the order that the data set shuffles",
        environment=_OTHERS,
        folder="backup",
        names_steps=False,
    ),
    Program(
        "jax-orbax",
        "JAX, Orbax's `CheckpointManager`",
        "jax_orbax.py",
        _FROM_STEP,
        environment=_OTHERS,
        folder="ckpt",
        in_order=True,
    ),
    Program(
        "xgboost",
        "XGBoost, `TrainingCheckPoint`",
        "xgboost_snapshots.py",
        "each round reads all rows",
        environment=_OTHERS,
        folder="snapshots",
        parts=("weights",),
        in_order=True,
        names_steps=False,
    ),
    Program(
        "scikit-learn",
        "scikit-learn, `partial_fit` and `joblib.dump`",
        "sklearn_partial_fit.py",
        _FROM_STEP,
        environment=_OTHERS,
        folder="models",
        in_order=True,
    ),
    Program(
        "bash",
        "a bash script that loops",
        "loop.sh",
        _FROM_STEP,
        environment=_OTHERS,
        starter=("bash",),
        folder="results",
        parts=("weights",),
        in_order=True,
    ),
)
