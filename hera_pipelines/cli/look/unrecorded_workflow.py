"""Makes a run of a Workflow that no service recorded, so that `tiphys resume` continues it.

The first call that a service answers records the run of a Workflow. An outage that lasts longer than Argo asks leaves a
Workflow that has failed, and no run. It may have finished steps, but no record says so, and none is made up.
"""

import shlex

from hera_pipelines.cli.shared_options import ClusterOptions
from tiphys.errors import ConflictError, NotFoundError, UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, read_workflow_parameters
from tiphys.protocol.execute_api import WorkflowMetadata
from tiphys.protocol.phases import is_final_workflow_phase
from tiphys.protocol.step_spec import SUBMISSION_PARAMETER
from tiphys.records import make_run_name
from tiphys.store import Store, read_run
from tiphys.store.runs import check_name_free_of_leftovers


def find_unrecorded(store: Store, run: str) -> NotFoundError | None:
    """The error that says that the store has no run of this name, and what to do; None if it has one."""
    try:
        read_run(store, run)
    except NotFoundError as error:
        hint = f"`{shlex.join(['tiphys', 'resume', run, '--cluster'])}` takes up a Workflow of this name that an outage"
        why = f"`{shlex.join(['tiphys', 'why', run])}` shows what one waits for that has not begun"
        return NotFoundError(f"{error}; {hint} kept from being recorded, and {why}")
    return None


def adopt_workflow(store: Store, name: str, options: ClusterOptions, *, dry_run: bool) -> str:
    """Record the run of a Workflow that has ended, as its first call would have; returns the name of the run.

    With ``dry_run`` it checks all, and writes nothing.

    Raises:
        NotFoundError: the cluster has no such Workflow.
        ConflictError: it has not ended, or the run of this name belongs to another Workflow, or is partly deleted.
        UsageError: Tiphys did not compile it, or its store is another one.
        StoreError: store or API server does not answer.
    """
    # Imported here, because only this path of the command needs the plugin and the Kubernetes client.
    from tiphys_controller.submit.authored_facts import check_authored_name
    from tiphys_plugin.cluster.kubernetes_cluster import KubernetesCluster

    from tiphys.kube import identify_cluster
    from tiphys.recording.run_binding import bind_workflow, submitted_manifest

    api = options.connect()
    cluster = KubernetesCluster(api, None, identify_cluster(api))
    if (found := cluster.workflow(api.namespace, name)) is None:
        raise NotFoundError(
            f"neither has {store.url} a run {name!r}, nor namespace {api.namespace} of cluster {cluster.name} a "
            "Workflow of this name; check the name, the store, and the namespace (-n)"
        )
    place, phase = f"Workflow {api.namespace}/{name}", (found.get("status") or {}).get("phase", "")
    pipeline = CompiledPipeline.from_manifest(submitted_manifest(found))
    if pipeline.store.rstrip("/") not in ("", store.url.rstrip("/")):
        raise UsageError(
            f"{place} is of the store {pipeline.store}, and this is {store.url}; give that one with --store"
        )
    if not is_final_workflow_phase(phase):
        raise ConflictError(
            f"{place} has not ended ({phase or 'no phase'}), and the next call that a service answers records its run; "
            f"wait for it, or end it first: `argo stop -n {api.namespace} {name}`"
        )
    authored = check_authored_name(pipeline, None)
    check_name_free_of_leftovers(store, authored or make_run_name(name))
    if dry_run:
        return authored or make_run_name(name)
    uid = found["metadata"]["uid"]
    submission = read_workflow_parameters(pipeline.manifest).get(SUBMISSION_PARAMETER, "")
    return bind_workflow(
        store,
        cluster,
        WorkflowMetadata(name=name, namespace=api.namespace, uid=uid),
        authored,
        submission,
    ).run
