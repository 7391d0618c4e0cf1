"""The manifest of Kubernetes for a study, which `vitscale plan STUDY --commands` prints under scheduler kubernetes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitscale import runner
from vitscale.api.arguments import LaunchOptions, path_or_none
from vitscale.base.files import read_text
from vitscale.errors import RequestError, shown
from vitscale.machine.batch_systems import KUBERNETES
from vitscale.schedulers.pod_manifests import PodSet, manifest
from vitscale.study.file import StudyFile
from vitscale.study.sections import KubernetesSection
from vitscale.trial.trial import Trial

_ANY_IMAGE = 'image = "registry.example/vitscale:1"'
_ANY_CLAIM = 'claim = "vitscale"'


@dataclass(frozen=True)
class ManifestOptions:
    """What the command line says, as far as the driver in the pods must know it too."""

    launch: LaunchOptions
    skip_unfit: bool = False
    gpu_memory: str | int | None = None
    """Memory of one GPU, as `--gpu-memory` has it."""

    def words(self) -> tuple[str, ...]:
        """Return the options of `vitscale run` in the pods, without the site file's."""
        words = ["--scheduler", KUBERNETES]
        if self.launch.launcher is not None:
            words += ["--launcher", self.launch.launcher]
        if self.skip_unfit:
            words.append("--skip-unfit")
        if self.gpu_memory is not None:
            words += ["--gpu-memory", f"{self.gpu_memory}B" if isinstance(self.gpu_memory, int) else self.gpu_memory]
        return tuple(words)


def manifest_of(planned: runner.Plan, file: StudyFile, options: ManifestOptions) -> str:
    """Return the manifest that runs a study: pods for its largest trial, of which smaller trials use the first.

    Args:
        planned: the study, planned for pods.
        file: its file, with [kubernetes].
        options: what the command line says.

    Raises:
        RequestError: image or claim is missing, the study names files that a ConfigMap does not bring, or it is too
            large.
    """
    section = file.study.kubernetes
    image = _required(section.image, "kubernetes.image", _ANY_IMAGE)
    claim = _required(section.claim, "kubernetes.claim", _ANY_CLAIM)
    trials = list(planned.record.trials.values())
    if section.study is None:
        _refuse_files_elsewhere(file, trials)
    worlds = [trial.world for trial in trials]
    pod_set = PodSet(
        study_name=planned.record.name,
        pods=max(world.nodes for world in worlds),
        ranks_per_pod=max(world.ranks_per_node for world in worlds),
        cores=max(world.ranks_per_node * world.threads_per_rank for world in worlds),
        on_gpus=any(trial.train.device == "cuda" for trial in trials),
        gpu_resource=section.gpu_resource,
        image=image,
        claim=claim,
        shared_memory=section.shared_memory,
        study=file.text if section.study is None else None,
        study_in_image=section.study or "",
        site=_site_text(options.launch),
        arguments=(*options.words(), *file.overrides),
        queue=section.queue,
        runtime=section.runtime,
    )
    return manifest(section.manifest, pod_set, _instructions(section, pod_set))


def _instructions(section: KubernetesSection, pod_set: PodSet) -> str:
    """Return the comment at the head of a manifest."""
    return (
        f"Written by vitscale plan. Start it with: kubectl apply -f FILE. Results: {pod_set.results} "
        f"in the volume of claim {section.claim}"
    )


def _required(value: str | None, key: str, example: str) -> str:
    """Return the value of a key that every manifest needs.

    Raises:
        RequestError: it is not given.
    """
    if value is not None:
        return value
    raise RequestError(
        f"{key} is not given, which a manifest needs",
        next_step=f"Add [kubernetes] with {example} to the site file or the study: see docs/clusters/kubernetes.md",
    )


def _refuse_files_elsewhere(file: StudyFile, trials: Sequence[Trial]) -> None:
    """Refuse a study that names files of this machine, where a ConfigMap brings the study alone.

    Raises:
        RequestError: it names some.
    """
    named = sorted({*_fields_with_files(trials)})
    if named:
        raise RequestError(
            f"{shown(str(file.path))} names files of this machine ({', '.join(named)}), and a ConfigMap brings the "
            "study alone",
            next_step="Put the study and these files into the image, and name its path there: kubernetes.study",
        )


def _fields_with_files(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield the fields of the trials that name a file or a module beside the study."""
    for trial in trials:
        if trial.train.script is not None:
            yield "train.script"
        if trial.model.factory is not None:
            yield "model.factory"
        if trial.train.deepspeed_config is not None:
            yield "train.deepspeed_config"


def _site_text(launch: LaunchOptions) -> str | None:
    """Return the text of the site file; None without one.

    Raises:
        RequestError: it cannot be read.
    """
    site: Path | None = path_or_none(launch.site)
    return None if site is None else read_text(site, "site file", next_step="Give a TOML file")
