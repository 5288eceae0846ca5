"""`Mlflow` and `Wandb`: the service whose run of a step is the same in all attempts, submissions and resumes."""

from dataclasses import dataclass

from hera_pipelines.compile.settings import refuse_unknown_keywords
from tiphys.errors import UsageError
from tiphys.records.tracking import MlflowTracking, WandbTracking, check_tracking_uri

_MOST_EXPERIMENT_CHARACTERS = 500
"""MLflow's own limit (``mlflow/utils/validation.py``)."""


@refuse_unknown_keywords
@dataclass(frozen=True)
class Mlflow:
    """MLflow 3 as the tracker of a step; see docs/tracking.md. Its image needs Python and ``tiphys[mlflow]``.

    Attributes:
        uri: URL of the tracking server, without credentials; empty: the variable MLFLOW_TRACKING_URI of the step.
        experiment: Name of the experiment; empty: the variable MLFLOW_EXPERIMENT_NAME, or else the name of the
            pipeline.
    """

    uri: str = ""
    experiment: str = ""

    def settings(self) -> MlflowTracking:
        """The settings that compile reads.

        Raises:
            UsageError: a value is not valid.
        """
        if self.uri:
            check_tracking_uri(self.uri, "Mlflow(uri=…): ")
        if len(self.experiment) > _MOST_EXPERIMENT_CHARACTERS or not self.experiment.isprintable():
            raise UsageError(
                f"Mlflow(experiment=…): write a name of at most {_MOST_EXPERIMENT_CHARACTERS} characters in one line, "
                f"not {self.experiment[:60]!r}"
            )
        return MlflowTracking(uri=self.uri, experiment=self.experiment)


@refuse_unknown_keywords
@dataclass(frozen=True)
class Wandb:
    """Weights & Biases as the tracker of a step; see docs/tracking.md.

    Attributes:
        project: Project; empty: the variable WANDB_PROJECT of the step, or the default of W&B.
        entity: User or team; empty: the variable WANDB_ENTITY of the step, or the default of the API key.
    """

    project: str = ""
    entity: str = ""

    def settings(self) -> WandbTracking:
        """The settings that compile reads."""
        return WandbTracking(project=self.project, entity=self.entity)
