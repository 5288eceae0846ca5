"""`RegisterModel`: the step that registers a model of the run in MLflow, once it is verified."""

from dataclasses import dataclass
from typing import Any

from hera.workflows import Artifact, Env, Parameter
from hera.workflows.models import ValueFrom

from hera_pipelines.authoring.calls import as_list
from hera_pipelines.authoring.containers import Step
from hera_pipelines.compile.settings import refuse_unknown_keywords
from tiphys.errors import UsageError
from tiphys.records.tracking import (
    MLFLOW_TRACKING_URI,
    ModelRegistration,
    check_alias,
    check_model_name,
    check_tracking_uri,
)
from tiphys.tracking.register import MODEL_INPUT, VERSION_OUTPUT

_FOLDER = "/tmp/tiphys"  # noqa: S108  a path in the container; variables name it to the program
_INPUT_FOLDER = "/tmp/tiphys-inputs"  # noqa: S108
_OWN_ARGUMENTS = ("command", "args", "inputs", "outputs")


@refuse_unknown_keywords
@dataclass(kw_only=True)
class RegisterModel(Step):
    """A step that registers its input artifact ``model`` as a version of a model in MLflow 3.

    The same output is registered as one version, however often the step runs. Its output parameter ``version`` is the
    number, or ``pending`` while MLflow has not answered; `tiphys register` repeats that.

    It takes the arguments of `Step` without a program, and these:

    Attributes:
        model: Name of the registered model.
        alias: Alias that the version gets last, such as ``champion``; empty: none.
        uri: URL of the tracking server, without credentials; empty: the variable MLFLOW_TRACKING_URI of the step.
        image: Image with Python and ``tiphys[mlflow]``.
    """

    model: str
    alias: str = ""
    uri: str = ""
    cache: bool = False  # a call that MLflow did not answer is repeated in the next submission

    def __post_init__(self) -> None:
        where = f"step {self.name!r}: "
        check_model_name(self.model, where)
        if self.alias:
            check_alias(self.alias, where)
        if self.uri:
            check_tracking_uri(self.uri, where)
        if self.cache:
            raise UsageError(f"{where}RegisterModel(…) is asked again in each submission; drop cache")
        if given := next((name for name in _OWN_ARGUMENTS if getattr(self, name)), ""):
            raise UsageError(f"{where}RegisterModel(…) has a program of its own; drop {given}")
        if not self.image:
            raise UsageError(f"{where}RegisterModel(…) needs image=…, with Python and tiphys[mlflow]")
        self.command = ["python", "-m", "tiphys.tracking.register"]
        self.inputs = [Artifact(name=MODEL_INPUT, path=f"{_INPUT_FOLDER}/{MODEL_INPUT}")]
        self.outputs = [
            Parameter(name=VERSION_OUTPUT, value_from=ValueFrom(path=f"{_FOLDER}/{VERSION_OUTPUT}")),
        ]
        if self.uri:
            self.env = [*as_list(self.env), Env(name=MLFLOW_TRACKING_URI, value=self.uri)]
        super().__post_init__()

    def _setting_values(self, where: str) -> dict[str, Any]:
        registration = ModelRegistration(model=self.model, alias=self.alias)
        return {**super()._setting_values(where), "registration": registration}
