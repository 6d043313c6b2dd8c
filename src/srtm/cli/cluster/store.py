"""`srtm store`: backups of the controllers' state, and its way from one kind of store to another."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from srtm.cli.common import AsJson, many, print_json
from srtm.cli.help import App
from srtm.errors import InputError

app = App("Back up, restore or move the controllers' state.")

_Store = Annotated[
    str,
    typer.Option(
        envvar="SRTM_STORE",
        metavar="ADDRESS",
        help="Store: sqlite:FOLDER, or nats://HOST:PORT,…/BUCKET",
        show_default=False,
    ),
]


@app.command("export")
def export(
    store: _Store,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write", show_default="standard output")
    ] = None,
) -> None:
    """Write all documents of a store as one JSON document.

    Controllers may go on using the store. The file has everything that they know, and hashes of tokens, so protect it.

    Examples:
        srtm store export --store sqlite:data --out backup.json
        srtm store export --store nats://127.0.0.1:4222/srtm > backup.json
    """
    import asyncio

    from srtm.control.keeping.address import parse
    from srtm.control.keeping.moving import exported

    text = json.dumps(asyncio.run(exported(parse(store))), indent=1, ensure_ascii=False) + "\n"
    if out is None:
        sys.stdout.write(text)
        return
    try:
        with os.fdopen(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
    except OSError as problem:
        raise InputError(f"--out: cannot write {out}: {problem.strerror}") from None


@app.command("import")
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="File of srtm store export, or - for standard input")],
    store: _Store,
    force: Annotated[bool, typer.Option("--force", help="Replace what the store holds")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the documents of an exported file to a store that no controller uses.

    Stop the controllers first; brokers continue meanwhile, and notice nothing if controllers are back within the
    brokers' lease (30 s).

    Examples:
        srtm store import backup.json --store nats://127.0.0.1:4222/srtm
    """
    import asyncio

    from srtm.control.keeping.address import parse
    from srtm.control.keeping.moving import imported, read

    try:
        text = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as problem:
        raise InputError(f"cannot read {file}: {problem.strerror}") from None
    address, documents = parse(store), read(text, file)
    replaced = asyncio.run(imported(address, documents, force=force))
    if as_json:
        print_json({"store": str(address), "documents": len(documents), "replaced": replaced})
    else:
        more = f", replacing {many(replaced, 'document')}" if replaced else ""
        print(f"{address}: imported {many(len(documents), 'document')}{more}")
