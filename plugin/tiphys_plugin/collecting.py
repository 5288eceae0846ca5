"""How often a service looks for objects that only hold each other.

Hardly anything here does, and what is looked at each time is a book of thousands
of entries, and all that libraries have loaded.
"""

import gc

_NEW_OBJECTS = 10_000
"""So many come before a look at the young ones: one walk along the line makes thousands, and drops them at its end."""
_FULL_COLLECTION = 1000
"""So many collections of younger objects come before one that looks at everything: boto3 alone has loaded so much
that it holds up every call for 60 ms, and the documents of a few hundred steps are enough to bring it about."""


def collect_seldom() -> None:
    """Have this process collect garbage as seldom as is good for a service."""
    gc.set_threshold(_NEW_OBJECTS, gc.get_threshold()[1], _FULL_COLLECTION)
