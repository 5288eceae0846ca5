"""Keys of the records below `RunLayout.tracking`, and the listing of a run's registrations."""

from itertools import islice
from typing import NamedTuple

from tiphys.errors import IntegrityError
from tiphys.records import ModelVersionRecord, Record, RegistrationRequest, check_step_id
from tiphys.store import DamagedRecord, RunLayout, Store, find_record, read_record
from tiphys.store.attempt_ends import check_record_identity

_SUFFIX, _DONE = ".json", ".done.json"
MAX_REGISTRATIONS = 100
"""Registrations of a run that are read; a program could write any number."""


class Registration(NamedTuple):
    """A model that a step registers. ``done`` is None while that is not complete in MLflow."""

    id: str
    request: RegistrationRequest
    done: ModelVersionRecord | None

    def report(self) -> "RegistrationReport":
        """The registration for people."""
        request = self.request
        return RegistrationReport(
            step=request.step,
            model=request.model,
            alias=request.alias,
            source=f"{request.source_run}/{request.source_step}, attempt {request.source_attempt}, {request.output}",
            model_version=self.done.model_version if self.done else "",
        )


class RegistrationReport(Record):
    """A registration as commands show it."""

    step: str
    model: str
    alias: str
    source: str
    """The attempt and the output that it comes from."""
    model_version: str
    """Version in MLflow; empty while the registration is pending."""


def tracking_run_key(run: str, step: str) -> str:
    """Key of the `TrackingRunRecord` of a step; of the parent of all steps if ``step`` is empty."""
    return f"{RunLayout(run).tracking}{f'steps/{check_step_id(step)}' if step else 'parent'}.json"


def registration_key(run: str, step: str, registration: str) -> str:
    """Key of a `RegistrationRequest`."""
    return f"{_registrations(run)}{check_step_id(step)}/{registration}.json"


def registration_done_key(run: str, step: str, registration: str) -> str:
    """Key of the `ModelVersionRecord` of a request."""
    return registration_key(run, step, registration).removesuffix(_SUFFIX) + _DONE


def list_registrations(store: Store, run: str, damaged: list[DamagedRecord] | None = None) -> list[Registration]:
    """The first `MAX_REGISTRATIONS` registrations of a run, by step and in the order of their requests.

    With ``damaged``, each damaged record is added to it and left out.

    Raises:
        IntegrityError: a record is damaged.
        StoreError: storage did not answer.
    """
    found: list[Registration] = []
    # Programs write there, so what they list is bounded, too: a request and its end for each registration.
    listed = islice(store.list(_registrations(run)), 4 * MAX_REGISTRATIONS)
    for key in islice((info.key for info in listed if _is_request(info.key)), MAX_REGISTRATIONS):
        stem = key.removesuffix(_SUFFIX)
        try:
            request = read_record(store, key, RegistrationRequest)
            check_record_identity(store, key, request, run=run, step=stem.split("/")[-2])
            done = find_record(store, f"{stem}{_DONE}", ModelVersionRecord)
        except IntegrityError as error:
            if damaged is None:
                raise
            damaged.append(DamagedRecord(key, str(error)))
            continue
        found.append(Registration(stem.rpartition("/")[2], request, done))
    return sorted(found, key=lambda registration: (registration.request.step, registration.request.written_at))


def _is_request(key: str) -> bool:
    return key.endswith(_SUFFIX) and not key.endswith(_DONE)


def _registrations(run: str) -> str:
    return f"{RunLayout(run).tracking}models/"
