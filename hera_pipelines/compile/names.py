"""Names that compile gives; authors may not use them."""

from dataclasses import dataclass

RESERVED = "tiphys-"
FINALIZE = "tiphys-finalize"
EXIT = "tiphys-exit"
ITEM = "tiphys-item"
CHECKPOINT_VOLUME = "tiphys-checkpoints"


def pipeline_name(given: str | None, name: str | None, generate_name: str | None) -> str:
    """Name of a pipeline: as given, or what its Workflows are called; empty where nothing says."""
    return given or name or (generate_name or "").rstrip("-.")


def answer(name: str) -> str:
    """Input parameter of the run template that carries one of admit's answers."""
    return f"{RESERVED}{name}"


def parameter_artifact(name: str) -> str:
    """Artifact of the run template that carries the declared output parameter ``name``."""
    return f"{RESERVED}parameter-{name}"


@dataclass(frozen=True)
class StepNames:
    """Templates made for the step called ``step``; the wrapper bears the step's own name."""

    step: str

    @property
    def admit(self) -> str:
        return f"{self.step}-admit"

    @property
    def run(self) -> str:
        return f"{self.step}-run"

    @property
    def attempt(self) -> str:
        return f"{self.step}-attempt"

    @property
    def settle(self) -> str:
        return f"{self.step}-settle"

    @property
    def conclude(self) -> str:
        return f"{self.step}-conclude"
