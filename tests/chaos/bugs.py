"""Planted bugs of consistency, which the campaign must find: each changes one rule of the product."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

from support.fakes.memory_store import MemoryStore
from tiphys_controller import cleanup
from tiphys_controller.plan import step_state
from tiphys_controller.submit import idempotency, resume, submission
from tiphys_plugin.operations import admit, end_attempt, lease_reclaim
from tiphys_plugin.quota.ledger import transitions
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger

from tiphys.checkpoint.restore.candidates import RestoreCandidates
from tiphys.checkpoint.save import commit, commit_policy
from tiphys.checkpoint.save.saver import Saver
from tiphys.errors import ObjectExistsError, StoreError
from tiphys.lineage import select
from tiphys.lineage.retention import delete
from tiphys.store import RunLayout, claims, run_markers


class Plant:
    """Changes names of the product until it is pulled out."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace one name of a module or class."""
        self._undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def everywhere(self, function: Any, value: Any) -> None:
        """Replace a function in every module that imported it."""
        for name, module in sorted(sys.modules.items()):
            if name.startswith("tiphys"):
                for attribute, found in list(vars(module).items()):
                    if found is function:
                        self.set(module, attribute, value)

    def pull_out(self) -> None:
        """Undo all changes."""
        while self._undo:
            setattr(*self._undo.pop())


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Have the product the bug ``name``; empty for none."""
    plant = Plant()
    try:
        if name:
            BUGS[name](plant)
        yield
    finally:
        plant.pull_out()


def manifest_before_shards(plant: Plant) -> None:
    """The manifest is created before the shards that it names."""

    def manifest_first(store: Any, draft: Any, shards: Any, check_fence: Any, uploads: Any = None) -> Any:
        aside = MemoryStore()
        manifest = commit_checkpoint(aside, draft, shards, check_fence, uploads)
        for key in sorted(aside.objects):  # manifests/ sorts before shards/
            with contextlib.suppress(ObjectExistsError):
                store.create(key, aside.objects[key])
        return manifest

    commit_checkpoint = commit.commit_checkpoint
    plant.set(commit_policy, "commit_checkpoint", manifest_first)


def no_fence(plant: Plant) -> None:
    """A commit does not look whether its attempt has ended."""
    plant.set(commit.AttemptFence, "check", lambda self: None)


def fence_before_upload(plant: Plant) -> None:
    """The fence is checked before the upload, which takes minutes."""

    def early(store: Any, draft: Any, shards: Any, check_fence: Any, uploads: Any = None) -> Any:
        check_fence()
        return commit_checkpoint(store, draft, shards, lambda: None, uploads)

    commit_checkpoint = commit.commit_checkpoint
    plant.set(commit_policy, "commit_checkpoint", early)


def lost_race_counts_as_won(plant: Plant) -> None:
    """Whoever meets the claim of another takes its own for the stored one."""

    def claim_record(store: Any, key: str, record: Any) -> Any:
        with contextlib.suppress(ObjectExistsError):
            store.create(key, record.to_bytes())
        return claims.ClaimResult(record, is_ours=True)

    plant.everywhere(claims.claim_record, claim_record)


def refused_write_counts_as_done(plant: Plant) -> None:
    """An error of storage at the manifest is taken for a lost answer."""

    def claim_record(store: Any, key: str, record: Any) -> Any:
        try:
            return original(store, key, record)
        except StoreError:
            return claims.ClaimResult(record, is_ours=True)

    original = claims.claim_record
    plant.set(commit, "claim_record", claim_record)


def told_before_commit(plant: Plant) -> None:
    """The program is told of a commit before the manifest exists."""

    def run_job(self: Any, job: Any) -> None:
        job.save.end(job.draft.ref)
        original(self, job)

    original = Saver._run_job
    plant.set(Saver, "_run_job", run_job)


def failed_upload_ignored(plant: Plant) -> None:
    """A shard that could not be stored does not fail the save."""

    def store_shard(*given: Any) -> None:
        with contextlib.suppress(StoreError):
            original(*given)

    original = commit._store_shard
    plant.set(commit, "_store_shard", store_shard)


def deletion_not_announced(plant: Plant) -> None:
    """A deletion is not announced, so that a pin may come too late and nobody notices."""
    plant.set(delete.Tombstones, "announce_deletion", lambda self, refs: refs)


def shards_deleted_first(plant: Plant) -> None:
    """Retention deletes shards before the manifest that names them."""

    def shards_first(self: Any, due: Any, starts_from: Any, protected: Any) -> Any:
        for ref in due:
            self._remove_shards(ref)
            self._store.delete(self._layout.manifest(ref.attempt, ref.global_step))
        return due

    plant.set(delete.Retention, "_delete", shards_first)


def one_kept_too_few(plant: Plant) -> None:
    """Retention keeps one checkpoint less than the policy says."""

    def init(self: Any, store: Any, lineage: str, keep: Any, **given: Any) -> None:
        original(self, store, lineage, keep and keep.model_copy(update={"last": keep.last - 1}), **given)

    original = delete.Retention.__init__
    plant.set(delete.Retention, "__init__", init)


def pins_ignored(plant: Plant) -> None:
    """Retention does not look for pins."""
    plant.set(delete, "list_pins", lambda *_: {})


def all_shards_are_orphans(plant: Plant) -> None:
    """Retention takes the shards of older checkpoints for those of saves that failed."""

    def list_orphans(self: Any, plan: Any) -> Any:
        newest = max(map(delete.age_key, plan.snapshot.commits), default=(0, 0))
        found = ((info, self._layout.parse_shard(info.key)) for info in self._store.list(self._layout.all_shards))
        return [info for info, ref in found if ref is not None and delete.age_key(ref) < newest]

    plant.set(delete.Retention, "list_orphans", list_orphans)


def late_commit_is_candidate(plant: Plant) -> None:
    """The next attempt starts from the highest step, whoever committed it and when."""
    plant.set(select, "iter_candidates", lambda commits, *_: iter(sorted(commits, key=lambda ref: -ref.global_step)))


def newest_commit_skipped(plant: Plant) -> None:
    """The start of the next attempt is chosen from a listing without its first row."""

    def iter_commits(*given: Any) -> Any:
        return itertools.islice(original(*given), 1, None)

    original = select.iter_commits
    plant.set(select, "iter_commits", iter_commits)


def older_checkpoint_restored(plant: Plant) -> None:
    """A restore begins with the second-best checkpoint."""

    def iter_newest_first(self: Any) -> Any:
        candidates = list(original(self))
        return iter(candidates[1:] or candidates)

    original = RestoreCandidates.iter_newest_first
    plant.set(RestoreCandidates, "iter_newest_first", iter_newest_first)


def pods_not_awaited(plant: Plant) -> None:
    """An attempt is ended while its pods run."""
    plant.set(end_attempt, "await_pods", lambda *_: None)


def conflict_in_ledger_ignored(plant: Plant) -> None:
    """A replica that loses the race for the ledger takes its grant for stored."""

    def write(self: Any, version: Any, after: Any) -> bool:
        original(self, version, after)
        return True

    original = KubernetesLedger._write
    plant.set(KubernetesLedger, "_write", write)


def live_lease_reclaimed(plant: Plant) -> None:
    """Leases of trainings that run are taken for abandoned."""
    plant.set(lease_reclaim, "is_lease_abandoned", lambda *_, **__: True)


def release_frees_all(plant: Plant) -> None:
    """The release of one lease releases those of other steps."""

    def release(state: Any, lease: str, *given: Any) -> Any:
        return replace(original(state, lease, *given), leases=())

    original = transitions.release
    plant.set(transitions, "release", release)


def lease_released_with_request(plant: Plant) -> None:
    """The GPUs of an attempt are given back before it is looked for its pods."""

    def await_pods(call: Any, attempt: Any, pod_statuses: Any) -> Any:
        end_attempt.release_lease(call, attempt)
        return original(call, attempt, pod_statuses)

    original = end_attempt.await_pods
    plant.set(end_attempt, "await_pods", await_pods)


def running_workflow_ignored(plant: Plant) -> None:
    """A resume does not look whether the last Workflow still runs."""

    def choose(last: Any, live: Any, cluster: str, namespace: str, force: bool) -> Any:
        return original(last, live, cluster, namespace, True)

    original = submission.choose_next_submission
    plant.everywhere(original, choose)


def key_not_reserved(plant: Plant) -> None:
    """A start under an idempotency key does not look who else has reserved it."""

    def claim_record(store: Any, key: str, record: Any) -> Any:
        with contextlib.suppress(ObjectExistsError):
            store.create(key, record.to_bytes())
        return claims.ClaimResult(record, is_ours=True)

    plant.set(idempotency, "claim_record", claim_record)
    plant.set(idempotency, "find_record", lambda *_: None)


def second_name_after_lost_answer(plant: Plant) -> None:
    """A Workflow whose creation was not answered is created again under another name."""

    def create(store: Any, submitter: Any, claimed: Any, manifest: Any) -> Any:
        try:
            return original(store, submitter, claimed, manifest)
        except StoreError:
            renamed = {**manifest, "metadata": {**manifest["metadata"], "name": f"{manifest['metadata']['name']}-b"}}
            return submitter.create(renamed)

    original = submission._create_workflow
    plant.set(submission, "_create_workflow", create)


def unsent_claim_passed_over(plant: Plant) -> None:
    """A submission that was claimed and not sent is left behind, and the next number is taken."""

    def choose(last: Any, *given: Any) -> Any:
        if last is not None:
            return submission.NextSubmission(last.claim.submission + 1, "ml")
        return original(last, *given)

    original = resume.choose_next_submission
    plant.set(resume, "choose_next_submission", choose)


def claim_of_other_node_used(plant: Plant) -> None:
    """An admit that finds the attempt opened by another node starts its own pod for it."""
    plant.set(admit, "_is_own_claim", lambda *_: True)


def claim_before_marker(plant: Plant) -> None:
    """A submission is claimed before the marker that leads to it is there."""

    def open_submission(store: Any, claim: Any) -> Any:
        claimed = claims.claim_record(store, RunLayout(claim.run).submission(claim.submission), claim)
        original(store, claim)
        return claimed

    original = run_markers.open_submission
    plant.everywhere(original, open_submission)


def marker_closed_before_end(plant: Plant) -> None:
    """The marker of a submission is deleted before its end is recorded."""

    def end_submission(store: Any, end: Any, **given: Any) -> Any:
        run_markers.close_submission(store, end.run, end.submission)
        return original(store, end, **given)

    original = run_markers.end_submission
    plant.everywhere(original, end_submission)


def marker_of_claim_under_way_removed(plant: Plant) -> None:
    """The janitor does not wait for the claim that follows a marker."""
    plant.set(cleanup, "UNSENT_AFTER", timedelta(0))


def earlier_key_forgotten(plant: Plant) -> None:
    """A resume under a key knows only of the last submission which key it had."""

    def find(store: Any, run_plan: Any, request: Any) -> Any:
        last = replace(run_plan.state, submissions=run_plan.state.submissions[-1:])
        return original(store, run_plan._replace(state=last), request)

    original = resume._find_earlier_result
    plant.set(resume, "_find_earlier_result", find)


def fenced_attempt_counts_as_done(plant: Plant) -> None:
    """A resume leaves out a step whose last attempt has any end."""
    plant.set(step_state, "_state_from_end", lambda end, _: step_state._done_state(end.attempt))


def late_release_frees_successor(plant: Plant) -> None:
    """The release of a lease that is gone releases what its run holds by now."""

    def release(state: Any, lease: str, *given: Any) -> Any:
        runs.update({held.id: held.request.run for held in state.leases})
        kept = tuple(held for held in state.leases if held.request.run != runs.get(lease))
        return replace(original(state, lease, *given), leases=kept)

    runs: dict[str, str] = {}
    original = transitions.release
    plant.set(transitions, "release", release)


BUGS: dict[str, Callable[[Plant], None]] = {
    function.__name__: function
    for function in (
        manifest_before_shards,
        no_fence,
        fence_before_upload,
        lost_race_counts_as_won,
        refused_write_counts_as_done,
        told_before_commit,
        failed_upload_ignored,
        deletion_not_announced,
        shards_deleted_first,
        one_kept_too_few,
        pins_ignored,
        all_shards_are_orphans,
        late_commit_is_candidate,
        newest_commit_skipped,
        older_checkpoint_restored,
        pods_not_awaited,
        conflict_in_ledger_ignored,
        live_lease_reclaimed,
        release_frees_all,
        lease_released_with_request,
        running_workflow_ignored,
        key_not_reserved,
        second_name_after_lost_answer,
        unsent_claim_passed_over,
        claim_of_other_node_used,
        claim_before_marker,
        marker_closed_before_end,
        marker_of_claim_under_way_removed,
        earlier_key_forgotten,
        fenced_attempt_counts_as_done,
        late_release_frees_successor,
    )
}
