"""Runs in a pod of the benchmark, in the place of the main container of Argo's agent pod.

As Argo's agent does, it watches the task set of one workflow, posts each task
to the sidecar beside it from 16 threads, and patches the answers. Argo patches
at a fixed rate (ARGO_AGENT_PATCH_RATE, 10 s by default); this patches at once,
so what is measured is the least that sidecar mode can take.
"""

import json
import os
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tiphys.kube import ListSnapshot, PatchType, watch_objects
from tiphys.kube.kubeconfig import connect_in_cluster
from tiphys.kube.resources import WORKFLOW_TASK_SETS

WORKERS, TRIES = 16, 60
URL = "http://localhost:7243/api/v1/template.execute"


class PodAgent:
    def __init__(self) -> None:
        self.api = connect_in_cluster(Path("/var/run/secrets/kubernetes.io/serviceaccount"))
        self.name = os.environ["ARGO_WORKFLOW_NAME"]
        uid = os.environ["ARGO_WORKFLOW_UID"]
        self.workflow = {"metadata": {"name": self.name, "namespace": self.api.namespace, "uid": uid}}
        self.token = Path("/var/run/argo/token").read_text()
        self.answers: dict[str, Any] = {}
        self.changed = threading.Condition()

    def run(self) -> None:
        threading.Thread(target=self.patch, daemon=True).start()
        considered: set[str] = set()
        with ThreadPoolExecutor(WORKERS) as pool:
            for node, template in self.tasks():
                if node not in considered:
                    considered.add(node)
                    pool.submit(self.answer, node, template)

    def tasks(self) -> Any:
        fields = f"metadata.name={self.name}"
        for event in watch_objects(self.api, WORKFLOW_TASK_SETS, self.api.namespace, fields=fields, sleep=time.sleep):
            for found in event.objects if isinstance(event, ListSnapshot) else [event.object]:
                yield from (found.get("spec") or {}).get("tasks", {}).items()

    def answer(self, node: str, template: Any) -> None:
        found = self.post(json.dumps({"workflow": self.workflow, "template": template}).encode())
        with self.changed:
            self.answers[node] = found
            self.changed.notify()

    def post(self, body: bytes) -> Any:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        for _ in range(TRIES):
            try:
                with urllib.request.urlopen(urllib.request.Request(URL, body, headers), timeout=30) as answer:
                    return json.loads(answer.read())["node"]
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        return {"phase": "Failed", "message": "the sidecar did not answer"}

    def patch(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.answers)
                taken, self.answers = self.answers, {}
            body = {"status": {"nodes": taken}}
            self.api.patch(WORKFLOW_TASK_SETS, self.api.namespace, self.name, body, PatchType.MERGE, "status")


if __name__ == "__main__":
    PodAgent().run()
