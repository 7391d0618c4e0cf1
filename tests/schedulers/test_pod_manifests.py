"""Manifests: as they were looked at, as the projects' own schemas want them, and with names that DNS takes.

`crds/` holds the schemas of both custom resources, reduced: `$comment` in each names its source. Every name of a field
is kept where a manifest has something; what lies below fields that no manifest sets is left out. Elsewhere an unknown
field is an error, as with `kubectl --validate=strict`.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vitscale.errors import RequestError
from vitscale.schedulers.pod_manifests import ManifestKind, PodSet, dns_label, manifest

HERE = Path(__file__).parent
KINDS: tuple[ManifestKind, ...] = get_args(ManifestKind)
ON_GPUS = PodSet(
    study_name="ViT-B on 16 GPUs",
    pods=2,
    ranks_per_pod=8,
    cores=96,
    on_gpus=True,
    gpu_resource="amd.com/gpu",
    image="registry.example/vitscale:1",
    claim="vitscale",
    shared_memory="64Gi",
    study='name = "ViT-B on 16 GPUs"\n',
    site='[launch]\nscheduler = "kubernetes"\n',
    arguments=("--scheduler", "kubernetes", "measure.steps=10"),
    queue="research",
)
ON_CPUS = replace(
    ON_GPUS, study_name="small", pods=1, ranks_per_pod=2, cores=2, on_gpus=False, study=None,
    study_in_image="/opt/study.toml", site=None, arguments=(), queue=None,
)  # fmt: skip
SETS = {"gpus": ON_GPUS, "cpus": ON_CPUS}
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
"""RFC 1035, which JobSet's webhook asks of names of jobs, pods and services."""


def documents(kind: ManifestKind, pod_set: PodSet) -> tuple[dict[str, Any], dict[str, Any]]:
    """ConfigMap, and JobSet or TrainJob."""
    config_map, started = yaml.safe_load_all(manifest(kind, pod_set, "Start it."))
    return config_map, started


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETS)
def test_manifests_are_as_they_were_looked_at(kind: ManifestKind, name: str) -> None:
    assert manifest(kind, SETS[name], "Start it.") == (HERE / f"golden/{kind}-{name}.yaml").read_text()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETS)
def test_the_projects_own_schemas_take_them(kind: ManifestKind, name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    _, started = documents(kind, SETS[name])
    jsonschema.validate(started, schema(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_the_schemas_refuse_what_the_projects_do_not_know(kind: ManifestKind) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    _, started = documents(kind, ON_GPUS)
    volumes = next(_values(started, "volumes"))
    volumes[1]["persistentVolumeClaim"] = {"claim": "vitscale"}
    with pytest.raises(jsonschema.ValidationError, match="claim"):
        jsonschema.validate(started, schema(kind))


def schema(kind: ManifestKind) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((HERE / f"crds/{kind}.json").read_text())
    return read


def _values(value: Any, key: str) -> Any:
    """Yield the values of a key, at any depth."""
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        for inner in value.values():
            yield from _values(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner, key)


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_pods_as_hosts_with_gpus_for_their_ranks_of_the_vendors_resource(kind: ManifestKind) -> None:
    _, started = documents(kind, ON_GPUS)
    if kind == "jobset":
        (job,) = started["spec"]["replicatedJobs"]
        spec = job["template"]["spec"]
        assert (job["replicas"], spec["parallelism"], spec["completions"]) == (1, 2, 2)
    else:
        assert (started["spec"]["trainer"]["numNodes"], started["spec"]["trainer"]["numProcPerNode"]) == (2, 8)
    key = "resources" if kind == "jobset" else "resourcesPerNode"
    assert next(_values(started, key)) == {"limits": {"amd.com/gpu": 8}, "requests": {"cpu": 96}}
    assert {"medium": "Memory", "sizeLimit": "64Gi"} in _values(started, "emptyDir")


@pytest.mark.parametrize("kind", KINDS)
def test_pods_find_one_another_by_the_names_that_the_set_gives_them(kind: ManifestKind) -> None:
    """JOBSET-JOB-REPLICA-POD.SUBDOMAIN; a TrainJob becomes a JobSet of its name, with a job "node"."""
    config_map, started = documents(kind, ON_GPUS)
    name = started["metadata"]["name"]
    lines = [f"{name}-node-0-{pod}.{name} slots=8" for pod in range(2)]
    assert config_map["data"]["hosts"].splitlines() == lines
    if kind == "jobset":
        assert started["spec"]["network"]["subdomain"] == name
        assert [job["name"] for job in started["spec"]["replicatedJobs"]] == ["node"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETS)
def test_every_mount_has_its_volume_and_every_file_its_key(kind: ManifestKind, name: str) -> None:
    config_map, started = documents(kind, SETS[name])
    (mounts,) = _values(started, "volumeMounts")
    (volumes,) = _values(started, "volumes")
    assert [mount["name"] for mount in mounts] == [volume["name"] for volume in volumes]
    assert volumes[0]["configMap"]["name"] == config_map["metadata"]["name"]
    text = json.dumps(started)
    for path in re.findall(r"/study/([\w.]+)", text):
        assert path in config_map["data"]
    assert ("study.toml" in config_map["data"]) == (SETS[name].study is not None)


names = st.text(st.characters(min_codepoint=1, max_codepoint=0x17F), max_size=100)


@given(names, st.integers(1, 10_000))
def test_every_name_is_one_that_dns_takes(study_name: str, pods: int) -> None:
    pod_set = replace(ON_CPUS, study_name=study_name, pods=pods)
    last_pod = pod_set.hosts[-1].name.partition(".")[0]
    for name in (pod_set.name, f"{pod_set.name}-node-0", f"{last_pod}-abcde"):
        assert DNS_LABEL.fullmatch(name), name


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("ViT-B on 8 GPUs", "vit-b-on-8-gpus"), ("8-gpus", "vitscale-8-gpus"), ("", "vitscale"), ("...", "vitscale"),
        ("a" * 80, "a" * 36), ("a" * 35 + ".b", "a" * 35), ("é_x", "x"),
    ],
)  # fmt: skip
def test_names_by_example(name: str, label: str) -> None:
    assert dns_label(name) == label


def test_a_study_that_no_config_map_takes_is_refused() -> None:
    with pytest.raises(RequestError, match=r"at most 1,000,000.*kubernetes\.study"):
        manifest("jobset", replace(ON_GPUS, study="#" * 1_000_000), "Start it.")


def test_a_jobset_fails_at_once_where_the_study_does_and_is_started_again_where_pods_are_lost() -> None:
    _, job_set = documents("jobset", ON_GPUS)
    policy = job_set["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 3
    assert policy["rules"] == [
        {"name": "studyFailed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]
    spec = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": "node", "operator": "In", "values": [1, 2]}
    assert (spec["backoffLimit"], spec["template"]["spec"]["restartPolicy"]) == (0, "Never")
