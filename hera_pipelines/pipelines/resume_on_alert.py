"""Resume by Argo's own events, for an Alertmanager that calls argo-server and not the controller of Tiphys.

Alertmanager posts to ``/api/v1/events/NAMESPACE/tiphys-resume``; the binding has
Argo submit a Workflow that resumes the run which the alert names. Unlike the
controller it keeps no brakes of its own: an alert that fires again resumes again.
"""

from hera.workflows import Container, Env, Parameter, SecretEnvFrom, WorkflowTemplate, models

from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import STORE_SECRET

NAME = "tiphys-resume"
"""Name of both objects, of the account, and the discriminator of the event."""
_KEPT_SECONDS = 24 * 60 * 60
_MODULE = "tiphys_controller.kubernetes.resume_once"


def resume_template(image: str, store: str) -> Manifest:
    """The WorkflowTemplate that resumes the run given as parameter ``run``.

    Its account ``tiphys-resume`` is that of ``templates/events/account.yaml``.

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
        name=NAME,
        entrypoint="resume",
        arguments=parameters,
        service_account_name=NAME,
        active_deadline_seconds=600,
        # Each delivery makes a Workflow, and an alert is delivered again and again while it fires.
        ttl_strategy=models.TTLStrategy(seconds_after_completion=_KEPT_SECONDS),
    ) as made:
        Container(
            name="resume",
            image="{{workflow.parameters.image}}",
            command=["python", "-m", _MODULE],
            args=[*arguments, "--key={{workflow.parameters.key}}"],
            env=[Env(name="HOME", value="/tmp")],  # noqa: S108  the only folder of the image that can be written
            env_from=[SecretEnvFrom(name=STORE_SECRET, optional=True)],
        )
    built: Manifest = made.to_dict()
    return built


def resume_binding(alert: str) -> Manifest:
    """The WorkflowEventBinding that submits `resume_template` for each delivery about ``alert`` that fires.

    The run is the label ``tiphys_run``, by which Alertmanager has to group.
    """
    fires = f'discriminator == "{NAME}" && payload.status == "firing" && payload.commonLabels.alertname == "{alert}"'
    given = {
        "run": "payload.commonLabels.tiphys_run",
        # One submission for each time that it began to fire, however often that is delivered.
        "key": 'payload.alerts[0].fingerprint + "/" + payload.alerts[0].startsAt',
    }
    binding = models.WorkflowEventBinding(
        api_version="argoproj.io/v1alpha1",
        kind="WorkflowEventBinding",
        metadata=models.ObjectMeta(name=NAME),
        spec=models.WorkflowEventBindingSpec(
            event=models.Event(selector=fires),
            submit=models.Submit(
                workflow_template_ref=models.WorkflowTemplateRef(name=NAME),
                arguments=models.Arguments(
                    parameters=[
                        models.Parameter(name=name, value_from=models.ValueFrom(event=expression))
                        for name, expression in given.items()
                    ]
                ),
            ),
        ),
    )
    built: Manifest = binding.model_dump(mode="json", by_alias=True, exclude_none=True)
    return built
