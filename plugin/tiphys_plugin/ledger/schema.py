"""Tables of the ledger, and how an older file becomes a current one.

``PRAGMA user_version`` counts the steps already taken; each step runs in one
transaction with its count, so that a crash repeats it whole.
"""

import sqlite3
from pathlib import Path

from tiphys.errors import StoreError

_STEPS = (
    # 1: ``uid, step, node`` is the replay key; ``request`` is a LeaseRequest as JSON.
    (
        """CREATE TABLE leases (
            id TEXT PRIMARY KEY,
            uid TEXT NOT NULL, step TEXT NOT NULL, node TEXT NOT NULL,
            request TEXT NOT NULL,
            pool TEXT NOT NULL,
            granted_at TEXT NOT NULL,
            check_at TEXT NOT NULL,
            UNIQUE (uid, step, node)
        ) STRICT""",
        """CREATE TABLE waiting (
            arrival INTEGER PRIMARY KEY AUTOINCREMENT,
            uid TEXT NOT NULL, step TEXT NOT NULL, node TEXT NOT NULL,
            request TEXT NOT NULL,
            since TEXT NOT NULL,
            seen_at TEXT NOT NULL,
            UNIQUE (uid, step, node)
        ) STRICT""",
    ),
    # 2: what leases that are over have left in the means of their queues; a LeaseRequest may have ``seconds``.
    (
        """CREATE TABLE history (
            queue TEXT NOT NULL, pool TEXT NOT NULL,
            gpus REAL NOT NULL,
            at TEXT NOT NULL,
            PRIMARY KEY (queue, pool)
        ) STRICT""",
    ),
    # 3: nodes of the members as JSON, and a Leaving as JSON; a LeaseRequest may have ``members`` and
    # ``attained`` with ``first_start``.
    (
        "ALTER TABLE leases ADD COLUMN nodes TEXT NOT NULL DEFAULT '[]'",
        "ALTER TABLE leases ADD COLUMN leaving TEXT",
    ),
    # 4: a LeaseRequest may have ``spot``, and the pool of a lease may be a flavor; when who waits was promised GPUs.
    ("ALTER TABLE waiting ADD COLUMN promised_at TEXT",),
)


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the file at ``path`` to the current tables.

    Raises:
        StoreError: a newer version of Tiphys made the file.
    """
    if connection.execute("PRAGMA user_version").fetchone()[0] == len(_STEPS):
        return  # nobody has to wait for those who write
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > len(_STEPS):
            raise StoreError(
                f"the GPU ledger {path} has format {version}, this Tiphys knows up to {len(_STEPS)}; upgrade Tiphys"
            )
        for statements in _STEPS[version:]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(_STEPS)}")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
