"""Finds verdicts in results, for tests of what the analysis says of them."""

from __future__ import annotations

from typing import Any

from results_factory import explained_run, make_curve, make_results, make_trial, steady_run
from vitscale.analysis import analyse
from vitscale.present.document import Finding
from vitscale.store.results import Results, Run
from vitscale.trial.trial import Trial

THREE = [0.1, 0.101, 0.099]
"""Step seconds of three repeats that agree."""
STEP = {"forward": 0.3, "backward": 0.6, "optimizer": 0.1}
"""The parts of an explained step on a rank that nobody waits for and that waits for nobody."""


def kinds(results: Results) -> list[str]:
    """Of all verdicts, in order."""
    return [one.kind for one in analyse(results).findings]


def verdict(results: Results, kind: str) -> Finding:
    """The one verdict of a kind."""
    found = [one for one in analyse(results).findings if one.kind == kind]
    assert len(found) == 1, kinds(results)
    return found[0]


def of_one_trial(trial: Trial, *runs: Run, **study: Any) -> Results:
    """A study of one trial."""
    return make_results([(make_curve([trial]), [trial])], runs, **({"repeats": len(runs)} | study))


def three_repeats(environments: list[Any] | None = None, gpus: int = 2, **rank_fields: Any) -> Results:
    """Three steady repeats of one trial."""
    trial = make_trial("ddp", gpus)
    runs = [steady_run(trial, s, r, environments=environments, **rank_fields) for r, s in enumerate(THREE)]
    return of_one_trial(trial, *runs)


def explained_study(
    *parts_by_rank: dict[str, Any],
    slowdown: float = 0.0,
    device: str = "cpu",
    script: str | None = None,
    **data: int | str,
) -> Results:
    """Three repeats of one trial, with explained steps of known parts; of a script, where one is named."""
    trial = make_trial("ddp" if script is None else "script", len(parts_by_rank), device=device, script=script)
    trial = trial.model_copy(update={"data": trial.data.model_copy(update=data)})
    return of_one_trial(
        trial, *(explained_run(trial, parts_by_rank, repeat=repeat, slowdown=slowdown) for repeat in range(3))
    )
