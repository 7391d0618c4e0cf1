"""Work grows with what is given, not with its square: operations are counted for n and for 2n, and no time is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from results_factory import make_trial
from study_factory import EIGHT_CORES, write_study
from vitscale.errors import RequestError
from vitscale.importers import curves
from vitscale.importers.contents import ImportOptions, LogRun, TrialSetting
from vitscale.importers.records import trial_of
from vitscale.pages import imported
from vitscale.prediction.memory.forecast import forecast_bytes, totals
from vitscale.present import document, terminal, terminal_table
from vitscale.runner import memory_fits, planning, preview
from vitscale.runner.expectation import Expectations, Expected
from vitscale.runner.memory_fits import MemoryFit
from vitscale.runner.plan_estimate import PlanEstimate
from vitscale.study import file as study_file
from vitscale.study.file import StudyFile
from vitscale.study.sections import LaunchSection, SlurmSection, Study, choices
from vitscale.trial.fields import Spec
from vitscale.trial.trial import DeviceName, Trial, World

FEW = 40


def grows_linearly(count_for: Callable[[int], int]) -> bool:
    """Whether twice as much takes about twice as many operations; what is quadratic takes four times as many."""
    few, many = count_for(FEW), count_for(2 * FEW)
    assert few > 0, "nothing is counted"
    return many < 2.5 * few


class Counter:
    """How often something was done."""

    def __init__(self) -> None:
        self.count = 0


def test_the_cells_of_a_plan() -> None:
    """Whether a column is shown is the same for all trials."""
    trial = make_trial()

    def looked_at(trials: int) -> int:
        looks = Counter()

        class Fit(MemoryFit):
            @property
            def unfit(self) -> bool:
                looks.count += 1
                return False

        class Time(Expected):
            def __getattribute__(self, name: str) -> Any:
                looks.count += name == "seconds"
                return super().__getattribute__(name)

        ids = [f"{n:012x}" for n in range(trials)]
        by_trial = {trial_id: cast("Expected", Time(None, "")) for trial_id in ids}
        estimate = PlanEstimate({trial_id: Fit(1, 2, 0.0) for trial_id in ids}, Expectations(by_trial))
        assert [estimate.cells(trial_id, trial)["memory"] for trial_id in ids] == ["1 B"] * trials
        return looks.count

    assert grows_linearly(looked_at)


def test_the_rows_of_a_table_of_which_25_lines_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that a terminal does not show are read for the widths, and not laid out."""
    laid = Counter()
    physical = terminal_table._side_by_side

    def counting(*given: Any, **more: Any) -> Any:
        laid.count += 1
        return physical(*given, **more)

    monkeypatch.setattr(terminal_table, "_side_by_side", counting)

    def laid_out(rows: int) -> int:
        laid.count = 0
        column = document.Column("trial", words=True)
        groups = (document.RowGroup("", tuple((document.Cell(str(n)),) for n in range(rows))),)
        shown = terminal.lines(document.Document("", (document.Table((column,), groups),)))
        assert f"{rows - 21:,} more" in shown[-1].plain
        return laid.count

    assert laid_out(100) == laid_out(10_000) <= 30


def test_the_points_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point is validated by itself: not with all values of the sweep beside it."""
    validated = study_file._validated
    values = Counter()

    def counting(path: Path, raw: Any, *rest: Any, **more: Any) -> Any:
        values.count += _leaves(raw)
        return validated(path, raw, *rest, **more)

    monkeypatch.setattr(study_file, "_validated", counting)

    def validated_for(points: int) -> int:
        rates = ", ".join(f"{n}e-6" for n in range(1, points + 1))
        path = tmp_path / "study.toml"
        path.write_text(
            'name = "x"\n[model]\nname = "vit-ti16"\nimage_size = 32\npatch_size = 8\n[data]\nname = "digits"\n'
            f'[train]\nmicro_batch = 8\nepochs = 1\n[scaling]\ngpus = [1]\n[sweep]\n"train.learning_rate" = [{rates}]\n'
        )
        file = StudyFile.read(path)
        values.count = 0
        learnt = [study.train.learning_rate for _, study, _ in file.points()]
        assert learnt == pytest.approx([n * 1e-6 for n in range(1, points + 1)])
        return values.count

    assert grows_linearly(validated_for)


def test_no_default_of_a_section_is_copied_for_each_point() -> None:
    """pydantic copies a default deeply where it is not hashable; a section of lists or tables is made anew instead."""
    defaults = [field.default for field in Study.model_fields.values() if isinstance(field.default, Spec)]
    assert defaults
    assert all(isinstance(hash(default), int) for default in defaults)
    first, second = (Study.model_validate({"name": "x", "model": {}, "data": {"name": "digits"}}) for _ in range(2))
    assert (first.launch, first.slurm) == (LaunchSection(), SlurmSection())
    assert first.launch.environment is not second.launch.environment


def _leaves(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_leaves, value.values()))
    if isinstance(value, list):
        return sum(map(_leaves, value))
    return 1


def settings_and_trials(settings: list[TrialSetting]) -> list[tuple[TrialSetting, Trial]]:
    told = []
    for setting in settings:
        run = LogRun(setting, "x", (), ())
        told.append((setting, trial_of(run, ImportOptions())))
    return told


def test_the_names_of_imported_series() -> None:
    """Which labels differ is found once for all curves, not by comparing each with each."""

    def compared(series: int) -> int:
        comparisons = Counter()

        class Name(str):
            __slots__ = ()

            def __eq__(self, other: object) -> bool:
                comparisons.count += 1
                return str(self) == str(other)

            def __ne__(self, other: object) -> bool:
                return not self == other

            def __hash__(self) -> int:
                return hash(str(self))

        settings = [TrialSetting(gpus, micro_batch=8, series=Name(f"s{n}")) for n in range(series) for gpus in (1, 2)]
        made = curves.curves_of(settings_and_trials(settings))
        assert [str(curve.labels["series"]) for curve in made] == [f"s{n}" for n in range(series)]
        return comparisons.count

    assert grows_linearly(compared)


def test_the_layouts_of_imported_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """How counts lie on hosts is found once for a group, not for each of its counts."""
    looks = Counter()
    on_hosts = curves._on_hosts

    def counting(worlds: Any) -> Any:
        looks.count += len(worlds)
        return on_hosts(worlds)

    monkeypatch.setattr(curves, "_on_hosts", counting)

    def looked_at(counts: int) -> int:
        looks.count = 0
        (curve,) = curves.curves_of(settings_and_trials([TrialSetting(n, micro_batch=8) for n in range(1, counts + 1)]))
        assert len(curve.points) == counts
        return looks.count

    assert grows_linearly(looked_at)


def test_the_table_of_an_import() -> None:
    """The runs of each trial are found once, not looked for among all runs for each series."""
    trial = make_trial()

    def looked_at(series: int) -> int:
        looks = Counter()

        class Imported:
            def __init__(self, trial_id: str) -> None:
                self.run = SimpleNamespace(ranks=[SimpleNamespace(epochs=(), steps=(1, 2))])
                self._header = SimpleNamespace(trial_id=trial_id)

            @property
            def header(self) -> Any:
                looks.count += 1
                return self._header

        ids = [f"{n:012x}" for n in range(series)]
        points = [SimpleNamespace(gpus=1, trial_id=trial_id) for trial_id in ids]
        study = SimpleNamespace(
            curves=[
                SimpleNamespace(labels={"series": point.trial_id}, mode="weak", points=(point,)) for point in points
            ],
            trials=dict.fromkeys(ids, trial),
        )
        done = SimpleNamespace(study=study, runs=[Imported(trial_id) for trial_id in ids for _ in range(2)])
        rows = imported.series_fields(cast("Any", done))
        assert [(row["runs"], row["steps"]) for row in rows] == [(2, 4)] * series
        return looks.count

    assert grows_linearly(looked_at)


def test_the_commands_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launcher and world alone decide them: trials that share both are planned once, with one look for a free port."""
    made: list[tuple[str, World]] = []

    def counting(module: Any) -> None:
        whole = module.launch_plan

        def planned(
            scheduler: Any, section: Any, launcher: str, world: World, *rest: Any, device: DeviceName = "cpu"
        ) -> Any:
            made.append((launcher, world))
            return whole(scheduler, section, launcher, world, *rest, device=device)

        monkeypatch.setattr(module, "launch_plan", planned)

    counting(planning)
    counting(preview)
    path = write_study(tmp_path, {"sweep": {"train.learning_rate": [n * 1e-6 for n in range(1, 11)]}})
    plan = planning.plan(path, EIGHT_CORES)
    assert len(plan.record.trials) == 20
    preview.plan_document(plan)
    assert len(made) == 4, "two worlds, when they are checked and when they are shown"


def test_the_memory_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials that differ only in what takes no memory share one forecast, which is that of each."""
    forecasts = Counter()

    def counting(trial: Trial) -> int | None:
        forecasts.count += 1
        return forecast_bytes(trial)

    monkeypatch.setattr(memory_fits, "forecast_bytes", counting)
    tables = (
        '{ engine = "none" }',
        '{ engine = "ddp" }',
        '{ engine = "ddp", precision = "bf16" }',
        '{ engine = "ddp", activation_checkpointing = true }',
        '{ engine = "deepspeed", zero_stage = 2 }',
        '{ engine = "ddp", optimizer = "sgd", momentum = 0.0 }',
        '{ engine = "ddp", optimizer = "sgd", momentum = 0.5 }',
        '{ engine = "ddp", micro_batch = 64 }',
    )
    sweep = {"train.learning_rate": [0.1, 0.2, 0.3], "train.seed": [0, 1], "model.image_size": [32, 64]}
    path = write_study(tmp_path, {"sweep": sweep})
    path.write_text(f"{path.read_text()}train = [{', '.join(tables)}]\n")
    trials = planning.plan(path, EIGHT_CORES)
    fits = memory_fits.memory_fits(trials)
    worlds = 2 * (len(tables) - 1) + 1  # engine none trains on one rank
    assert len(fits) == worlds * 3 * 2 * 2
    assert forecasts.count == worlds * 2, "learning rates and seeds take no memory"
    for trial_id, trial in trials.record.trials.items():
        assert fits[trial_id].forecast_bytes == max(totals(trial))
    assert len({fit.forecast_bytes for fit in fits.values()}) > worlds


def test_the_values_of_a_sweep() -> None:
    """Whether one is named twice is found without comparing each with each."""

    def compared(values: int) -> int:
        comparisons = Counter()

        class Value(float):
            __slots__ = ()

            def __eq__(self, other: object) -> bool:
                comparisons.count += 1
                return float(self) == other

            def __hash__(self) -> int:
                return hash(float(self))

        made = choices({"train.learning_rate": [Value(n) for n in range(values)]})
        assert len(made[0]) == values
        return comparisons.count + values

    assert grows_linearly(compared)


@pytest.mark.parametrize(
    "values",
    [
        [1, 2, 1.0],
        [[1, 2], [1, 2]],
        [{"engine": "ddp", "rank_speeds": [1, 2]}, {"rank_speeds": [1, 2], "engine": "ddp"}],
    ],
)
def test_a_value_that_is_named_twice_is_found_though_it_is_written_otherwise(values: list[Any]) -> None:
    with pytest.raises(RequestError, match="holds a value twice"):
        choices({"train" if isinstance(values[0], dict) else "train.learning_rate": values})
