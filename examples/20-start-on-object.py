"""A pipeline that runs for each new file of a bucket, once, however often the bucket reports it.

The trigger takes effect in a WorkflowTemplate, and the controller must be allowed to
look at the bucket:

    helm upgrade tiphys charts/tiphys --reuse-values --set 'triggers.sources={s3://ml-raw/{namespace}}'
    tiphys compile examples/20-start-on-object.py --as workflowtemplate | kubectl apply -n ml -f -

Programs get the object as an argument or in the environment. A parameter belongs in
no text of a shell: who may write to the bucket chooses the name of the object.
"""

from hera.workflows import Artifact, Parameter

from hera_pipelines import Checkpoints, ObjectTrigger, Pipeline, Step, Train

with Pipeline(
    "on-object",
    store="s3://ml-runs/tiphys",
    arguments=[Parameter(name="source", value=""), Parameter(name="etag", value="")],
    trigger=ObjectTrigger("s3://ml-raw/ml/incoming/", pattern="*.csv", parameters={"source": "url", "etag": "etag"}),
) as pipeline:
    prepare = Step(
        name="prepare",
        image="ghcr.io/acme/digits:1.4",
        command=["python", "prepare.py"],
        args=["--source={{inputs.parameters.source}}", "--etag={{inputs.parameters.etag}}"],
        inputs=[Parameter(name="source"), Parameter(name="etag")],
        outputs=[Artifact(name="data", path="/tmp/data")],
    )
    fit = Train(
        name="fit",
        image="ghcr.io/acme/digits:1.4",
        command=["python", "train.py"],
        inputs=[Artifact(name="data", path="/tmp/data")],
        outputs=[Artifact(name="model", path="/tmp/model")],
        checkpoints=Checkpoints(every="10m", keep_last=3),
        grace="2m",
    )
    prepared = prepare(arguments={"source": pipeline.get_parameter("source"), "etag": pipeline.get_parameter("etag")})
    fit(arguments={"data": prepared.get_artifact("data")})
