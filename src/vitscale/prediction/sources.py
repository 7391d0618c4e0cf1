"""What a prediction from a results folder reads: the folder itself, and a check of the network it ran on."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

from vitscale import store
from vitscale.analysis import Analysis
from vitscale.errors import RequestError, shown
from vitscale.prediction.evidence import Evidence, gather
from vitscale.prediction.network.checked import network_of
from vitscale.prediction.network.links import declared_link
from vitscale.store import checks
from vitscale.store.checks import CheckRecord
from vitscale.store.results import Results
from vitscale.trial import model_cost
from vitscale.trial.model_spec import ModelSpec


def evidence_of(
    folder: Path, results: Results, analysis: Analysis, *, declared: str | None = None, check: Path | None = None
) -> Evidence:
    """What the results of a folder say, with the network as it was declared or checked.

    Args:
        folder: the results folder, for the checks in it.
        results: its records.
        analysis: of them.
        declared: the link between hosts by name or figures ("25GbE"); it takes the place of a checked one. "check":
            that one, which must be there.
        check: a stored check to take the network from. None: the newest of the results folder; where it has none, the
            newest of the user's own that ran on the very hosts of the results.

    Raises:
        RequestError: the declared network is none that is known, or a check is asked for and there is none.
        StoreError: `check` cannot be read.
    """
    record = checks.read_check(check) if check is not None else _found(folder, results)
    if declared == "check" and record is None:
        raise RequestError(
            "--network check: there is no check of the hosts of these results",
            next_step=f"Run vitscale check --hostfile HOSTS -o {shown(str(folder))}, or say --network 25GbE",
        )
    link = None if declared in (None, "check") else declared_link(declared)
    found = gather(analysis, network_of(record, link), _loader(record))
    resolved = tuple(one for one in found.series if all(_is_resolved(point.trial.model) for point in one.points))
    return replace(found, series=resolved)


def _is_resolved(spec: ModelSpec) -> bool:
    """As every study of this program is; a folder that something else wrote may leave shapes open, to be counted by
    nothing here.
    """
    try:
        model_cost.parameters(spec)
    except ValueError:
        return False
    return True


def _loader(record: CheckRecord | None) -> float | None:
    """Images per second of one rank's data loader alone: of the median rank."""
    rates = [rank.loader.images_per_second for rank in record.ranks if rank.loader] if record is not None else []
    return statistics.median(rates) if rates else None


def _found(folder: Path, results: Results) -> CheckRecord | None:
    own = checks.load_checks(checks.check_folder(store.folder_of(folder))).records
    hosts = {rank.start.environment.host for run in results.runs for rank in run.ranks if rank.start is not None}
    return own[0] if own else checks.latest(None, tuple(sorted(hosts))) if hosts else None
