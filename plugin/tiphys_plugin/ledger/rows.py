"""The book as rows of SQLite: load all of it, store what changed.

Decisions read the whole book, and a thousand may wait. So a row that was seen
before gives the object that it gave then, which also tells at a glance what a
transition has left alone.
"""

import json
import sqlite3
from dataclasses import asdict
from datetime import datetime
from functools import lru_cache

from tiphys_plugin.ledger.book import Book
from tiphys_plugin.ledger.model import Lease, LeaseRequest, Leaving, Waiting
from tiphys_plugin.ledger.shares import Consumed

_KEPT = 8192


def load(connection: sqlite3.Connection) -> Book:
    """The book in the file; call it within a transaction."""
    leases = connection.execute(
        "SELECT id, request, pool, granted_at, check_at, nodes, leaving FROM leases ORDER BY rowid"
    )
    waiting = connection.execute("SELECT request, arrival, since, seen_at, promised_at FROM waiting ORDER BY arrival")
    history = connection.execute("SELECT queue, pool, gpus, at FROM history ORDER BY queue, pool")
    return Book(
        tuple(_lease(*row) for row in leases),
        tuple(_waiting(*row) for row in waiting),
        tuple(Consumed(queue, pool, gpus, datetime.fromisoformat(at)) for queue, pool, gpus, at in history),
    )


def store(connection: sqlite3.Connection, before: Book, after: Book) -> None:
    """Write the difference; what goes makes room first, because keys are unique."""
    _store_leases(connection, before, after)
    _store_waiting(connection, before, after)
    if after.history != before.history:
        connection.execute("DELETE FROM history")
        connection.executemany(
            "INSERT INTO history (queue, pool, gpus, at) VALUES (?,?,?,?)",
            [(one.queue, one.pool, one.gpus, one.at.isoformat()) for one in after.history],
        )


def _store_leases(connection: sqlite3.Connection, before: Book, after: Book) -> None:
    known, kept = {one.id: one for one in before.leases}, {one.id for one in after.leases}
    connection.executemany("DELETE FROM leases WHERE id=?", [(gone,) for gone in known.keys() - kept])
    connection.executemany(
        "INSERT INTO leases (id, uid, step, node, request, pool, granted_at, check_at, nodes, leaving)"
        " VALUES (?,?,?,?,?,?,?,?,?,?) ON CONFLICT (id) DO UPDATE SET node=excluded.node, request=excluded.request,"
        " check_at=excluded.check_at, nodes=excluded.nodes, leaving=excluded.leaving",
        [
            (
                one.id,
                *one.request.key,
                _text(one.request),
                one.pool,
                one.granted_at.isoformat(),
                one.check_at.isoformat(),
                json.dumps(one.nodes),
                _leaving_text(one.leaving),
            )
            for one in after.leases
            if known.get(one.id) is not one
        ],
    )


def _store_waiting(connection: sqlite3.Connection, before: Book, after: Book) -> None:
    known, kept = {one.arrival: one for one in before.waiting}, {one.arrival for one in after.waiting}
    connection.executemany("DELETE FROM waiting WHERE arrival=?", [(gone,) for gone in known.keys() - kept])
    connection.executemany(
        "INSERT INTO waiting (arrival, uid, step, node, request, since, seen_at, promised_at)"
        " VALUES (?,?,?,?,?,?,?,?) ON CONFLICT (arrival) DO UPDATE SET node=excluded.node, request=excluded.request,"
        " seen_at=excluded.seen_at, promised_at=excluded.promised_at",
        [
            (
                one.arrival,
                *one.request.key,
                _text(one.request),
                one.since.isoformat(),
                one.seen_at.isoformat(),
                one.promised_at.isoformat() if one.promised_at is not None else None,
            )
            for one in after.waiting
            if known.get(one.arrival) is not one
        ],
    )


def _text(request: LeaseRequest) -> str:
    # What nobody needs is not written, so that who knows no such field reads on.
    seldom = {"attained": 0.0, "first_start": None, "spot": "no", "min_members": None, "max_members": None}
    return json.dumps({name: value for name, value in asdict(request).items() if seldom.get(name, ...) != value})


def _leaving_text(leaving: Leaving | None) -> str | None:
    if leaving is None:
        return None
    said = {name: value for name, value in asdict(leaving).items() if value is not None}
    return json.dumps(said, default=datetime.isoformat)


def _leaving(text: str | None) -> Leaving | None:
    if text is None:
        return None
    said = json.loads(text)
    times = {name: datetime.fromisoformat(said[name]) for name in ("asked_at", "deadline")}
    return Leaving(**{**said, **times})


@lru_cache(maxsize=_KEPT)
def _request(text: str) -> LeaseRequest:
    return LeaseRequest(**json.loads(text))


@lru_cache(maxsize=_KEPT)
def _lease(
    identity: str, request: str, pool: str, granted_at: str, check_at: str, nodes: str, leaving: str | None
) -> Lease:
    return Lease(
        id=identity,
        request=_request(request),
        pool=pool,
        granted_at=datetime.fromisoformat(granted_at),
        check_at=datetime.fromisoformat(check_at),
        nodes=tuple(json.loads(nodes)),
        leaving=_leaving(leaving),
    )


@lru_cache(maxsize=_KEPT)
def _waiting(request: str, arrival: int, since: str, seen_at: str, promised_at: str | None) -> Waiting:
    return Waiting(
        request=_request(request),
        arrival=arrival,
        since=datetime.fromisoformat(since),
        seen_at=datetime.fromisoformat(seen_at),
        promised_at=datetime.fromisoformat(promised_at) if promised_at is not None else None,
    )
