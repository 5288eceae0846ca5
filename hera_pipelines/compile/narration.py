"""What Argo's pages show of a Workflow before anybody keeps it up to date, in place of a generated name."""

from collections.abc import Mapping

from tiphys.protocol.policy import DESCRIPTION_ANNOTATION, NARRATED_ANNOTATION, TITLE_ANNOTATION


def narrate(annotations: Mapping[str, str], pipeline: str, store: str) -> dict[str, str]:
    """``annotations`` with title and description, where the author gave none, and a note which of them are ours."""
    kept = f" Its steps and checkpoints are kept in `{store}`." if store else ""
    texts = {TITLE_ANNOTATION: pipeline, DESCRIPTION_ANNOTATION: f"Pipeline `{pipeline}`.{kept}"}
    ours = [name for name in texts if name not in annotations]
    if not ours:
        return dict(annotations)
    names = ",".join(name.rpartition("/")[2] for name in ours)
    return {**annotations, **{name: texts[name] for name in ours}, NARRATED_ANNOTATION: names}
