"""The contenders: the Workflow that each one's user would write, with the same image and the same training."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.argo.workflows import ACCOUNT, EXECUTOR
from bench.beside import trainer
from hera.workflows import models

from hera_pipelines import Checkpoints, Pipeline, Train
from tiphys.protocol.compiled_workflow import Manifest

STORE_SECRET = "tiphys-store"
FOLDER = "/var/tmp/tiphys-beside"
_PROGRAM = Path(trainer.__file__).read_text()
_RETRY = {"retryStrategy": {"limit": "3", "retryPolicy": "Always"}}
_LOOP = 'for try in 1 2 3 4 5; do python -c "$PROGRAM" "$0" "$@" && exit 0; done; exit 1'


@dataclass(frozen=True)
class Case:
    """One trial: its name, which is also the prefix of its objects, and what its pods are given."""

    name: str
    image: str
    store: str
    bucket: str
    kills_in_save: bool = False

    @property
    def variables(self) -> dict[str, str]:
        kill = {"BESIDE_KILL_IN_SAVE": "1"} if self.kills_in_save else {}
        return {"BESIDE_BUCKET": self.bucket, "BESIDE_CASE": self.name, **kill}


@dataclass(frozen=True)
class Contender:
    """A way to survive failures.

    Attributes:
        words: What it is, for the table.
        compile: The Workflow of a case.
        checkpoints: Where its checkpoints are: ``disk``, ``bucket``, ``tiphys`` or nowhere.
        retries_by_hand: Whether a person calls `argo retry` when the Workflow has failed.
    """

    words: str
    compile: Callable[[Case], Manifest]
    checkpoints: str = ""
    retries_by_hand: bool = False


def _retry(case: Case) -> Manifest:
    return _single(case, {"container": _container(case, _python("scratch", 1, trainer.STEPS)), **_RETRY})


def _by_hand(case: Case) -> Manifest:
    return _single(case, {"container": _container(case, _python("scratch", 1, trainer.STEPS))})


def _memoize(case: Case) -> Manifest:
    half = trainer.STEPS // 2
    templates: list[Manifest] = [
        {
            "name": name,
            "container": _container(case, _python("scratch", first, last)),
            "outputs": {"artifacts": [_written(f"{case.name}/{name}.npy")]},
            "memoize": {
                "key": f"{case.name}-{name}",
                "maxAge": "1h",
                "cache": {"configMap": {"name": case.name}},
            },
            **_RETRY,
        }
        for name, first, last in (("first", 1, half), ("second", half + 1, trainer.STEPS))
    ]
    templates[1]["inputs"] = {"artifacts": [{"name": "weights", "path": "/tmp/before.npy", "mode": 0o644}]}
    weights = {"name": "weights", "from": "{{tasks.first.outputs.artifacts.weights}}"}
    second = {"name": "second", "template": "second", "depends": "first", "arguments": {"artifacts": [weights]}}
    main = {"name": "main", "dag": {"tasks": [{"name": "first", "template": "first"}, second]}}
    return _workflow(case, [main, *templates])


def _written(key: str) -> Manifest:
    return {"name": "weights", "path": "/tmp/after.npy", "archive": {"none": {}}, "s3": {"key": key}}


def _files(case: Case) -> Manifest:
    container = _container(case, ["sh", "-c", _LOOP, "files", f"/checkpoints/{case.name}"], PROGRAM=_PROGRAM)
    container |= {"securityContext": {"runAsUser": 0}, "volumeMounts": [_MOUNT]}
    return _single(case, {"container": container, "volumes": [_VOLUME], **_RETRY})


def _objects(case: Case) -> Manifest:
    container = _container(case, ["sh", "-c", _LOOP, "objects"], PROGRAM=_PROGRAM)
    return _single(case, {"container": container, **_RETRY})


def _tiphys(case: Case) -> Manifest:
    with Pipeline("beside", store=case.store, service_account_name=ACCOUNT) as pipeline:
        Train(
            name="train",
            image=case.image,
            image_pull_policy="IfNotPresent",
            command=_python("session"),
            env=[models.EnvVar(**variable) for variable in _env(case.variables)],
            checkpoints=Checkpoints(every=f"{trainer.EVERY} steps"),
        )()
    return pipeline.compile()


CONTENDERS = {
    "retry": Contender("`retryStrategy`", _retry),
    "memoize": Contender("`memoize`, two steps", _memoize),
    "by_hand": Contender("`argo retry` by hand", _by_hand, retries_by_hand=True),
    "files": Contender("folder on a disk, shell loop", _files, checkpoints="disk"),
    "objects": Contender("folder in S3, shell loop", _objects, checkpoints="bucket"),
    "tiphys": Contender("Tiphys", _tiphys, checkpoints="tiphys"),
}
_MOUNT = {"name": "checkpoints", "mountPath": "/checkpoints"}
_REMOVE = "import pathlib, shutil; [shutil.rmtree(path) for path in pathlib.Path('/checkpoints').iterdir()]"
_VOLUME = {"name": "checkpoints", "hostPath": {"path": FOLDER, "type": "DirectoryOrCreate"}}


def tidy(case: Case) -> Manifest:
    """A Workflow that deletes the folders of all cases on the node."""
    container = _container(case, ["python", "-c", _REMOVE])
    container |= {"securityContext": {"runAsUser": 0}, "volumeMounts": [_MOUNT]}
    return _single(case, {"container": container, "volumes": [_VOLUME]})


def _python(*arguments: object) -> list[str]:
    return ["python", "-c", _PROGRAM, *map(str, arguments)]


def _env(variables: Mapping[str, str]) -> list[dict[str, Any]]:
    pod = {"name": "BESIDE_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    return [*({"name": name, "value": value} for name, value in variables.items()), pod]


def _container(case: Case, command: list[str], **variables: str) -> Manifest:
    return {
        "image": case.image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "env": _env({**case.variables, **variables}),
        "envFrom": [{"secretRef": {"name": STORE_SECRET, "optional": True}}],
    }


def _single(case: Case, template: Manifest) -> Manifest:
    return _workflow(case, [{"name": "main", **template}])


def _workflow(case: Case, templates: list[Manifest]) -> Manifest:
    assert "{{" not in _PROGRAM, "Argo would replace it"
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"generateName": f"{case.name}-"},
        "spec": {
            "entrypoint": "main",
            "serviceAccountName": ACCOUNT,
            "automountServiceAccountToken": False,
            "executor": {"serviceAccountName": EXECUTOR},
            "templates": json.loads(json.dumps(templates)),
        },
    }
