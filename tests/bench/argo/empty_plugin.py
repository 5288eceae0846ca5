"""A plugin that answers at once and does nothing: what plugin nodes cost, whoever answers them.

In mode ``sidecar`` it is an executor plugin beside that of Tiphys. In mode ``agent`` Argo starts no executor plugins,
so this process answers the task sets, as the agent of Tiphys does; that one leaves foreign plugins alone.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from bench.argo.installation import Installation
from bench.argo.workflows import EMPTY_PLUGIN

from argo.settings import Mode
from tiphys.errors import NotFoundError
from tiphys.kube import ListSnapshot, Object, watch_objects
from tiphys.kube.resources import CONFIG_MAPS, WORKFLOW_TASK_SETS

_PORT = 7299
_NOTICED_SECONDS = 2.0
"""For Argo's controller to see that the plugin came, or went."""
_SERVER = f"""
import http.server, json, os, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        ours = '{EMPTY_PLUGIN}' in asked['template']['plugin']
        answer = json.dumps(dict(node=dict(phase='Succeeded')) if ours else dict()).encode()
        self.send_response(200)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(('', {_PORT}), Handler).serve_forever()
"""


@contextmanager
def answered(here: Installation) -> Iterator[None]:
    """While this lasts, nodes of the plugin `EMPTY_PLUGIN` succeed at once."""
    with _sidecar(here) if here.settings.mode is Mode.SIDECAR else _agent(here):
        yield


def executor_plugin(image: str) -> Object:
    """The ConfigMap by which Argo knows the plugin."""
    container = {
        "name": EMPTY_PLUGIN,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", _SERVER],
        "ports": [{"containerPort": _PORT}],
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"cpu": "1", "memory": "64Mi"}},
        "securityContext": {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    labels = {"workflows.argoproj.io/configmap-type": "ExecutorPlugin"}
    return {
        "metadata": {"name": f"{EMPTY_PLUGIN}-executor-plugin", "labels": labels},
        "data": {"sidecar.automountServiceAccountToken": "false", "sidecar.container": yaml.safe_dump(container)},
    }


def open_nodes(task_set: Object) -> list[str]:
    """Ids of the plugin's nodes that have no answer yet."""
    answers = (task_set.get("status") or {}).get("nodes") or {}
    tasks = (task_set.get("spec") or {}).get("tasks") or {}
    return [node for node, task in tasks.items() if EMPTY_PLUGIN in (task.get("plugin") or {}) and node not in answers]


@contextmanager
def _sidecar(here: Installation) -> Iterator[None]:
    namespace, plugin = here.settings.namespace, executor_plugin(here.settings.image)
    here.api.create(CONFIG_MAPS, namespace, plugin)
    try:
        time.sleep(_NOTICED_SECONDS)
        yield
    finally:
        here.api.delete(CONFIG_MAPS, namespace, plugin["metadata"]["name"])
        time.sleep(_NOTICED_SECONDS)


@contextmanager
def _agent(here: Installation) -> Iterator[None]:
    stop = threading.Event()
    threading.Thread(target=_answer_task_sets, args=(here, stop), daemon=True).start()
    try:
        yield
    finally:
        stop.set()


def _answer_task_sets(here: Installation, stop: threading.Event) -> None:
    namespace = here.settings.namespace
    events = watch_objects(here.api, WORKFLOW_TASK_SETS, namespace, sleep=stop.wait, should_stop=stop.is_set)
    for event in events:
        for task_set in event.objects if isinstance(event, ListSnapshot) else [event.object]:
            if found := open_nodes(task_set):
                answer: dict[str, Any] = {"status": {"nodes": {node: {"phase": "Succeeded"} for node in found}}}
                try:
                    name = task_set["metadata"]["name"]
                    here.api.patch(WORKFLOW_TASK_SETS, namespace, name, answer, subresource="status")
                except NotFoundError:
                    continue
