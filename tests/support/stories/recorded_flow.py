"""A Workflow of a plugin under test: a test writes its nodes, and makes the calls of its plugin nodes."""

import json
from typing import Any

from support.fakes.argo_workflow import RUN, ArgoWorkflow, claim_submission
from support.stories.plugin import Flow, World
from tiphys.protocol.execute_api import ExecuteReply
from tiphys.records import AttemptEnd
from tiphys.store import read_step_attempts


class RecordedFlow:
    """``argo`` has the nodes, `store` writes them into the cluster, and ``flow`` calls the plugin."""

    def __init__(self, here: World, argo: ArgoWorkflow) -> None:
        self.here, self.argo = here, argo
        specs = tuple(argo.specs)
        self.flow = Flow(here, argo.name, argo.uid, run=RUN, submission=str(argo.submission), specs=specs)
        self.store()

    def store(self, root: str = "Running", **status: Any) -> None:
        """Argo stores the Workflow; ``root`` is the phase of its own node."""
        document = json.loads(json.dumps(self.argo.manifest))
        node = {"name": self.argo.name, "displayName": self.argo.name, "type": "DAG", "phase": root}
        document["status"]["nodes"][self.argo.name] = node
        document["status"] |= status
        self.here.cluster.write_workflow(document)

    def finish(self, data: bytes = b"1,2,3", step: str = "prep") -> dict[str, Any]:
        """Run a step well to its end; its artifact, as Argo passes it on."""
        self.argo.start(step)
        self.argo.finish(step, {"rows": "3"}, {"data": data})
        return self.artifact(step)

    def artifact(self, step: str = "prep") -> dict[str, Any]:
        return {"name": "data", "path": "/in", "s3": {"key": self.artifact_key(step)}}

    def artifact_key(self, step: str = "prep") -> str:
        return self.here.store.artifact_key(f"{self.argo.folder(step)}data")

    def finalize(self, status: str = "Succeeded") -> ExecuteReply:
        """The call of the exit handler, with what Argo lists as failed."""
        failed = [node for node in self.argo.nodes.values() if node["phase"] in ("Failed", "Error")]
        listed = [
            {field: node.get(field, "") for field in ("displayName", "templateName", "message")} for node in failed
        ]
        return self.flow.finalize(status, json.dumps(json.dumps(listed)) if listed else '"null"')

    def end(self, step: str = "prep", attempt: int = 1) -> AttemptEnd:
        end = read_step_attempts(self.here.store, RUN, step)[attempt - 1].end
        assert end is not None
        return end

    def admit(self, step: str = "train", *artifacts: dict[str, Any]) -> ExecuteReply:
        return self.flow.admit(step, artifacts=list(artifacts))

    def resumed(self) -> "RecordedFlow":
        """The next submission, which takes nothing over."""
        argo = self.argo.resumed()
        claim_submission(self.here.store, argo.submission, argo.name)
        return RecordedFlow(self.here, argo)
