"""An advised study as a file that starts it elsewhere: a SkyPilot task, or a JobSet of Kubernetes.

On several hosts both do what a person at a terminal would: the first host runs `vitscale run` with a hostfile of all,
reaches the others by ssh, and all see one folder. What nobody here can know (an image, a volume, keys) has a name that
is to be replaced. vitscale itself comes from a wheel that lies beside the file, of the package that wrote it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vitscale.advice.request import Option
from vitscale.advice.study_text import toml_value
from vitscale.errors import shown, unknown
from vitscale.trial.trial import Trial

_ACCELERATORS = (
    (r"\bB200", "B200"), (r"\bH200", "H200"), (r"GH200", "GH200"), (r"H100", "H100"), (r"A100.*80 ?G", "A100-80GB"),
    (r"A100", "A100"), (r"A10G", "A10G"), (r"A10\b", "A10"), (r"L40S", "L40S"), (r"L40\b", "L40"), (r"L4\b", "L4"),
    (r"V100.*32 ?G", "V100-32GB"), (r"V100", "V100"), (r"P100", "P100"), (r"T4", "T4"), (r"RTX.*4090", "RTX4090"),
)  # fmt: skip
"""(pattern of a GPU's name as its driver reports it, SkyPilot's name from `sky gpus list`); the first match counts."""
_STUDY_END = "END_OF_STUDY"
"""No line of a study file is this: each is a comment, a section or `key = value`."""


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
    return JOB_FORMATS[kind].text(study, option, trial, devices, wheel)


def _sky_task(study: str, option: Option, trial: Trial, devices: tuple[str, ...], wheel: Path) -> str:
    """Return the file of a SkyPilot task; the arguments are those of `job_text`."""
    has_several_hosts = option.nodes > 1
    script = trial.train.script
    task: dict[str, Any] = {"name": _label(study)}
    if script is not None:
        # Its folder goes along, with what it imports, and is where the task's commands start.
        task["workdir"] = str(Path(script).parent)
        study = study.replace(f"\nscript = {toml_value(script)}\n", f"\nscript = {toml_value(Path(script).name)}\n")
    task["num_nodes"] = option.nodes
    task["resources"] = _sky_resources(option, trial, devices)
    if has_several_hosts:
        task["volumes"] = {"/shared": "REPLACE-BY-A-VOLUME"}
    task["file_mounts"] = {f"~/{wheel.name}": str(wheel)}
    task["setup"] = f"pip install ~/{shlex.quote(f'{wheel.name}[train]')}\n"
    write_study = f"cat > study.toml <<'{_STUDY_END}'\n{study}{_STUDY_END}\n"
    if has_several_hosts:
        task["run"] = (
            'if [ "$SKYPILOT_NODE_RANK" = 0 ]; then\n'
            f'echo "$SKYPILOT_NODE_IPS" | sed "s/$/ slots={option.candidate.ranks_per_node}/" > hosts\n'
            f"{write_study}vitscale run study.toml --hostfile hosts -o /shared/results\nfi\n"
        )
    else:
        task["run"] = f"{write_study}vitscale run study.toml -o ~/results\n"
    volume_note = "; the volume is one that all hosts may write to" if has_several_hosts else ""
    return _yaml(f"Written by vitscale advise. Start it with: sky launch FILE{volume_note}.", task)


def _sky_resources(option: Option, trial: Trial, devices: tuple[str, ...]) -> dict[str, Any]:
    """Return the cores and GPUs of a host, in SkyPilot's words; the user is to replace a GPU without a name there."""
    resources = {"cpus": f"{_cores(option, trial)}+"}
    if trial.train.device == "cuda":
        instance = option.candidate.instance
        gpu_name = instance.gpu.name if instance is not None else next(iter(devices), "")
        matches = [sky_name for pattern, sky_name in _ACCELERATORS if re.search(pattern, gpu_name)]
        accelerator = matches[0] if matches else "REPLACE-BY-A-GPU"
        resources["accelerators"] = f"{accelerator}:{option.candidate.ranks_per_node}"
    return resources


def _job_set(study: str, option: Option, trial: Trial, _: tuple[str, ...], wheel: Path) -> str:
    """Return the file of a JobSet, whose first host runs `vitscale run`; the arguments are those of `job_text`.

    The other hosts serve ssh, by which the first one starts their ranks.
    """
    name = _label(study)
    has_several_hosts = option.nodes > 1
    hosts = [f"{name}-first-0-0.{name}", *(f"{name}-others-0-{index}.{name}" for index in range(option.nodes - 1))]
    hostfile = "".join(f"{host} slots={option.candidate.ranks_per_node}\n" for host in hosts)
    files = {"study.toml": study, "hosts": hostfile}
    run = "vitscale run /study/study.toml -o /shared/results"
    jobs: list[dict[str, Any]] = []
    if has_several_hosts:
        serve_ssh = "exec /usr/sbin/sshd -D -e"
        jobs.append(_job("first", 1, f"{run} --hostfile /study/hosts", option, trial, name))
        jobs.append(_job("others", option.nodes - 1, serve_ssh, option, trial, name))
    else:
        jobs.append(_job("first", 1, run, option, trial, name))
    spec: dict[str, Any] = {
        # The other hosts serve ssh for ever: the set succeeds as soon as the first host does.
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["first"]},
        "failurePolicy": {"maxRestarts": 0},
        "network": {"enableDNSHostnames": True, "subdomain": name},
        "replicatedJobs": jobs,
    }
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-study"}, "data": files}
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": spec,
    }
    script = f" and the script {shown(trial.train.script)}" if trial.train.script is not None else ""
    hosts_note = ""
    if has_several_hosts:
        hosts_note = " that all hosts may write to; the image has sshd, and the secret the keys of ~/.ssh"
    head = (
        f"Written by vitscale advise. Name an image with {wheel.name}[train]{script} in it and a claim for /shared"
        f"{hosts_note}. Then: kubectl apply -f FILE"
    )
    return _yaml(head, config, job_set)


def _job(name: str, pods: int, command: str, option: Option, trial: Trial, job_set: str) -> dict[str, Any]:
    """Return a replicated job, with one pod on each host.

    Args:
        name: its name in the set.
        pods: number of hosts.
        command: the shell command of each pod.
        option: what was advised.
        trial: the trial that it was worked out from.
        job_set: the name of the set.
    """
    gpus = {"nvidia.com/gpu": option.candidate.ranks_per_node} if trial.train.device == "cuda" else {}
    mounts = [
        {"name": "study", "mountPath": "/study"},
        {"name": "shared", "mountPath": "/shared"},
        {"name": "memory", "mountPath": "/dev/shm"},  # noqa: S108 - the loaders' and NCCL's, in the pod
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "study", "configMap": {"name": f"{job_set}-study"}},
        {"name": "shared", "persistentVolumeClaim": {"claimName": "REPLACE-BY-A-CLAIM"}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    if option.nodes > 1:
        mounts.append({"name": "ssh", "mountPath": "/root/.ssh"})
        volumes.append({"name": "ssh", "secret": {"secretName": "REPLACE-BY-A-SECRET", "defaultMode": 0o400}})
    container = {
        "name": "vitscale",
        "image": "REPLACE-BY-AN-IMAGE",
        "command": ["bash", "-c", command],
        "resources": {"limits": gpus, "requests": {"cpu": _cores(option, trial)}},
        "volumeMounts": mounts,
    }
    pod = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
    job = {"parallelism": pods, "completions": pods, "backoffLimit": 0, "template": {"spec": pod}}
    return {"name": name, "replicas": 1, "template": {"spec": job}}


class JobFormat(NamedTuple):
    """A file format of another project, and the command that starts such a file."""

    text: Callable[[str, Option, Trial, tuple[str, ...], Path], str]
    start: str


JOB_FORMATS: Mapping[str, JobFormat] = {
    "skypilot": JobFormat(_sky_task, "sky launch"),
    "jobset": JobFormat(_job_set, "kubectl apply -f"),
}


def _cores(option: Option, trial: Trial) -> int:
    """Return the cores that the ranks of a host need."""
    return option.candidate.ranks_per_node * max(1, trial.world.threads_per_rank)


def _label(study: str) -> str:
    """Return the study's name as a DNS label, short enough for the names of pods that are made of it.

    Example: "ViT-B on 8 GPUs" gives "vit-b-on-8-gpus"; a name that begins with a digit gets "vitscale-" before it.
    """
    match = re.search(r'^name = "(.*)"$', study, re.MULTILINE)
    name = match[1].lower() if match else ""
    with_hyphens = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    label = with_hyphens[:36].strip("-")
    return label if label and label[0].isalpha() else f"vitscale-{label}".strip("-")


def _text(dumper: Any, text: str) -> Any:
    """Represent a text as YAML; one of several lines as a block."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper: Any = type("_Dumper", (yaml.SafeDumper,), {})
_Dumper.add_representer(str, _text)


def _yaml(head: str, *documents: Mapping[str, Any]) -> str:
    """Return a file of several documents, after a comment."""
    texts = [
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=False) for document in documents
    ]
    return f"# {head}\n" + "---\n".join(texts)
