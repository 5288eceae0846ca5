"""Resume on an alert by Argo's own events, for an Alertmanager that calls argo-server and not the controller.

Alertmanager posts to ``/api/v1/events/NAMESPACE/tiphys-resume``. The binding makes
Argo submit a Workflow that resumes the run of the alert. Unlike the controller it
has no back-off and no circuit breaker: each firing of the alert resumes again.
"""

from hera.workflows import Container, Env, Parameter, SecretEnvFrom, WorkflowTemplate, models

from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import EXECUTOR_ACCOUNT

RESUME_OBJECT_NAME = "tiphys-resume"
"""Name of both objects, of the account, and the discriminator of the event."""
CONTROL_SECRET = "tiphys-control"  # noqa: S105  the name of a Secret
"""Credentials that write records of runs. No namespace with training programs may hold them."""
_WORKFLOW_TTL_SECONDS = 24 * 60 * 60
_MODULE = "tiphys_controller.kubernetes.resume_once"


def resume_template(image: str, store: str) -> Manifest:
    """The WorkflowTemplate that resumes the run given as parameter ``run``.

    ``templates/events/account.yaml`` defines its service account ``tiphys-resume``. It
    writes records of the run, so it belongs into a namespace without training programs.

    Args:
        image: Image of the controller.
        store: URL of the run store.
    """
    parameters = [
        Parameter(name="run"),
        Parameter(name="key", value=""),
        Parameter(name="image", value=image),
        Parameter(name="store", value=store),
    ]
    arguments = ["{{workflow.parameters.run}}", "--store={{workflow.parameters.store}}"]
    with WorkflowTemplate(
        name=RESUME_OBJECT_NAME,
        entrypoint="resume",
        arguments=parameters,
        service_account_name=RESUME_OBJECT_NAME,
        executor=models.ExecutorConfig(service_account_name=EXECUTOR_ACCOUNT),
        active_deadline_seconds=600,
        # Each delivery creates a Workflow, and Alertmanager repeats the delivery while the alert fires.
        ttl_strategy=models.TTLStrategy(seconds_after_completion=_WORKFLOW_TTL_SECONDS),
    ) as template:
        Container(
            name="resume",
            image="{{workflow.parameters.image}}",
            command=["python", "-m", _MODULE],
            args=[*arguments, "--key={{workflow.parameters.key}}"],
            env=[Env(name="HOME", value="/tmp")],  # noqa: S108  the only folder of the image that can be written
            env_from=[SecretEnvFrom(name=CONTROL_SECRET, optional=True)],
        )
    built: Manifest = template.to_dict()
    return built


def resume_binding(alert: str) -> Manifest:
    """The WorkflowEventBinding that submits `resume_template` for each delivery of the firing alert ``alert``.

    The label ``tiphys_run`` names the run, so Alertmanager must group by it.
    """
    fires = (
        f'discriminator == "{RESUME_OBJECT_NAME}" && payload.status == "firing" && '
        f'payload.commonLabels.alertname == "{alert}"'
    )
    parameters = {
        "run": "payload.commonLabels.tiphys_run",
        # One submission per start of the alert, however often Alertmanager repeats the delivery.
        "key": 'payload.alerts[0].fingerprint + "/" + payload.alerts[0].startsAt',
    }
    binding = models.WorkflowEventBinding(
        api_version="argoproj.io/v1alpha1",
        kind="WorkflowEventBinding",
        metadata=models.ObjectMeta(name=RESUME_OBJECT_NAME),
        spec=models.WorkflowEventBindingSpec(
            event=models.Event(selector=fires),
            submit=models.Submit(
                workflow_template_ref=models.WorkflowTemplateRef(name=RESUME_OBJECT_NAME),
                arguments=models.Arguments(
                    parameters=[
                        models.Parameter(name=name, value_from=models.ValueFrom(event=expression))
                        for name, expression in parameters.items()
                    ]
                ),
            ),
        ),
    )
    built: Manifest = binding.model_dump(mode="json", by_alias=True, exclude_none=True)
    return built
