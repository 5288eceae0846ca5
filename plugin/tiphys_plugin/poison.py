"""An end that tells of a checkpoint: what the attempt died of, and whether that bars what it had loaded.

The quarantine is written before the end. A crash between the two repeats the
judgement, from the same records; an end without its quarantine would send the
next attempt to its death.
"""

from tiphys.lineage.quarantine import quarantine
from tiphys.lineage.suspects import death_of, suspect
from tiphys.records import AttemptClaim, AttemptEnd, CrashRecord, Outcome
from tiphys.store import step_attempts
from tiphys_plugin.services import StepCall

DECIDER = "settle"
"""Who is named in the quarantine."""


def judged(call: StepCall, claim: AttemptClaim, end: AttemptEnd, crash: CrashRecord | None) -> AttemptEnd:
    """``end`` with what it says about a checkpoint; one that it made suspect is quarantined by then.

    ``crash`` is what the program left about its end.
    """
    if end.outcome is not Outcome.FAILED or not claim.lineage:
        return end
    death = death_of(claim, end.cause, end.exit_code, crash, progress=end.progress)
    told = f"{end.message} ({crash.error})" if crash and death else end.message
    end = end.model_copy(update={"death": death, "message": told})
    if death is None:
        return end
    settings = call.services.settings
    earlier = [a for a in step_attempts(call.store, call.run, call.step) if a.claim.attempt < claim.attempt]
    found = suspect(earlier, end, settings.suspect_deaths, settings.suspect_steps)
    if found is None:
        return end
    ref = found.checkpoint
    if not call.volume:  # which is out of sight from here; there the training program goes by the end itself
        quarantine(call.store, ref, found.reason, by=DECIDER)
    message = f"{told}; checkpoint {ref.global_step} of attempt {ref.attempt} is quarantined, since {found.reason}"
    return end.model_copy(update={"suspect": ref, "message": message})
