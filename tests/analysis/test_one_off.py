from __future__ import annotations

from typing import Any

from results_factory import make_curve, make_results, make_trial, steady_run
from verdict_finder import verdict
from vitscale.analysis import TrialResult, analyse
from vitscale.store.records import RankRecord
from vitscale.store.results import Results, Run


def with_phase(run: Run, phase: str, seconds: float, *compiled: str) -> Run:
    own = {"seconds": seconds, "compiled": compiled}

    def changed(rank: RankRecord) -> RankRecord:
        phases = tuple(p.model_copy(update=own) if p.name == phase else p for p in rank.phases)
        return rank.model_copy(update={"phases": phases})

    return run.model_copy(update={"ranks": tuple(changed(rank) for rank in run.ranks)})


def study(*engine_seconds: float, compiled: tuple[int, ...] = ()) -> Results:
    """`compiled`: the runs that say so."""
    trial = make_trial("ddp", 1)
    runs = [
        with_phase(steady_run(trial, 0.1, n), "engine", seconds, *(["fused_adam"] if n in compiled else []))
        for n, seconds in enumerate(engine_seconds)
    ]
    return make_results([(make_curve([trial]), [trial])], runs)


def analysed(*engine_seconds: float, compiled: tuple[int, ...] = ()) -> TrialResult:
    (trial,) = analyse(study(*engine_seconds, compiled=compiled)).trials.values()
    return trial


def test_a_compilation_in_one_of_two_runs_is_in_no_start_up_and_is_told() -> None:
    compiled, usual = analysed(271.0, 9.7, compiled=(0,)), analysed(9.7, 9.7)

    assert compiled.startup_seconds == usual.startup_seconds
    assert compiled.startup["engine"] == 9.7
    assert [run.one_off for run in compiled.start_ups] == [{"engine": 271.0 - 9.7}, {}]
    found = verdict(study(271.0, 9.7, compiled=(0,)), "one-off-compilation")
    assert "took 261 s longer to build" in found.message
    assert f"the engine of run 1 of {compiled.name} took" in found.message  # and not the name of a folder


def test_a_long_phase_in_which_nothing_was_compiled_is_start_up() -> None:
    """However long: a rank says what it compiles, and nobody guesses."""
    assert analysed(271.0, 9.7, 9.7).startup["engine"] == 9.7  # the median
    assert not any(run.one_off for run in analysed(271.0, 9.7, 9.7).start_ups)
    assert analysed(271.0).startup["engine"] == 271.0


def test_a_run_that_says_so_is_no_start_up_however_short_its_compilation() -> None:
    # 12 s more than 8.0 is what a busy machine may take.
    compiled = analysed(20.0, 8.0, compiled=(0,))
    assert compiled.startup_seconds == analysed(8.0, 8.0).startup_seconds
    assert [run.one_off for run in compiled.start_ups] == [{"engine": 12.0}, {}]
    told = verdict(study(20.0, 8.0, compiled=(0,)), "one-off-compilation").message
    assert "12 s longer to build than in other runs: a one-off compilation of fused_adam (1 run in all)" in told


def test_where_only_a_run_that_compiled_is_known_start_up_is_unavailable() -> None:
    alone = analysed(271.0, compiled=(0,))
    assert alone.startup_seconds is None
    assert "engine" not in alone.startup
    assert "model" in alone.startup
    assert "took 271 s to build" in verdict(study(271.0, compiled=(0,)), "one-off-compilation").message


def test_runs_that_compiled_are_no_measure_for_others() -> None:
    # Two runs paid for a compilation each: their median is no engine phase, and 9.7 s is not short.
    three = analysed(271.0, 280.0, 9.7, compiled=(0, 1))
    assert three.startup["engine"] == 9.7
    assert [run.one_off.get("engine") for run in three.start_ups] == [271.0 - 9.7, 280.0 - 9.7, None]


def test_a_deepspeed_file_is_part_of_what_is_built_alike() -> None:
    files: list[dict[str, Any]] = [{"optimizer": {"type": "AdamW"}}, {"optimizer": {"type": "Adam"}}]
    trials = [make_trial("deepspeed", 1, deepspeed_config=file) for file in files]
    seconds = {0: (271.0, 9.7), 1: (8.0, 8.0)}
    compiled: dict[int, tuple[tuple[str, ...], ...]] = {0: (("fused_adam",), ()), 1: ((), ())}
    runs = [
        with_phase(steady_run(trial, 0.1, repeat), "engine", seconds[n][repeat], *compiled[n][repeat])
        for n, trial in enumerate(trials)
        for repeat in range(2)
    ]
    results = make_results([(make_curve([trial]), [trial]) for trial in trials], runs)
    by_optimizer = {
        trial.trial.train.deepspeed_config["optimizer"]["type"]: trial.startup["engine"]  # type: ignore[index]  # they are there: set above
        for trial in analyse(results).trials.values()
    }
    assert by_optimizer == {"AdamW": 9.7, "Adam": 8.0}


def first_steps(*seconds: float, compiled: tuple[int, ...] = (), compiles: bool = True) -> Results:
    """Repeats of one trial, by the seconds of their first steps; `compiled`: the runs that say so."""
    trial = make_trial("ddp", 1, compile=compiles)
    runs = [
        with_phase(steady_run(trial, 0.1, n), "first_step", own, *(["blocks"] if n in compiled else []))
        for n, own in enumerate(seconds)
    ]
    return make_results([(make_curve([trial]), [trial])], runs)


def test_blocks_compiled_in_the_first_step_are_in_no_start_up_and_are_told() -> None:
    results = first_steps(64.0, 4.0, 4.0, compiled=(0,))
    (trial,) = analyse(results).trials.values()
    assert trial.startup["first_step"] == 4.0
    assert [run.one_off for run in trial.start_ups] == [{"first_step": 60.0}, {}, {}]
    told = verdict(results, "one-off-compilation").message
    assert "the first step of" in told
    assert "took 60 s longer than in other runs: a one-off compilation of blocks (1 run in all)" in told
    (alone,) = analyse(first_steps(64.0, compiled=(0,))).trials.values()
    assert alone.startup_seconds is None
    assert "took 64 s: a one-off" in verdict(first_steps(64.0, compiled=(0,)), "one-off-compilation").message


def test_a_long_first_step_of_what_compiles_nothing_stays_in_start_up() -> None:
    for compiles in (False, True):
        (plain,) = analyse(first_steps(64.0, 4.0, 4.0, compiles=compiles)).trials.values()
        assert plain.start_ups[0].phases["first_step"] == 64.0
    # What compiled in both phases has paid for both.
    both = first_steps(64.0, 4.0, compiled=(0,))
    runs = tuple(
        with_phase(run, "engine", 9.0 - 8 * n, *(["utils"] if n == 0 else [])) for n, run in enumerate(both.runs)
    )
    (trial,) = analyse(both.model_copy(update={"runs": runs})).trials.values()
    assert trial.start_ups[0].one_off == {"engine": 8.0, "first_step": 60.0}
