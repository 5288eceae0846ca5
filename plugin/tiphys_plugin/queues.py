"""Which queue may use how many GPUs: the one file that an administrator writes, and the spec of a `GPULedger`.

    queues:
      - name: research
        gpus: {A100: 8, "*": 4}     # 8 A100, and 4 of all other types together
      - name: nightly
        gpus: {"*": 2}
    inventory:                      # optional: what the cluster has
      A100: {count: 16, memory_mb: 81920}

Without a queue file every queue name is accepted and nothing is limited.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError, model_validator

from tiphys.errors import UsageError

ANY_TYPE = "*"


class Queue(BaseModel):
    """``gpus`` is the quota by GPU type; ``*`` is shared by all types that are not named."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    gpus: dict[str, NonNegativeInt]


class Stock(BaseModel):
    """GPUs of one type that the cluster has; ``memory_mb`` is the memory of each, None if not declared."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: NonNegativeInt
    memory_mb: PositiveInt | None = None


class Queues(BaseModel):
    """A queue file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    queues: tuple[Queue, ...]
    inventory: dict[str, Stock] | None = None
    """None: not declared, and only quotas are held."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> "Queues":
        names = [queue.name for queue in self.queues]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"queue {twice[0]!r} is declared twice")
        return self

    def find(self, name: str) -> Queue | None:
        return next((queue for queue in self.queues if queue.name == name), None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(queue.name for queue in self.queues)


@dataclass(frozen=True)
class Misconfigured:
    """Queues that somebody declared and nobody can read. Nothing new is granted until they are repaired."""

    why: str


QueueRules = Queues | Misconfigured | None
"""What a decision goes by; None: nothing is limited."""


def in_words(gpus: int, gpu_type: str | None) -> str:
    """GPUs for a person: ``4 A100``; ``1 GPU`` or ``2 GPUs`` where the type does not matter."""
    return f"{gpus} {gpu_type or ('GPU' if gpus == 1 else 'GPUs')}"


def parse_queues(document: object, source: str) -> Queues:
    """Read what a queue file holds; ``source`` names it in errors.

    Raises:
        UsageError: a field is wrong; the message names it.
    """
    try:
        return Queues.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(
            f"{source}: {field}: {first['msg']}; expected `queues: [{{name: research, gpus: {{A100: 8}}}}]`"
        ) from error


def load_queues(path: Path) -> Queues:
    """Read a queue file.

    Raises:
        UsageError: it is missing, is not YAML, or a field is wrong; the message names the field.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"queue file {path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"queue file {path} is not valid YAML: {' '.join(str(error).split())}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"queue file {path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    return parse_queues(document, f"queue file {path}")
