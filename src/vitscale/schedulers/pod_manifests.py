"""Manifests of Kubernetes that run a study: a ConfigMap, and a JobSet or a TrainJob that runs a pod on each host.

Fields are as in the sources of JobSet 0.8 (`api/jobset/v1alpha2/jobset_types.go`), of Kubeflow Trainer 2.2
(`pkg/apis/trainer/v1alpha1/trainjob_types.go`, whose `runtimePatches` older ones do not have), and of its runtime
`torch-distributed`, with a job and a container both called "node". A TrainJob becomes a JobSet of the same name, so the
pods of either have the same names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vitscale.base.yaml_files import yaml_file
from vitscale.errors import RequestError
from vitscale.machine.batch_systems import PODS_VARIABLE
from vitscale.machine.hosts import Host

ManifestKind = Literal["jobset", "trainjob"]

_NODE = "node"
"""Name of the job in the set, and of its container, as in Kubeflow's runtime."""
_STUDY_FOLDER = "/study"
"""Where pods see the files of the ConfigMap."""
_STUDY_FILE = "study.toml"
_SITE_FILE = "site.toml"
_HOSTFILE = "hosts"
_SHARED_FOLDER = "/shared"
"""Where pods see the common volume."""
_LONGEST_LABEL = 36
"""Characters of a set's name. A DNS label has 63 at most, and a pod's name is its set's with its job's, numbers and
five more characters behind it."""
_MOST_CONFIG_MAP_BYTES = 1_000_000
"""A little less than the 1 MiB that a ConfigMap may have."""
_MOST_RESTARTS = 3
"""How often a JobSet is started again whose pods were evicted, lost or out of memory."""
_GRACE_SECONDS = 120
"""Time that a pod has to end the run under way and write its outcome, once it is to end."""
_FINAL_CODES = [1, 2]
"""Exit codes after which a restart would end the same way: a run failed, or the request was wrong."""
_MANAGER = "vitscale"
"""Who a patch of Kubeflow's runtime belongs to."""


@dataclass(frozen=True)
class PodSet:
    """Pods that run a study, one on each host."""

    study_name: str
    """Name of the study, from which that of the set and of the results folder follow."""
    pods: int
    """Hosts of the largest trial."""
    ranks_per_pod: int
    """Most ranks on one host."""
    cores: int
    """Cores that a pod's ranks need."""
    on_gpus: bool
    """Whether ranks compute on GPUs, one each."""
    gpu_resource: str
    """Name by which a pod asks for GPUs."""
    image: str
    claim: str
    """The PersistentVolumeClaim of the common volume."""
    shared_memory: str
    """Most shared memory of a pod, in Kubernetes' notation."""
    study: str | None
    """Text of the study file, for the ConfigMap; None: it lies in the image."""
    study_in_image: str = ""
    """Path of the study file in the image, where it lies there."""
    site: str | None = None
    """Text of the site file; None without one."""
    arguments: tuple[str, ...] = field(default=())
    """Further arguments of `vitscale run`: KEY=VALUE words."""
    queue: str | None = None
    """Kueue's queue."""
    runtime: str = "torch-distributed"
    """Kubeflow's ClusterTrainingRuntime."""

    @property
    def name(self) -> str:
        """Name of the set, a DNS label."""
        return dns_label(self.study_name)

    @property
    def results(self) -> str:
        """Path of the results folder in the pods."""
        return f"{_SHARED_FOLDER}/results/{self.name}"

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The pods by their names, SET-JOB-REPLICA-POD.SUBDOMAIN, where the subdomain is the set's name."""
        names = [f"{self.name}-{_NODE}-0-{pod}.{self.name}" for pod in range(self.pods)]
        return tuple(Host(name, self.ranks_per_pod) for name in names)

    @property
    def command(self) -> list[str]:
        """The program of each pod, with its arguments."""
        study = self.study_in_image or f"{_STUDY_FOLDER}/{_STUDY_FILE}"
        site_option = [] if self.site is None else ["--site", f"{_STUDY_FOLDER}/{_SITE_FILE}"]
        return ["python3", "-P", "-m", "vitscale.runner.pod", self.results, study, *site_option, *self.arguments]


def manifest(kind: ManifestKind, pod_set: PodSet, instructions: str) -> str:
    """Return the text of a manifest, which `kubectl apply -f FILE` starts.

    Args:
        kind: what runs the pods.
        pod_set: the pods.
        instructions: a comment of one line for its head.

    Raises:
        RequestError: study and site file are larger than a ConfigMap may be.
    """
    object_of_kind = _job_set(pod_set) if kind == "jobset" else _train_job(pod_set)
    return yaml_file(instructions, _config_map(pod_set), object_of_kind)


def dns_label(name: str) -> str:
    """Return a study's name as a DNS label (RFC 1035), short enough for the names of pods made of it.

    Example: "ViT-B on 8 GPUs" gives "vit-b-on-8-gpus"; a name that begins with a digit gets "vitscale-" before it.
    """
    with_hyphens = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    begins_with_letter = with_hyphens[:1].isalpha()
    whole_label = with_hyphens if begins_with_letter else f"vitscale-{with_hyphens}"
    return whole_label[:_LONGEST_LABEL].strip("-")


def _config_map(pod_set: PodSet) -> dict[str, Any]:
    """Return the ConfigMap with the files that pods read.

    Raises:
        RequestError: they are larger than a ConfigMap may be.
    """
    files = {_HOSTFILE: "".join(f"{host.name} slots={host.slots}\n" for host in pod_set.hosts)}
    if pod_set.study is not None:
        files[_STUDY_FILE] = pod_set.study
    if pod_set.site is not None:
        files[_SITE_FILE] = pod_set.site
    size_bytes = sum(len(text.encode()) for text in files.values())
    if size_bytes > _MOST_CONFIG_MAP_BYTES:
        raise RequestError(
            f"study, site file and host names have {size_bytes:,} bytes, and a ConfigMap takes fewer",
            valid=[f"at most {_MOST_CONFIG_MAP_BYTES:,}"],
            next_step="Put the study into the image, and name its path there: kubernetes.study",
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": _config_map_name(pod_set)},
        "data": files,
    }


def _config_map_name(pod_set: PodSet) -> str:
    """Return the name of the ConfigMap with the files that pods read."""
    return f"{pod_set.name}-study"


def _metadata(pod_set: PodSet) -> dict[str, Any]:
    """Return the name of a set, and its queue."""
    labels = {} if pod_set.queue is None else {"labels": {"kueue.x-k8s.io/queue-name": pod_set.queue}}
    return {"name": pod_set.name} | labels


def _job_set(pod_set: PodSet) -> dict[str, Any]:
    """Return a JobSet with one Indexed Job.

    It fails for good where the study ends with a failure, and is started again where pods are lost.
    """
    container = {
        "name": _NODE,
        "image": pod_set.image,
        "command": pod_set.command,
        "workingDir": _SHARED_FOLDER,
        "env": _environment(),
        "resources": _resources(pod_set),
        "volumeMounts": _volume_mounts(),
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [container],
        "volumes": _volumes(pod_set),
    }
    ends_for_good = {"containerName": _NODE, "operator": "In", "values": _FINAL_CODES}
    job = {
        "completionMode": "Indexed",
        "parallelism": pod_set.pods,
        "completions": pod_set.pods,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": ends_for_good}]},
        "template": {"spec": pod},
    }
    study_failed = {"name": "studyFailed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(pod_set),
        "spec": {
            "failurePolicy": {
                "maxRestarts": _MOST_RESTARTS,
                # No pod of the last try writes any more when the next one begins.
                "restartStrategy": "BlockingRecreate",
                "rules": [study_failed],
            },
            "network": {"enableDNSHostnames": True, "subdomain": pod_set.name, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _train_job(pod_set: PodSet) -> dict[str, Any]:
    """Return a TrainJob; what it cannot say of volumes is a patch of its runtime."""
    # A pod keeps Kubernetes' 30 s to end in: Trainer 2.2 takes no patch of terminationGracePeriodSeconds.
    pod_patch = {
        "volumes": _volumes(pod_set),
        "containers": [{"name": _NODE, "volumeMounts": _volume_mounts()}],
    }
    job_patch = {"name": _NODE, "template": {"spec": {"template": {"spec": pod_patch}}}}
    patch = {
        "manager": _MANAGER,
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job_patch]}}},
    }
    command, *arguments = _in_folder(pod_set.command)
    trainer = {
        "image": pod_set.image,
        "command": [command],
        "args": arguments,
        "env": _environment(),
        "numNodes": pod_set.pods,
        "numProcPerNode": pod_set.ranks_per_pod,
        "resourcesPerNode": _resources(pod_set),
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(pod_set),
        "spec": {
            "runtimeRef": {"name": pod_set.runtime, "kind": "ClusterTrainingRuntime"},
            "trainer": trainer,
            "runtimePatches": [patch],
        },
    }


def _in_folder(command: list[str]) -> list[str]:
    """Return an argv that runs a command in the common volume: a TrainJob has no working folder of its own."""
    return ["env", f"--chdir={_SHARED_FOLDER}", *command]


def _environment() -> list[dict[str, str]]:
    """Return the variables of each pod: its hostfile, and the folder for images that are decoded once for all."""
    variables = {PODS_VARIABLE: f"{_STUDY_FOLDER}/{_HOSTFILE}", "VITSCALE_CACHE": f"{_SHARED_FOLDER}/cache"}
    return [{"name": name, "value": value} for name, value in variables.items()]


def _resources(pod_set: PodSet) -> dict[str, Any]:
    """Return what a pod asks for: cores, which it may exceed, and GPUs, of which it gets as many as it has ranks."""
    requests: Mapping[str, Any] = {"cpu": pod_set.cores}
    if not pod_set.on_gpus:
        return {"requests": requests}
    return {"limits": {pod_set.gpu_resource: pod_set.ranks_per_pod}, "requests": requests}


def _volume_mounts() -> list[dict[str, Any]]:
    """Return where a pod sees its volumes."""
    return [
        {"name": "vitscale-study", "mountPath": _STUDY_FOLDER},
        {"name": "vitscale-shared", "mountPath": _SHARED_FOLDER},
        {"name": "vitscale-memory", "mountPath": "/dev/shm"},  # noqa: S108 - the loaders' and NCCL's, in the pod
    ]


def _volumes(pod_set: PodSet) -> list[dict[str, Any]]:
    """Return the volumes of a pod: files of the ConfigMap, the common volume, shared memory."""
    return [
        {"name": "vitscale-study", "configMap": {"name": _config_map_name(pod_set)}},
        {"name": "vitscale-shared", "persistentVolumeClaim": {"claimName": pod_set.claim}},
        {"name": "vitscale-memory", "emptyDir": {"medium": "Memory", "sizeLimit": pod_set.shared_memory}},
    ]
