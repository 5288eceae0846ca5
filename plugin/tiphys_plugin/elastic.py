"""How a gang ended that goes on when it loses members: by its first member, or by one more than it can spare.

What was lost before is no cause. A pod that was taken away leaves nothing, and
the others that cannot meet without the first fail by themselves; whether that
came first nobody can tell afterwards, but for the program's own word.
"""

from collections.abc import Sequence

from tiphys.lineage.classify import Observation
from tiphys.protocol.gang import Gang
from tiphys_plugin.cluster import PodStatus
from tiphys_plugin.gangs import TOLD_BY_ARGO, began, by_end_of, called


def elastic_observation(
    gang: Gang, fewest: int, found: Sequence[PodStatus], status: str, *, crashed: bool
) -> Observation:
    """What is known of the end; ``gang`` has as many members as were started, and needs ``fewest``.

    ``crashed``: the training program itself has left word that it failed.
    """
    if status in TOLD_BY_ARGO:
        return Observation(status=status, pod_seen=bool(found))
    ended = sorted((pod for pod in found if pod.phase == "Failed" or (pod.reason and not pod.finished)), key=began)
    if all(pod.rank != 0 for pod in found) and not crashed:
        return _without_the_first(gang, ended, status)
    if not ended:
        return Observation(status="Error", pod_seen=bool(found), pod_message="no pod of it tells how it ended")
    taken_away = gang.members - len(found)
    one_too_many = ended[max(0, gang.members - fewest - taken_away) :][:1]
    first = [pod for pod in ended if pod.rank == 0]
    return by_end_of(gang, min([*first, *one_too_many] or ended, key=began))


def _without_the_first(gang: Gang, ended: Sequence[PodStatus], status: str) -> Observation:
    if all(pod.reason for pod in ended):
        return Observation(status=status, pod_reason="Deleted", member=called(gang, "", 0))
    why = "its pod was taken away, and the others could not meet without it"
    return Observation(status="Error", pod_message=why, member=called(gang, "", 0))
