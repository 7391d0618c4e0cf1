"""One self-contained HTML file: no network, works from a file, everything a user could have written escaped."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vitscale.analysis import Analysis
from vitscale.prediction.results import Forecast
from vitscale.report import detail_tables, prediction_words, style, words
from vitscale.report.comparison_tables import comparison_tables
from vitscale.report.drawing import vega_lite_version
from vitscale.report.prediction_table import prediction_tables, shared_notes
from vitscale.report.resolutions import resolution_table
from vitscale.report.tables import mode_tables, trial_title
from vitscale.report.traffic_table import traffic_table
from vitscale.store import write_whole

if TYPE_CHECKING:
    from vitscale.report.figure import Figure

_HERE = Path(__file__).parent
_LONGEST_DETAIL = 20_000


def write_html(analysis: Analysis, path: Path, outlook: Forecast | None = None) -> None:
    """Writes the page whole.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(path, to_html(analysis, outlook))


def to_html(analysis: Analysis, outlook: Forecast | None = None) -> str:
    """The page as text; with a section on what is predicted, where something is."""
    from vitscale.report.charts import figures  # altair takes half a second to import

    drawn = figures(analysis, outlook)
    return rendered(
        "page.html",
        drawn,
        study=analysis.study,
        headlines=words.headlines(analysis),
        counts=_counts(analysis),
        warnings=[verdict for verdict in analysis.findings if verdict.severity == "warning"],
        notes=[verdict for verdict in analysis.findings if verdict.severity != "warning"],
        sections=_sections(analysis, drawn),
        time=_time(analysis, [figure for figure in drawn if figure.section == "time"]),
        resources=_resources(analysis, [figure for figure in drawn if figure.section == "resources"]),
        accuracy=_accuracy(analysis, [figure for figure in drawn if figure.section == "accuracy"]),
        prediction=_prediction(outlook, [figure for figure in drawn if figure.section == "prediction"]),
        startup_figures=[figure for figure in drawn if figure.section == "start-up"],
        comparisons=comparison_tables(analysis),
        equality=words.equality(analysis),
        certainty=" ".join(filter(None, [words.multiplicity(analysis), words.scope(analysis)])),
        failures=_failures(analysis),
        environment=_environment(analysis),
        problems=analysis.problems,
    )


def rendered(template: str, drawn: Sequence[Figure], **content: Any) -> str:
    """A page of ours with these charts in it; everything in `content` is escaped where the template shows it."""
    data = _json_for_script(
        {"charts": {f.name: f.spec for f in drawn}, "themes": {"light": style.LIGHT, "dark": style.DARK}}
    )
    scripts = [_library(), (_HERE / "page.js").read_text(encoding="utf-8")] if drawn else []
    templates = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return templates.get_template(template).render(
        css=Markup((_HERE / "page.css").read_text(encoding="utf-8")),  # noqa: S704  # our own file
        policy=_policy(scripts),
        scripts=[Markup(script) for script in scripts],  # noqa: S704  # our own file and the library
        data=data,
        **content,
    )


@functools.cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script that sets `vegaEmbed`."""
    import vl_convert

    library = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=vega_lite_version())
    # In a script element "</script" ends the script and "<!--" starts a comment, wherever they stand.
    return library.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _json_for_script(content: Any) -> Markup:
    """JSON that cannot leave its script element: no "<", ">" or "&" in it but as \\u escapes."""
    text = json.dumps(content, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704  # escaped above


def _policy(scripts: list[str]) -> str:
    """A content security policy: our scripts by their hash and no other, nothing from anywhere.

    Vega compiles its expressions, which needs 'unsafe-eval'; it compiles our own charts only.
    """
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    script_source = f"{allowed} 'unsafe-eval'" if scripts else "'none'"
    return f"default-src 'none'; script-src {script_source}; style-src 'unsafe-inline'; img-src data: blob:"


def _counts(analysis: Analysis) -> str:
    trials = list(analysis.trials.values())
    completed = sum(1 for trial in trials if trial.outcome == "completed")
    waiting = sum(1 for trial in trials if trial.outcome is None)
    runs = sum(trial.runs_done for trial in trials)
    parts = [f"{completed} of {len(trials)} trials completed", f"{runs} run{'s' if runs != 1 else ''}"]
    if failed := len(trials) - completed - waiting:
        parts.insert(1, f"{failed} did not complete")
    if waiting:
        parts.insert(-1, f"{waiting} not run yet")
    return ", ".join(parts)


def _sections(analysis: Analysis, drawn: list[Figure]) -> list[dict[str, Any]]:
    return [
        {
            "id": table.mode,
            "title": words.MODE_TITLES[table.mode],
            "meaning": words.MODE_MEANINGS[table.mode],
            "table": table,
            "figures": [figure for figure in drawn if figure.mode == table.mode and figure.section == "scaling"],
        }
        for table in mode_tables(analysis)
    ]


def _time(analysis: Analysis, figures: list[Figure]) -> dict[str, Any] | None:
    """Where the time goes; None where no trial has run."""
    if not any(trial.runs for trial in analysis.trials.values()):
        return None
    tables = [detail_tables.four_figures(analysis), detail_tables.parts_table(analysis), traffic_table(analysis)]
    explained = any(trial.breakdown for trial in analysis.trials.values())
    remarks = ["" if explained else "No step was explained, so its parts are unknown.", words.explaining_cost(analysis)]
    return {
        "remarks": [remark for remark in (*remarks, *words.unexplained(analysis)) if remark],
        "figures": [figure for figure in figures if figure.mode is not None],
        "tables": [table for table in tables if table],
        "timelines": [figure for figure in figures if figure.mode is None],
    }


def _resources(analysis: Analysis, figures: list[Figure]) -> dict[str, Any] | None:
    tables = [table for table in (resolution_table(analysis), detail_tables.resource_table(analysis)) if table]
    return {"figures": figures, "tables": tables} if figures or tables else None


def _accuracy(analysis: Analysis, figures: list[Figure]) -> dict[str, Any] | None:
    by_mode = [
        [curve for curve in analysis.curves if curve.mode == mode]
        for mode in dict.fromkeys(curve.mode for curve in analysis.curves)
    ]
    tables = [table for curves in by_mode if (table := detail_tables.accuracy_table(analysis, curves))]
    return {"figures": figures, "tables": tables} if figures or tables else None


def _prediction(outlook: Forecast | None, figures: list[Figure]) -> dict[str, Any] | None:
    if outlook is None:
        return None
    tables = prediction_tables(outlook)
    return {
        "figures": figures,
        "scores": prediction_words.scores(outlook),
        "tables": tables,
        "notes": [
            *shared_notes(tables),
            prediction_words.network(outlook.evidence),
            *prediction_words.labels(outlook.predictions),
            prediction_words.ASK_FOR_MORE,
        ],
        "intervals": prediction_words.INTERVALS_MEANING,
    }


def _failures(analysis: Analysis) -> list[dict[str, Any]]:
    return [
        {
            "title": trial_title(analysis, trial),
            "outcome": trial.outcome or "not run yet",
            "reason": "" if trial.outcome is None else trial.reason,
            "runs": [
                {
                    "title": f"repeat {failure.repeat}: {failure.kind}",
                    "reason": failure.reason,
                    "rank": failure.rank,
                    "detail": failure.detail[-_LONGEST_DETAIL:],
                }
                for failure in trial.failures
            ],
        }
        for trial in analysis.trials.values()
        if trial.outcome != "completed" or trial.failures
    ]


def _environment(analysis: Analysis) -> list[dict[str, Any]]:
    """The different surroundings of the study's runs, each with the number of trials it was seen in."""
    around = [trial.surroundings for trial in analysis.trials.values() if trial.surroundings]
    return [
        {
            "trials": around.count(one),
            "facts": [
                ("device", ", ".join(one.devices)),
                ("host", ", ".join(one.hosts)),
                ("driver", ", ".join(one.drivers) or "none recorded"),
                ("CPU quota", ", ".join(f"{quota:g} cores" for quota in one.quotas) or "none"),
                ("git revision", one.git_revision or "none recorded"),
                ("versions", ", ".join(f"{name} {version}" for name, version in one.versions)),
                ("transport settings", ", ".join(f"{name}={value}" for name, value in one.settings) or "none"),
            ],
        }
        for one in dict.fromkeys(around)
    ]
