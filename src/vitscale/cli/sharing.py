"""The verb that makes results a file to send: export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from vitscale.cli.base import JsonOption, ResultsArgument, VerboseOption, answer, app, option


@app.command()
def export(
    results: ResultsArgument,
    output: Annotated[Path, option("-o --output", "FILE", "The bundle.")] = Path("bundle.tar.gz"),
    redact: Annotated[
        bool, option("--redact", "", "Without names of hosts and users, paths, addresses and values of variables.")
    ] = False,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """A results folder as one checksummed file for a paper or an issue; every verb reads it."""
    import hashlib

    from vitscale import store
    from vitscale.present.document import Document, Paragraph
    from vitscale.present.units import size
    from vitscale.store.bundles import write_bundle

    study = store.load(results).study  # refuses what no verb could read again
    files = write_bundle(store.folder_of(results), output, redact=redact)
    with output.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()

    def fields() -> dict[str, Any]:
        of_file = {"bundle": str(output), "bytes": output.stat().st_size, "sha256": digest}
        return of_file | {"study": study.name, "redacted": redact, "files": dict(files)}

    def document() -> Document:
        what = f"{output}: {len(files)} files of {study.name}, {size(output.stat().st_size)}, SHA-256 {digest}"
        told = "Its texts may still tell of you in words: look into it, then send it." if redact else ""
        return Document("", (Paragraph(what),), (told,) if told else ())

    answer("export", fields, document, json=json, verbose=verbose)
