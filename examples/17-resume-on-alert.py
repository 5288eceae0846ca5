"""A training that an alert restarts when it hangs, and that goes on by itself after failures from outside.

The controller resumes the run after a preemption, a lost node or a deleted Workflow.
A hang ends nothing, so the alert TiphysTrainingStalled has to: with the rule

    helm upgrade tiphys charts/tiphys --reuse-values --set alerts.rules.TiphysTrainingStalled=save-and-restart

the training saves, ends, and starts again from that checkpoint. The alert sees the
steps that the program reports, on the port that `metrics` opens.
"""

from hera.workflows import Artifact

from hera_pipelines import AutoResume, Checkpoints, Pipeline, Train

with Pipeline(
    "on-alert",
    store="s3://ml-runs/tiphys",
    auto_resume=AutoResume(max_without_progress=3, cooldown="2m", retry_after="2h"),
) as pipeline:
    fit = Train(
        name="fit",
        image="ghcr.io/acme/digits:1.4",
        command=["python", "train.py"],
        outputs=[Artifact(name="model", path="/tmp/model")],
        checkpoints=Checkpoints(every="10m", keep_last=3, save_time="20s", metrics="port:9464"),
        grace="2m",
    )
    fit()
