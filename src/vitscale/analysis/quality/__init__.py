"""Findings: reasons to trust the figures of a study less, each with what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from vitscale.analysis.quality import imports as import_quality
from vitscale.analysis.quality import measurement as measurement_quality
from vitscale.analysis.quality import placement as place_quality
from vitscale.analysis.quality import runs as run_quality
from vitscale.analysis.quality import shares as share_quality
from vitscale.analysis.quality import study as study_quality
from vitscale.analysis.quality.side_by_side import side_by_side
from vitscale.analysis.scaling import CurveResult
from vitscale.analysis.trials import TrialResult
from vitscale.present.document import Finding, most_severe_first
from vitscale.store.results import Run, StudyRecord


def findings(
    trials: Sequence[TrialResult], curves: Sequence[CurveResult], study: StudyRecord, runs: Sequence[Run]
) -> tuple[Finding, ...]:
    """Return all findings on a study, warnings first.

    Args:
        trials: all trials of the study.
        curves: all its curves.
        study: the study as it was planned.
        runs: all its runs, failed ones too.
    """
    measured = [trial for trial in trials if trial.run_figures]
    all_findings = [
        *study_quality.drift(measured),
        *study_quality.training_otherwise(measured),
        *study_quality.unknown_drift(measured),
        *study_quality.few_repeats(measured),
        *study_quality.unfinished(trials, study),
        *study_quality.target_ci(trials, study),
        *study_quality.missing_baselines(curves, trials),
        *study_quality.baselines_of_several_ranks(curves, trials),
        *place_quality.unlike_repeats(measured),
        *place_quality.unlike_points(curves),
        *share_quality.mixed_hardware(measured),
        *share_quality.unequal_shares(measured),
        *place_quality.oversubscribed(measured),
        *place_quality.on_shared_physical_cores(measured),
        *place_quality.far_from_gpu(measured),
        *place_quality.gpus_unused(measured),
        *place_quality.throttled_gpus(measured),
        *place_quality.at_power_limit(measured),
        *place_quality.throttled_by_cpu_quota(measured),
        *side_by_side(measured, runs),
        *run_quality.unsteady_runs(measured),
        *run_quality.unsteady_steps(measured),
        *run_quality.single_slow_steps(measured),
        *run_quality.recurring_slow_steps(measured),
        *run_quality.slowing_down(measured),
        *run_quality.still_warming_up(measured),
        *run_quality.long_warm_up(measured),
        *run_quality.data_bound(measured),
        *run_quality.loader_on_the_cores(measured),
        *run_quality.diverged(measured),
        *run_quality.few_steps(measured),
        *run_quality.short_runs(measured),
        *run_quality.one_off_compilation(measured),
        *run_quality.startup_dominates(measured),
        *measurement_quality.clocks(measured),
        *measurement_quality.synchronised(measured),
        *measurement_quality.timed_whole(measured),
        *measurement_quality.missing_readings(measured),
        *measurement_quality.no_profile(measured),
        *measurement_quality.costly_profile(measured),
        *measurement_quality.attached_profiler(measured),
        *measurement_quality.unaccounted(measured),
        *study_quality.mixed_epochs(curves, trials),
        *study_quality.badly_divided(curves, trials),
        *study_quality.images_left_out(measured),
        *place_quality.across_hosts(curves, trials),
        *place_quality.gradients_sent_otherwise(measured),
        *place_quality.unlike_gradient_dtypes(measured),
        *place_quality.surroundings_changed(measured),
        *import_quality.imported_results(study),
        *import_quality.steps_from_epochs(measured),
        *import_quality.some_ranks(measured),
    ]
    return most_severe_first(all_findings)
