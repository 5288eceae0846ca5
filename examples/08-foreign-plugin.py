"""An executor plugin of another project beside steps of Tiphys; compile leaves its body unchanged."""

from hera.workflows import DAG, Parameter
from hera.workflows.models import ValueFrom

from hera_pipelines import Pipeline, PluginTemplate, Step

with Pipeline("foreign-plugin", entrypoint="main") as pipeline:
    score = Step(
        name="score",
        image="ghcr.io/acme/digits:1.4",
        command=["python", "score.py"],
        outputs=[Parameter(name="score", value_from=ValueFrom(path="/tmp/score"))],
    )
    tell = PluginTemplate(
        name="tell",
        inputs=[Parameter(name="score")],
        body={"slack": {"channel": "#training", "text": "score {{inputs.parameters.score}}"}},
    )
    with DAG(name="main"):
        scored = score()
        tell(arguments=scored.get_parameter("score"))
