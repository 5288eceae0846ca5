"""The workflow's end: finalize, beside the author's own exit handler."""

from hera_pipelines.compile import names
from hera_pipelines.compile.gated import listed
from hera_pipelines.compile.operations import Identity, finalize_template
from tiphys.protocol.pipeline import Manifest


def exit_templates(manifest: Manifest, identity: Identity) -> list[Manifest]:
    """Make finalize the exit handler of ``manifest`` and return the templates that takes.

    An author's handler runs in the same group of steps, so neither can keep the
    other from running, and its failure still fails the workflow.
    """
    spec = manifest["spec"]
    handler = _authors_handler(manifest)
    finalize = finalize_template(identity)
    if handler is None:
        spec["onExit"] = names.FINALIZE
        return [finalize]
    spec["onExit"] = names.EXIT
    group = [handler, {"name": "finalize", "template": names.FINALIZE}]
    return [{"name": names.EXIT, "steps": [group]}, finalize]


def _authors_handler(manifest: Manifest) -> Manifest | None:
    spec = manifest["spec"]
    hook = (spec.get("hooks") or {}).pop("exit", None)
    if not spec.get("hooks"):
        spec.pop("hooks", None)
    # Where both are given, Argo runs onExit and never the hook.
    if template := spec.get("onExit"):
        return _step(template, _workflow_arguments(manifest, template))
    if hook is None:
        return None
    step = {field: hook[field] for field in ("template", "templateRef", "arguments") if hook.get(field)}
    return {"name": "handler", **step}


def _step(template: str, arguments: Manifest) -> Manifest:
    return {"name": "handler", "template": template, **({"arguments": arguments} if arguments else {})}


def _workflow_arguments(manifest: Manifest, template: str) -> Manifest:
    """What Argo would have handed to an exit handler itself: the workflow's parameters of the same names."""
    known = {p["name"] for p in listed(manifest["spec"], "arguments", "parameters")}
    handler: Manifest = next((t for t in manifest["spec"]["templates"] if t.get("name") == template), {})
    wanted = [p["name"] for p in listed(handler, "inputs", "parameters") if p["name"] in known]
    values = [{"name": name, "value": f"{{{{workflow.parameters.{name}}}}}"} for name in wanted]
    return {"parameters": values} if values else {}
