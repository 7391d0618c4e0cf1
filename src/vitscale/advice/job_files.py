"""An advised study as a file that starts it elsewhere: a SkyPilot task, or a JobSet of Kubernetes.

On several hosts a SkyPilot task does what a person at a terminal would: the first host runs `vitscale run` with a
hostfile of all, reaches the others by ssh, and all see one folder. A JobSet is the one that `vitscale plan` prints.
What nobody here can know (an image, a volume) has a name that is to be replaced. vitscale itself comes from a wheel
that lies beside the file, of the package that wrote it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vitscale.advice.request import Option
from vitscale.advice.study_text import toml_value
from vitscale.base.yaml_files import yaml_file
from vitscale.errors import shown, unknown
from vitscale.schedulers.pod_manifests import PodSet, dns_label, manifest
from vitscale.study.sections import KubernetesSection
from vitscale.trial.trial import Trial

_ACCELERATORS = (
    (r"\bB200", "B200"), (r"\bH200", "H200"), (r"GH200", "GH200"), (r"H100", "H100"), (r"A100.*80 ?G", "A100-80GB"),
    (r"A100", "A100"), (r"A10G", "A10G"), (r"A10\b", "A10"), (r"L40S", "L40S"), (r"L40\b", "L40"), (r"L4\b", "L4"),
    (r"V100.*32 ?G", "V100-32GB"), (r"V100", "V100"), (r"P100", "P100"), (r"T4", "T4"), (r"RTX.*4090", "RTX4090"),
)  # fmt: skip
"""(pattern of a GPU's name as its driver reports it, SkyPilot's name from `sky gpus list`); the first match counts."""
_AMD_NAME = re.compile(r"\b(AMD|Radeon|Instinct|MI\d{3}[AX]?)\b", re.IGNORECASE)
"""Name of a GPU of AMD's, as its driver or a provider's table gives it: "AMD Instinct MI300X", "MI250X"."""
_SHARED_MEMORY = KubernetesSection().shared_memory
_STUDY_END = "END_OF_STUDY"
"""No line of a study file is this: each is a comment, a section or `key = value`."""


class _AdvisedStudy(NamedTuple):
    """What a job file is written from; see `job_text`."""

    text: str
    option: Option
    trial: Trial
    devices: tuple[str, ...]
    wheel: Path

    @property
    def has_several_hosts(self) -> bool:
        """Whether its ranks lie on more than one host."""
        return self.option.nodes > 1

    @property
    def ranks_per_host(self) -> int:
        """Ranks on each host, and so GPUs, if they train on GPUs."""
        return self.option.candidate.ranks_per_node

    @property
    def gpu_name(self) -> str:
        """Name of the GPU that it trains on, as its driver or the table of instances gives it; empty where unknown."""
        instance = self.option.candidate.instance
        return instance.gpu.name if instance is not None else next(iter(self.devices), "")

    @property
    def cores_per_host(self) -> int:
        """Cores that the ranks of a host need."""
        return self.ranks_per_host * max(1, self.trial.world.threads_per_rank)


def job_text(kind: str, study: str, option: Option, trial: Trial, devices: tuple[str, ...], wheel: Path) -> str:
    """Return the text of a file that starts a study elsewhere, in a format of `JOB_FORMATS`.

    Args:
        kind: the format's name.
        study: the study file (`study_text`).
        option: what was advised.
        trial: the trial that it was worked out from.
        devices: the GPUs that were measured, by name.
        wheel: the wheel of vitscale that the job installs (`vitscale.base.distribution.write_wheel`).

    Raises:
        RequestError: `kind` is unknown.
    """
    if kind not in JOB_FORMATS:
        raise unknown("format of a job", kind, ("study", *JOB_FORMATS))
    return JOB_FORMATS[kind].text(_AdvisedStudy(study, option, trial, devices, wheel))


def _sky_task(advised: _AdvisedStudy) -> str:
    """Return the file of a SkyPilot task.

    SkyPilot runs the commands of `run` on every host. Only the first of several writes the study and starts it.
    """
    study = advised.text
    script = advised.trial.train.script
    task: dict[str, Any] = {"name": dns_label(_study_name(study))}
    if script is not None:
        # Its folder goes along, with what it imports, and is where the task's commands start.
        task["workdir"] = str(Path(script).parent)
        study = study.replace(f"\nscript = {toml_value(script)}\n", f"\nscript = {toml_value(Path(script).name)}\n")
    task["num_nodes"] = advised.option.nodes
    task["resources"] = _sky_resources(advised)
    if advised.has_several_hosts:
        task["volumes"] = {"/shared": "REPLACE-BY-A-VOLUME"}
    task["file_mounts"] = {f"~/{advised.wheel.name}": str(advised.wheel)}
    task["setup"] = f"pip install ~/{shlex.quote(f'{advised.wheel.name}[train]')}\n"
    write_study = f"cat > study.toml <<'{_STUDY_END}'\n{study}{_STUDY_END}\n"
    if advised.has_several_hosts:
        task["run"] = (
            'if [ "$SKYPILOT_NODE_RANK" = 0 ]; then\n'
            f'echo "$SKYPILOT_NODE_IPS" | sed "s/$/ slots={advised.ranks_per_host}/" > hosts\n'
            f"{write_study}vitscale run study.toml --hostfile hosts -o /shared/results\nfi\n"
        )
    else:
        task["run"] = f"{write_study}vitscale run study.toml -o ~/results\n"
    volume_note = "; the volume is one that all hosts may write to" if advised.has_several_hosts else ""
    return yaml_file(f"Written by vitscale advise. Start it with: sky launch FILE{volume_note}.", task)


def _sky_resources(advised: _AdvisedStudy) -> dict[str, Any]:
    """Return the cores and GPUs of a host, in SkyPilot's words; the user is to replace a GPU without a name there."""
    resources = {"cpus": f"{advised.cores_per_host}+"}
    if advised.trial.train.device == "cuda":
        matches = [sky_name for pattern, sky_name in _ACCELERATORS if re.search(pattern, advised.gpu_name)]
        accelerator = matches[0] if matches else "REPLACE-BY-A-GPU"
        resources["accelerators"] = f"{accelerator}:{advised.ranks_per_host}"
    return resources


def _job_set(advised: _AdvisedStudy) -> str:
    """Return the manifest of a JobSet, one pod on each host; see `vitscale.schedulers.pod_manifests`."""
    pod_set = PodSet(
        study_name=_study_name(advised.text),
        pods=advised.option.nodes,
        ranks_per_pod=advised.ranks_per_host,
        cores=advised.cores_per_host,
        on_gpus=advised.trial.train.device == "cuda",
        gpu_resource=_gpu_resource(advised),
        image="REPLACE-BY-AN-IMAGE",
        claim="REPLACE-BY-A-CLAIM",
        shared_memory=_SHARED_MEMORY,
        study=advised.text,
        # Pods serve no ssh, by which the launcher that was measured may reach other hosts.
        arguments=("--scheduler", "kubernetes", "--launcher", "torchrun"),
    )
    return manifest("jobset", pod_set, _job_set_instructions(advised, pod_set))


def _job_set_instructions(advised: _AdvisedStudy, pod_set: PodSet) -> str:
    """Return the comment at the head of a JobSet's file: what the user has to name, and how to start it."""
    script = advised.trial.train.script
    in_image = f"{advised.wheel.name}[train]"
    if script is not None:
        in_image += f" and the script {shown(script)}"
    hosts_note = " that all hosts may write to" if advised.has_several_hosts else ""
    return (
        f"Written by vitscale advise. Name an image with {in_image} in it and a claim for /shared"
        f"{hosts_note}. Then: kubectl apply -f FILE. Results: {pod_set.results}"
    )


def _gpu_resource(advised: _AdvisedStudy) -> str:
    """Return the name by which a pod asks for GPUs, which the device plug-in of their vendor gives out."""
    return "amd.com/gpu" if _AMD_NAME.search(advised.gpu_name) else "nvidia.com/gpu"


class JobFormat(NamedTuple):
    """A file format of another project, and the command that starts such a file."""

    text: Callable[[_AdvisedStudy], str]
    """Returns the text of a file."""
    start: str
    """The command, without the file's name."""


JOB_FORMATS: Mapping[str, JobFormat] = {
    "skypilot": JobFormat(_sky_task, "sky launch"),
    "jobset": JobFormat(_job_set, "kubectl apply -f"),
}


def _study_name(study: str) -> str:
    """Return the name in a study file's text; empty where it gives none."""
    match = re.search(r'^name = "(.*)"$', study, re.MULTILINE)
    return match[1] if match else ""
