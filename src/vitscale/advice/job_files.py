"""An advised study as a file that starts it elsewhere: a SkyPilot task, or a JobSet of Kubernetes.

On several hosts both do what a person at a terminal would: the first host runs `vitscale run` with a hostfile of all,
reaches the others by ssh, and all see one folder. What nobody here can know (an image, a volume, keys) has a name that
is to be replaced. vitscale itself comes from a wheel that lies beside the file, of the package that wrote it.

A JobSet leaves its results in the volume, in a folder of the study's name, and decoded data beside it. Applied again,
it goes on where it was cut off, as `vitscale run` does.
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
_AMD_NAME = re.compile(r"\b(AMD|Radeon|Instinct|MI\d{3}[AX]?)\b", re.IGNORECASE)
"""Name of a GPU of AMD's, as its driver or a provider's table gives it: "AMD Instinct MI300X", "MI250X"."""
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
    task: dict[str, Any] = {"name": _dns_label(study)}
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
    return _yaml_file(f"Written by vitscale advise. Start it with: sky launch FILE{volume_note}.", task)


def _sky_resources(advised: _AdvisedStudy) -> dict[str, Any]:
    """Return the cores and GPUs of a host, in SkyPilot's words; the user is to replace a GPU without a name there."""
    resources = {"cpus": f"{advised.cores_per_host}+"}
    if advised.trial.train.device == "cuda":
        matches = [sky_name for pattern, sky_name in _ACCELERATORS if re.search(pattern, advised.gpu_name)]
        accelerator = matches[0] if matches else "REPLACE-BY-A-GPU"
        resources["accelerators"] = f"{accelerator}:{advised.ranks_per_host}"
    return resources


_FIRST_JOB = "first"
"""Name of the job in a JobSet whose one pod runs `vitscale run`."""
_OTHER_JOB = "others"
"""Name of the job in a JobSet whose pods serve ssh, by which the first one starts their ranks."""
_SERVE_SSH = (
    "mkdir -p /run/sshd && ssh-keygen -A && "
    # The folder of a secret may be written to by all, as far as its mode says, and sshd would not read keys in it.
    "exec /usr/sbin/sshd -D -e -o StrictModes=no"
)
"""Shell command of a pod that serves ssh."""
_WAIT_FOR_HOSTS = (
    "for host in $(tail -n +2 /study/hosts | cut -d ' ' -f 1); do "
    'until ssh -o BatchMode=yes -o ConnectTimeout=5 "$host" true; do sleep 2; done; done'
)
"""Shell command that ends once every host after the first one answers by ssh: pods start in any order."""
_SSH_CONFIG_FILE = "ssh_config"
"""Key of the ConfigMap with the settings of ssh towards the set's own pods."""


def _job_set(advised: _AdvisedStudy) -> str:
    """Return a file with a JobSet, one pod on each host, and a ConfigMap of the files that its pods read."""
    name = _dns_label(advised.text)
    hostfile = "".join(f"{host} slots={advised.ranks_per_host}\n" for host in _pod_hosts(name, advised.option.nodes))
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": _config_map_name(name)},
        "data": {"study.toml": advised.text, "hosts": hostfile} | _ssh_config(advised, name),
    }
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            # The other hosts serve ssh for ever: the set succeeds as soon as the first host does.
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [_FIRST_JOB]},
            "failurePolicy": {"maxRestarts": 0},
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "replicatedJobs": _replicated_jobs(advised, name),
        },
    }
    return _yaml_file(_job_set_instructions(advised), config_map, job_set)


def _ssh_config(advised: _AdvisedStudy, job_set: str) -> dict[str, str]:
    """Return the settings of ssh towards a JobSet's pods, by key of the ConfigMap; none for one host.

    Each pod has a new host key, which nobody could know before, and the folder of known hosts is a secret's, read-only.
    """
    if not advised.has_several_hosts:
        return {}
    settings = ("StrictHostKeyChecking no", "UserKnownHostsFile /dev/null", "LogLevel ERROR")
    lines = [f"Host *.{job_set}", *(f"  {setting}" for setting in settings)]
    return {_SSH_CONFIG_FILE: "\n".join(lines) + "\n"}


def _pod_hosts(job_set: str, hosts: int) -> list[str]:
    """Return the host names of a JobSet's pods, the first host's first.

    A JobSet names them SET-JOB-REPLICA-POD.SUBDOMAIN; each job has one replica here, and the subdomain is the set's
    name. Example: a set "vit" on three hosts has vit-first-0-0.vit, vit-others-0-0.vit and vit-others-0-1.vit.
    """
    others = [f"{job_set}-{_OTHER_JOB}-0-{pod}.{job_set}" for pod in range(hosts - 1)]
    return [f"{job_set}-{_FIRST_JOB}-0-0.{job_set}", *others]


def _config_map_name(job_set: str) -> str:
    """Return the name of the ConfigMap with the files that a JobSet's pods read."""
    return f"{job_set}-study"


def _replicated_jobs(advised: _AdvisedStudy, job_set: str) -> list[dict[str, Any]]:
    """Return the job of the first host, and that of the other hosts if there are any. Args: job_set: its name."""
    run_study = f"exec vitscale run /study/study.toml -o /shared/results/{job_set}"
    if not advised.has_several_hosts:
        return [_replicated_job(advised, job_set, name=_FIRST_JOB, pods=1, command=run_study)]
    run_on_hosts = f"{_WAIT_FOR_HOSTS}; {run_study} --hostfile /study/hosts"
    other_hosts = advised.option.nodes - 1
    return [
        _replicated_job(advised, job_set, name=_FIRST_JOB, pods=1, command=run_on_hosts),
        _replicated_job(advised, job_set, name=_OTHER_JOB, pods=other_hosts, command=_SERVE_SSH),
    ]


def _job_set_instructions(advised: _AdvisedStudy) -> str:
    """Return the comment at the head of a JobSet's file: what the user has to name, and how to start it."""
    script = advised.trial.train.script
    in_image = f"{advised.wheel.name}[train]"
    if script is not None:
        in_image += f" and the script {shown(script)}"
    hosts_note = ""
    if advised.has_several_hosts:
        hosts_note = " that all hosts may write to; the image has sshd, the secret id_ed25519 and authorized_keys"
    results = f"/shared/results/{_dns_label(advised.text)}"
    return (
        f"Written by vitscale advise. Name an image with {in_image} in it and a claim for /shared"
        f"{hosts_note}. Then: kubectl apply -f FILE. Results: {results}"
    )


def _replicated_job(advised: _AdvisedStudy, job_set: str, *, name: str, pods: int, command: str) -> dict[str, Any]:
    """Return an entry of a JobSet's `replicatedJobs`: a job with one pod on each of its hosts.

    Args:
        advised: the study.
        job_set: the name of the set.
        name: the job's name in the set.
        pods: number of hosts.
        command: the shell command of each pod.
    """
    gpus = {_gpu_resource(advised): advised.ranks_per_host} if advised.trial.train.device == "cuda" else {}
    mounts: list[dict[str, Any]] = [
        {"name": "study", "mountPath": "/study"},
        {"name": "shared", "mountPath": "/shared"},
        {"name": "memory", "mountPath": "/dev/shm"},  # noqa: S108 - the loaders' and NCCL's, in the pod
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "study", "configMap": {"name": _config_map_name(job_set)}},
        {"name": "shared", "persistentVolumeClaim": {"claimName": "REPLACE-BY-A-CLAIM"}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    if advised.has_several_hosts:
        mounts.append({"name": "ssh", "mountPath": "/root/.ssh"})
        ssh_config = f"/etc/ssh/ssh_config.d/{job_set}.conf"
        mounts.append({"name": "study", "mountPath": ssh_config, "subPath": _SSH_CONFIG_FILE})
        volumes.append({"name": "ssh", "secret": {"secretName": "REPLACE-BY-A-SECRET", "defaultMode": 0o400}})
    container = {
        "name": "vitscale",
        "image": "REPLACE-BY-AN-IMAGE",
        "command": ["bash", "-c", command],
        # Data decoded once, by the first host, is read by all.
        "env": [{"name": "VITSCALE_CACHE", "value": "/shared/cache"}],
        "resources": {"limits": gpus, "requests": {"cpu": advised.cores_per_host}},
        "volumeMounts": mounts,
    }
    pod = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
    job = {"parallelism": pods, "completions": pods, "backoffLimit": 0, "template": {"spec": pod}}
    return {"name": name, "replicas": 1, "template": {"spec": job}}


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


_LONGEST_LABEL = 36
"""A DNS label has 63 characters at most, and a pod's name is its set's with its job's and numbers behind it."""


def _dns_label(study: str) -> str:
    """Return the name of a study file's study as a DNS label, short enough for the names of pods made of it.

    Example: "ViT-B on 8 GPUs" gives "vit-b-on-8-gpus"; a name that begins with a digit gets "vitscale-" before it.
    """
    match = re.search(r'^name = "(.*)"$', study, re.MULTILINE)
    name = match[1].lower() if match else ""
    with_hyphens = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    label = with_hyphens[:_LONGEST_LABEL].strip("-")
    return label if label and label[0].isalpha() else f"vitscale-{label}".strip("-")


def _yaml_text(dumper: Any, text: str) -> Any:
    """Represent a text as YAML; one of several lines as a block."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper: Any = type("_Dumper", (yaml.SafeDumper,), {})
_Dumper.add_representer(str, _yaml_text)


def _yaml_file(comment: str, *documents: Mapping[str, Any]) -> str:
    """Return the text of a YAML file: a comment of one line, and then the documents."""
    texts = [
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=False) for document in documents
    ]
    return f"# {comment}\n" + "---\n".join(texts)
