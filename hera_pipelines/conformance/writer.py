"""A process that claims what each line of its input names, and answers with the winner and whether it is listed."""

import json
import sys

from tiphys.errors import TiphysError
from tiphys.records import IdempotencyKeyRecord
from tiphys.store import Store, claim_record, open_store


def claim(store: Store, key: str, writer: str) -> dict[str, object]:
    """Claim ``key`` as ``writer``; what became of it."""
    try:
        found = claim_record(store, key, IdempotencyKeyRecord(run=writer, namespace="", content=key))
        return {"winner": found.record.run, "won": found.is_ours, "listed": [info.key for info in store.list(key)]}
    except TiphysError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    own_store = None
    for line in sys.stdin:
        # Not before: after Ctrl-C, one that is left and asked nothing must not make the folder anew.
        own_store = own_store or open_store(sys.argv[1])
        sys.stdout.write(json.dumps(claim(own_store, line.strip(), sys.argv[2])) + "\n")
        sys.stdout.flush()
