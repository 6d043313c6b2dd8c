"""Backups of a store, and stores moved from one place to another.

In: the address of a store, or a document. Out: the document (`{"srtm_store": 3, "documents": {key: value}}`), or the
store. Reading disturbs nobody; writing takes the lead, so it waits for no controller and interrupts none.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from srtm.control.keeping import sqlite
from srtm.control.keeping.address import keeping
from srtm.control.keeping.bucket import Bucket
from srtm.control.keeping.keeper import TOKENS, Leader, key
from srtm.errors import ClientError, ControlError, InputError

if TYPE_CHECKING:
    from srtm.control.keeping.address import StoreAddress

FORMAT = 3
_FIELD = "srtm_store"
_LEAD_S = 6.0  # longer than a lease
_TAKES = 500  # documents in one write
_ABSENT = 404


async def exported(store: StoreAddress) -> dict[str, Any]:
    """All documents of a store, which controllers may be using."""
    if store.servers is None:
        if store.folder is None:
            raise InputError("a store in memory cannot be exported; give its address, as in sqlite:FOLDER")
        found = await asyncio.to_thread(sqlite.snapshot, store.folder)
    else:
        try:
            found = await Bucket(store.servers, store.bucket).load()
        except ClientError as problem:
            absent = problem.facts.get("code") == _ABSENT
            why = f"{store} has no bucket {store.bucket!r}" if absent else str(problem)
            raise ControlError(f"cannot read the store: {why}") from None
    documents = {name: msgspec.json.decode(value) for name, value in sorted(found.items())}
    return {_FIELD: FORMAT, "documents": documents}


def read(text: bytes, name: str) -> dict[str, bytes]:
    """The documents in an exported file; InputError if it is something else."""
    try:
        found = msgspec.json.decode(text)
        if found[_FIELD] != FORMAT:
            raise InputError(f"{name} has format {found[_FIELD]!r}, but this version of SRTM reads format {FORMAT}")
        return {str(name): msgspec.json.encode(value) for name, value in found["documents"].items()}
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as problem:
        raise InputError(f"{name} is not an exported store ({problem!r}); write one with srtm store export") from None


async def imported(store: StoreAddress, documents: dict[str, bytes], *, force: bool = False) -> int:
    """Replace the contents of a store that no controller uses; returns how many documents it had before.

    ControlError if a controller uses it, InputError if it is not empty, unless `force` says so, or if it cannot keep
    the tokens among the documents.
    """
    tokens = [name for name in documents if name.startswith(key(TOKENS, ""))]
    if tokens and store.shared:
        raise InputError(
            f"controllers that share a store cannot check its {len(tokens):,} tokens; remove them first (srtm token"
            " rm), and give all controllers SRTM_TOKEN"
        )
    place = keeping(store)
    try:
        async with asyncio.timeout(_LEAD_S):
            keeper = await place.lead(Leader("srtm store import", ""))
    except TimeoutError:
        leader = place.leader
        user = f"the controller at {leader.url} uses it" if leader else "its servers do not answer"
        raise ControlError(f"cannot write to {store}: {user}; stop all controllers first") from None
    finally:
        await place.close()
    try:
        before = keeper.read()
        if before and not force:
            raise InputError(f"{store} is not empty: it has {len(before):,} documents; replace them with --force")
        changes: dict[str, bytes | None] = {**dict.fromkeys(before), **documents}
        names = list(changes)
        for at in range(0, len(names), _TAKES):
            keeper.write({name: changes[name] for name in names[at : at + _TAKES]})
            await keeper.committed()
        if not keeper.shared:
            keeper.guarded = bool(tokens)
    finally:
        await keeper.release()
    return len(before)
