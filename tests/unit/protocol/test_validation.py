"""One sentence for a document that does not fit its model.

| mistake                        | named                                         |
|--------------------------------|-----------------------------------------------|
| an unknown key                 | the key, the nearest known one, the known ones |
| an unknown key, a missing one  | the unknown key                               |
| a wrong value                  | its path, and the rule                        |
| a rule of the model            | the rule, without a prefix                    |
"""

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from tiphys.protocol.validation import describe_mistake


class Wheel(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int
    spokes: int = 36


class Car(BaseModel):
    model_config = ConfigDict(extra="forbid")
    wheels: list[Wheel] = []
    spare: Wheel | None = None
    by_side: dict[str, tuple[Wheel, ...]] = {}

    @model_validator(mode="after")
    def check_wheels(self) -> "Car":
        if len(self.wheels) > 4:
            raise ValueError("a car has at most 4 wheels")
        return self


WHEEL_KEYS = "It has: size, spokes"


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"wheel": []}, "the car has no key 'wheel'; did you mean 'wheels'? It has: wheels, spare, by_side"),
        ({"wheels": [{"sizes": 3}]}, f"wheels.0 has no key 'sizes'; did you mean 'size'? {WHEEL_KEYS}"),
        ({"spare": {"size": 1, "spoke": 3}}, f"spare has no key 'spoke'; did you mean 'spokes'? {WHEEL_KEYS}"),
        ({"by_side": {"l": [{"size": 1, "x": 3}]}}, "by_side.l.0 has no key 'x'; it has: size, spokes"),
        ({"wheels": [{"size": "big"}]}, "wheels.0.size: Input should be a valid integer, unable to parse string"),
        ({"wheels": [{"size": 1}] * 5}, "the car: a car has at most 4 wheels"),
    ],
)
def test_the_mistake_is_named_with_its_place(document: object, sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Car.model_validate(document)

    assert describe_mistake(caught.value, Car, "the car").startswith(sentence)
