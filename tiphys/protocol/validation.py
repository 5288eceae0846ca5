"""Describes documents that do not fit their pydantic model in one sentence, for queue files and annotations."""

import inspect
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tiphys.errors import unknown_name_message


def describe_mistake(error: ValidationError, model: type[BaseModel], document: str) -> str:
    """Name one mistake in a document: ``queues.0 has no key 'gpu'; did you mean 'gpus'? …``.

    An unknown key comes first, because it is often a missing key with a spelling mistake.

    ``document`` has the words for the document itself, which has no path.
    """
    mistake = _first_mistake(error)
    *parents, key = mistake["loc"] or (document,)
    if mistake["type"] == "extra_forbidden":
        owner = ".".join(map(str, parents)) or document
        return unknown_name_message(owner, "key", str(key), _model_at(model, parents).model_fields)
    return f"{'.'.join(map(str, (*parents, key)))}: {mistake['msg'].removeprefix('Value error, ')}"


def locate_mistake(error: ValidationError) -> tuple[int | str, ...]:
    """Path of the mistake that `describe_mistake` names."""
    return _first_mistake(error)["loc"]


def _first_mistake(error: ValidationError) -> ErrorDetails:
    mistakes = error.errors(include_url=False)
    return next((m for m in mistakes if m["type"] == "extra_forbidden"), mistakes[0])


def _model_at(model: type[BaseModel], path: list[Any]) -> type[BaseModel]:
    """The model of the part of the document at ``path``, whose keys are fields, list indexes or keys of mappings."""
    for part in path:
        if part in model.model_fields:
            model = next(_models_in(model.model_fields[part].annotation), model)
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
