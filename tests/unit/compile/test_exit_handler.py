"""finalize runs at the end, and keeps nobody else from running."""

from typing import Any

from support.builders.authored_workflows import by_name, parameters, plain, step, task, workflow

from hera_pipelines.compile import compile_workflow
from tiphys.protocol.compiled_workflow import Manifest


def ended(*templates: Manifest, **spec: Any) -> Manifest:
    return compile_workflow(workflow(step(), *templates, tasks=[task("prep")], **spec))


TIMERS = [
    {"name": "wake", "template": "tiphys-wake"},
    {"name": "wake-again", "template": "tiphys-wake", "depends": "wake"},
]


def exit_tasks(manifest: Manifest) -> list[Manifest]:
    return by_name(manifest)["tiphys-exit"]["dag"]["tasks"]  # type: ignore[no-any-return]


def test_finalize_is_the_exit_handler() -> None:
    manifest = ended()

    assert manifest["spec"]["onExit"] == "tiphys-exit"
    assert exit_tasks(manifest) == [{"name": "finalize", "template": "tiphys-finalize"}, *TIMERS]


def test_the_authors_exit_handler_runs_beside_finalize() -> None:
    manifest = ended(plain("bye"), onExit="bye")

    assert manifest["spec"]["onExit"] == "tiphys-exit"
    assert exit_tasks(manifest) == [
        {"name": "handler", "template": "bye"},
        {"name": "finalize", "template": "tiphys-finalize"},
        *TIMERS,
    ]


def test_the_authors_handler_still_gets_the_workflows_parameters() -> None:
    manifest = ended(plain("bye", inputs=parameters("lr", "own")), onExit="bye", arguments=parameters("lr", "other"))

    handler = exit_tasks(manifest)[0]
    assert handler["arguments"] == {"parameters": [{"name": "lr", "value": "{{workflow.parameters.lr}}"}]}


def test_an_exit_hook_becomes_the_handler_and_other_hooks_stay() -> None:
    hooks = {
        "exit": {"template": "bye", "arguments": {"parameters": [{"name": "a", "value": "1"}]}},
        "running": {"template": "bye", "expression": "workflow.status == 'Running'"},
    }
    manifest = ended(plain("bye"), hooks=hooks)

    assert set(manifest["spec"]["hooks"]) == {"running"}
    assert exit_tasks(manifest)[0] == {
        "name": "handler",
        "template": "bye",
        "arguments": {"parameters": [{"name": "a", "value": "1"}]},
    }


def test_an_exit_hook_beside_an_exit_handler_stays_unused_as_in_argo() -> None:
    manifest = ended(plain("bye"), plain("hook"), onExit="bye", hooks={"exit": {"template": "hook"}})

    assert "hooks" not in manifest["spec"]
    assert exit_tasks(manifest)[0]["template"] == "bye"
