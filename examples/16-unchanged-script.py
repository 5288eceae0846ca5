"""A script that knows nothing of Tiphys: `tiphys-exec` commits the checkpoints that it writes to its folder.

After a preemption the folder is as it was at the newest complete checkpoint, so
the script's own way to resume, here `--resume auto`, finds it.
"""

from hera.workflows import Artifact, Parameter

from hera_pipelines import Checkpoints, Pipeline, Train

with Pipeline(
    "unchanged-script", store="s3://ml-runs/tiphys", arguments=[Parameter(name="epochs", value="30")]
) as pipeline:
    fit = Train(
        name="fit",
        image="ghcr.io/acme/legacy-trainer:7.3",  # with tiphys installed beside the script
        command=["tiphys-exec", "--dir", "/ckpt", "--marker", "epoch-*/DONE", "--"],
        args=["python", "train.py", "--out", "/ckpt", "--resume", "auto", "--epochs={{inputs.parameters.epochs}}"],
        inputs=[Parameter(name="epochs")],
        outputs=[Artifact(name="model", path="/ckpt/final")],
        gpus=1,
        checkpoints=Checkpoints(keep_last=2, save_time="1m"),
        grace="3m",
    )
    fit(epochs=pipeline.get_parameter("epochs"))
