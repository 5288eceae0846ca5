"""`Step`, `Train` and `Plain`: steps whose program is a container with a command.

They take the arguments of Hera's `Container`, and those of `step` or `train`.
"""

from dataclasses import dataclass
from typing import Any

from hera.workflows import Container

from hera_pipelines.authoring.calls import create_task, require_image, template_input_slots
from hera_pipelines.authoring.step_options import StepOptions, TrainOptions
from hera_pipelines.compile.settings import refuse_unknown_keywords
from tiphys.errors import UsageError
from tiphys.protocol.step_spec import STEP_ANNOTATION


@dataclass(kw_only=True)
class _CallableContainer(Container):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Create a Task of this step in the open DAG; arguments become the values of declared inputs."""
        return create_task(self, template_input_slots(self), super().__call__, args, kwargs)


@dataclass(kw_only=True)
class _GatedContainer(StepOptions, _CallableContainer):
    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError(f"{type(self).__name__}(…) needs name=…; its results are stored under it")
        if isinstance(self, TrainOptions):
            require_image(self.name, self.image)
        self.annotations = {
            **(self.annotations or {}),
            STEP_ANNOTATION: self.step_settings(self.name).model_dump_json(),
        }
        super().__post_init__()  # type: ignore[no-untyped-call]


@refuse_unknown_keywords
@dataclass(kw_only=True)
class Step(_GatedContainer):
    """A container whose result is recorded; see `hera_pipelines.step`."""


@refuse_unknown_keywords
@dataclass(kw_only=True)
class Train(TrainOptions, _GatedContainer):
    """A container that trains; see `hera_pipelines.train`."""


@refuse_unknown_keywords
@dataclass(kw_only=True)
class Plain(_CallableContainer):
    """A container that Argo runs without Tiphys; see `hera_pipelines.plain`."""

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("Plain(…) needs name=…; its task is named after it")
        super().__post_init__()  # type: ignore[no-untyped-call]
