"""The sections of a study file, which say what to vary and what to hold fixed.

[sweep] varies a field over its values, or a section over tables of fields that go together.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, Field, TypeAdapter, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from vitscale.base import plugins
from vitscale.errors import RequestError, nearest, shown
from vitscale.machine.batch_systems import BATCH_SYSTEMS, KUBERNETES
from vitscale.trial import script
from vitscale.trial.fields import FieldTraits, Spec, fields_where, sections_of, traits_of
from vitscale.trial.hints import meant_key
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import (
    FROM_LIST,
    MOST_RANKS,
    BatchCount,
    BatchNormScope,
    DataSpec,
    Mode,
    Seed,
    StepCount,
    TrainFields,
    WindowSpec,
)

RankCounts = Annotated[
    tuple[Annotated[int, Field(ge=1, le=MOST_RANKS)], ...], Field(min_length=1, max_length=1000), FROM_LIST
]

RankSpeeds = Annotated[
    tuple[Annotated[float, Field(gt=0.0, le=1000.0)], ...], Field(min_length=1, max_length=100_000), FROM_LIST
]


VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")]
WithoutNul = Annotated[str, Field(pattern=r"^[^\x00]*$")]
"""Text that can be the value of a variable or a word of a command."""


SlurmTime = Annotated[str, Field(pattern=r"^(\d+-)?\d{1,6}(:\d{2}){0,2}$")]
"""A time span in Slurm's notation: minutes, or [days-]hours:minutes:seconds."""


class TrainSection(TrainFields):
    """[train]: how to train, with "auto" where the machine or the data decide."""

    engine: str = "ddp"
    precision: Literal["fp32", "bf16", "bf16-params", "fp16", "auto"] = "auto"
    """auto: bf16 where the processor or GPU is fast at it, else fp32."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    """auto: cuda where there is a GPU."""
    micro_batch: BatchCount | None = None
    global_batch: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Global batch of strong-global; by default that of the smallest world."""
    optimizer: Literal["adamw", "sgd", "lamb"] = "adamw"
    batch_norm: BatchNormScope | None = None
    """Scope of batch norms in training; by default synchronised in segmentation and local in classification."""
    deepspeed_config: str | None = None
    rank_speeds: RankSpeeds | None = None
    """Relative speeds of the ranks, in rank order, as `vitscale check` measures them. Each rank's share of a
    micro-step's images follows its speed, so that all take equally long. By default all are equal."""


class ScalingSection(Spec):
    """[scaling]: the batch policy and the rank counts."""

    mode: Mode = "strong-micro"
    """What stays as ranks are added: the micro-batch, the global batch, or the images of each rank (weak)."""
    gpus: Annotated[RankCounts, FieldTraits(swept=False)] = (1,)
    """Ranks in all, on GPUs or on CPUs."""
    fraction_per_gpu: Annotated[float | None, FieldTraits(swept=False, curve_words="{:g} of the data per GPU")] = Field(
        default=None, gt=0.0, le=1.0
    )
    """Share of the training images per rank in weak; by default `data.fraction / max(gpus)`."""
    gpus_per_node: Annotated[int | None, FieldTraits(curve_words="{} to a host")] = Field(default=None, ge=1, le=4096)
    """Ranks on one host. N ranks take N / gpus_per_node hosts, fewer ranks one host; by default as many as a host has.
    Sweep it to compare the same rank count packed (8) and spread (1)."""


AUTO = "auto"


SCHEDULERS_WITHOUT_HOSTFILE = ("local", *BATCH_SYSTEMS, KUBERNETES)
"""Names of vitscale's own schedulers that read no hostfile."""
_SCHEDULERS = (AUTO, "local", "hostfile", *BATCH_SYSTEMS, KUBERNETES)


def _known_scheduler(name: str) -> str:
    """Refuse a scheduler that neither vitscale nor an installed package has; return any other name as it is."""
    if name in _SCHEDULERS or plugins.target("scheduler", name) is not None:
        return name
    valid_names = [f"'{scheduler}'" for scheduler in (*_SCHEDULERS, *sorted(plugins.names("scheduler")))]
    expected = f"{', '.join(valid_names[:-1])} or {valid_names[-1]}"
    raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})


class LaunchSection(Spec):
    """[launch]: how ranks are started and placed."""

    launcher: str = AUTO
    """auto: the launcher that results were begun with; for new ones `local` on this machine, `torchrun` elsewhere."""
    scheduler: Annotated[str, AfterValidator(_known_scheduler), FieldTraits(swept=False)] = "auto"
    """Scheduler of the runs. auto: `hostfile` where one is given, `slurm`, `pbs` or `lsf` inside a job, else this
    machine."""
    hostfile: Annotated[str | None, FieldTraits(swept=False)] = None
    """Hosts and how many ranks each takes: `NAME slots=4`, as DeepSpeed and Open MPI read them."""
    interface: Annotated[str | None, FieldTraits(swept=False)] = Field(
        default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,30}$"
    )
    """Network interface that ranks use (`NCCL_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME`, Open MPI's TCP)."""
    environment: Annotated[dict[VariableName, WithoutNul], FieldTraits(swept=False)] = Field(default_factory=dict)
    """Variables set in every rank."""
    threads_per_rank: int | None = Field(default=None, ge=1, le=4096)
    """Threads of each rank, equal along a curve; by default those that results were begun with, for new ones the
    machine's cores / max(gpus)."""
    oversubscribe: Annotated[bool, FieldTraits(swept=False)] = False
    """Allow more threads or ranks than there are cores or GPUs."""


ContainerRuntime = Literal["apptainer", "singularity", "podman", "pyxis"]
ContainerCommand = Literal["exec", "run"]
ContainerGpus = Literal["nvidia", "amd", "none"]


class ContainerFields(Spec):
    """The keys of a scheduler's section for the container in which ranks run (`schedulers/containers.py`)."""

    container: str | None = None
    """An image in which the ranks run."""
    container_runtime: ContainerRuntime = "apptainer"
    """Program that starts the container; pyxis starts Enroot as an option of srun."""
    container_command: ContainerCommand = "exec"
    """exec: start the ranks alone. run: hand their command to the image's own start (runscript, entrypoint)."""
    container_gpus: ContainerGpus | None = None
    """Vendor of the GPUs that the container sees (`--nv`, `--rocm`); by default nvidia, and none with gpus = "none"."""
    container_mounts: list[str] = Field(default_factory=list)
    """HOST:CONTAINER pairs, besides the results and the working directory."""


class JobFields(Spec):
    """The keys of [slurm] that jobs for many nodes may have other values of (`slurm.sizes`)."""

    partition: str | None = None
    """Partition (queue) of the jobs."""
    account: str | None = None
    """Account that the jobs are charged to."""
    qos: str | None = None
    """Quality of service of the jobs."""
    time: SlurmTime | None = None
    """Time limit of each job: minutes, or [days-]hours:minutes:seconds."""
    constraint: str | None = None
    """Features that the nodes must have."""
    reservation: str | None = None
    """Reservation whose nodes the jobs take."""


class SlurmSize(JobFields):
    """An entry of slurm.sizes: what replaces keys of [slurm] for worlds of many nodes; None leaves a key as it is."""

    min_nodes: int = Field(ge=1, le=1_000_000)
    """Fewest nodes of the worlds that it is for; where several entries fit, the one with the most counts."""


class SlurmSection(JobFields, ContainerFields):
    """[slurm]: what a batch system is asked for besides nodes, ranks and cores, which follow from each world.

    PBS, LSF and Flux take those keys that have a meaning there (`docs/clusters/pbs.md`).
    """

    jobs: Literal["job", "array", "trial-array"] = "job"
    """job: one job for each world, which does its runs in turn. array: one array per world, with one run in each
    element. trial-array: one array per world, with all runs of one trial in each element."""
    sizes: list[SlurmSize] = Field(default_factory=list)
    """Another partition, account, qos, time, constraint or reservation for worlds of many nodes."""
    nodelist: str | None = None
    """Nodes by name, "node[1-4],node7": each world takes the first of them."""
    exclude: str | None = None
    """Nodes that no job takes, by name."""
    gpus: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How GPUs are asked for: `--gpus-per-node=N`, `--gres=gpu:N`, or not at all."""
    gpu_type: str | None = None
    """The cluster's name for the GPUs: `--gpus-per-node=a100:4`."""
    modules: list[str] = Field(default_factory=list)
    """Modules to load (`module load`) before the ranks start, in this order."""
    python: WithoutNul | None = None
    """The interpreter on the compute nodes or in the container; by default the one that runs `vitscale`."""
    options: list[str] = Field(default_factory=list)
    """Further `#SBATCH` options, one each: "--mail-type=END"."""
    srun_options: list[str] = Field(default_factory=list)
    """Further options of the srun that starts ranks, one each: "--cpu-bind=cores"."""
    setup: list[str] = Field(default_factory=list)
    """Lines of shell in the batch script after the modules, for what a site needs. Only here is shell allowed."""


KubernetesName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
"""Name of an object of Kubernetes: a DNS subdomain."""
ResourceName = Annotated[
    str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
]
"""Name by which a device plug-in gives out GPUs."""
KubernetesQuantity = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,11}([kMGT]|[KMGT]i)?$")]
"""An amount of memory as Kubernetes writes it."""
AbsolutePath = Annotated[str, Field(pattern=r"^/[^\x00-\x1f\x7f]{1,1000}$")]


class KubernetesSection(Spec):
    """[kubernetes]: what a manifest needs besides hosts, ranks and cores, which follow from the study's worlds."""

    manifest: Literal["jobset", "trainjob"] = "jobset"
    """jobset: a JobSet (jobset.x-k8s.io). trainjob: a TrainJob of Kubeflow Trainer."""
    image: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,499}$")] | None = None
    """Image with vitscale and what training needs; every manifest needs one."""
    claim: KubernetesName | None = None
    """PersistentVolumeClaim that all pods may write to, for results and decoded data; every manifest needs one."""
    gpu_resource: ResourceName = "nvidia.com/gpu"
    """Name by which pods ask for GPUs: amd.com/gpu for AMD's."""
    shared_memory: KubernetesQuantity = "16Gi"
    """Most shared memory of a pod (/dev/shm), for NCCL and data loaders."""
    study: AbsolutePath | None = None
    """Path of the study file in the image, with the files that it names; None: a ConfigMap brings the study."""
    runtime: KubernetesName = "torch-distributed"
    """Kubeflow's ClusterTrainingRuntime of a TrainJob."""
    queue: KubernetesName | None = None
    """Kueue's queue, which starts all pods of a set at once or none."""


class NodeSection(Spec):
    """[node]: one host of the cluster, where it differs from the machine that plans (a login node)."""

    cores: int = Field(ge=1, le=100_000)
    """Processor cores that its ranks may use."""
    gpus: int = Field(default=0, ge=0, le=1024)
    """Number of its GPUs."""
    fast_bf16: bool = True
    """Whether its processor or its GPUs are faster in bf16 than in fp32."""
    memory_gb: float | None = Field(default=None, gt=0.0, le=1_000_000.0)
    """Memory of the host in GB (10^9 bytes), for all its ranks together; by default unknown."""


def _steps_or_auto(steps: Any, _: object) -> Any:
    """Validate measure.steps: a number of steps, "auto" or None.

    A validator of its own gives a wrong number one message; pydantic's would add another, that it is not "auto".
    """
    if isinstance(steps, str) and steps != AUTO:
        raise PydanticCustomError("steps", 'a whole number or "auto"')
    return steps if steps in (AUTO, None) else _STEP_COUNT.validate_python(steps, strict=True)


_STEP_COUNT: TypeAdapter[int] = TypeAdapter(StepCount)


class MeasureSection(WindowSpec):
    """[measure]: how long, how often, and when to give up."""

    steps: Annotated[StepCount | Literal["auto"] | None, WrapValidator(_steps_or_auto)] = None  # type: ignore[assignment]  # a trial has the number
    """Optimizer steps after warm-up. "auto": as few as tell a run's mean step (`step_schedule.shortest_run`)."""
    repeats: int = Field(default=3, ge=1, le=1000)
    """Runs of each trial."""
    target_ci: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Whole runs are added to a trial until the 95 % interval of its epoch time lies within this share of that time."""
    max_repeats: int = Field(default=10, ge=1, le=1000)
    """Most runs of a trial under `target_ci`."""
    max_gpu_hours: float | None = Field(default=None, gt=0.0)
    """GPUs x hours of all runs, start-up and failed tries included: no run begins that is expected to exceed this."""
    parallel_runs: int | None = Field(default=None, ge=1, le=10_000)
    """Most runs at a time: each on its own hosts of a hostfile or an allocation, or jobs of a batch system. By
    default one on hosts, and as many jobs as the batch system starts."""
    hang_seconds: float = Field(default=300.0, gt=0.0)
    """A run in which no rank records anything for this long is ended as `hang`."""
    timeout_seconds: float | None = Field(default=None, gt=0.0)
    """A run that takes longer is ended as `timeout`; by default none is."""
    order_seed: Seed = 0
    """Seed of the random order of runs."""
    retries: int = Field(default=1, ge=0, le=100)
    """How often a run is tried again if its cause was passing: a port in use, a host that did not answer."""


class Study(Spec):
    """One study file, or one point of its sweep."""

    name: str
    """Name of the study: 1 to 100 letters, digits, ".", "_" or "-"."""
    model: ModelSpec
    data: DataSpec
    train: TrainSection = TrainSection()
    parallel: ParallelSpec = ParallelSpec()
    scaling: ScalingSection = ScalingSection()
    # Made anew: a default with lists or tables in it would be copied deeply for each point of a sweep, which is slow.
    launch: LaunchSection = Field(default_factory=LaunchSection)
    slurm: SlurmSection = Field(default_factory=SlurmSection)
    kubernetes: KubernetesSection = KubernetesSection()
    node: NodeSection | None = None
    measure: MeasureSection = MeasureSection()
    sweep: dict[str, list[Any]] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _filled_for_script(cls, values: Any) -> Any:
        """Fill in engine, model and data of a study that trains by the user's own script, where it leaves them out.

        The script distributes training itself, and knows its model and its data. Values of wrong types are returned as
        they are: validation refuses them afterwards.

        Args:
            values: raw values of a study by section and key, not validated yet.
        """
        if not isinstance(values, dict):
            return values
        train = values.get("train", {})
        data = values.get("data", {})
        sweep = values.get("sweep", {})
        if not isinstance(train, dict):
            return values
        is_script_swept = isinstance(sweep, dict) and "train.script" in sweep
        is_scripted = "script" in train or is_script_swept
        if not is_scripted:
            return values
        filled: dict[str, Any] = {"model": {}, **values}
        filled["train"] = {"engine": script.NAME, **train}
        if isinstance(data, dict):
            filled["data"] = {"name": script.NAME, **data}
        return filled


SECTIONS = sections_of(Study)


def traits_of_label(field: str) -> FieldTraits:
    """Return the traits of a dotted field ("train.compile"); the default ones where a study has no such field."""
    section, _, key = field.partition(".")
    return traits_of(SECTIONS[section], key) if section in SECTIONS else FieldTraits()


FieldValues = dict[str, Any]
"""Dotted fields with the values that they take together: {"train.engine": "ddp", "train.micro_batch": 8}."""


_SWEPT_SECTIONS = ("data", "launch", "model", "parallel", "scaling", "train")
SWEEPABLE = sorted(
    f"{section}.{key}"
    for section in _SWEPT_SECTIONS
    for key in fields_where(SECTIONS[section], lambda traits: traits.swept and traits.role != "location")
)
"""Dotted fields that [sweep] may vary: not those along a curve, nor where images are found and where it may run."""


def choices(sweep: Mapping[str, Sequence[Any]]) -> list[list[FieldValues]]:
    """Return the choices of each key of [sweep]: one field each, or the fields of one table.

    Values are not judged here: each point of the sweep is validated as a study of its own.

    Example: {"train.micro_batch": [8, 16]} gives [[{"train.micro_batch": 8}, {"train.micro_batch": 16}]].

    Raises:
        RequestError: a field cannot be swept, is swept twice, has no value, or has one value twice.
    """
    choices_by_key = {key: _choices_of_key(key, values) for key, values in sweep.items()}
    key_by_field: dict[str, str] = {}
    for key, choices_of_key in choices_by_key.items():
        for field in _fields_in(choices_of_key):
            if field in key_by_field:
                keys = f"sweep.{shown(key_by_field[field])} and sweep.{shown(key)}"
                raise RequestError(
                    f"{keys} both vary {field}", next_step="Give all values of a field under one of the two"
                )
            key_by_field[field] = key
    return list(choices_by_key.values())


def _fields_in(choices_of_key: Sequence[FieldValues]) -> list[str]:
    """Return the fields of all choices of a key, each once, in the order of the tables."""
    fields: dict[str, None] = {}
    for choice in choices_of_key:
        fields |= dict.fromkeys(choice)
    return list(fields)


def _choices_of_key(key: str, values: Sequence[Any]) -> list[FieldValues]:
    """Return the choices of one key of [sweep], a dotted field or a section.

    Raises:
        RequestError: the key cannot be swept, has no value, or has one value twice.
    """
    if key not in SWEEPABLE and key not in _SWEPT_SECTIONS:
        raise _not_sweepable(key)
    if not values:
        raise RequestError(f"sweep.{shown(key)} is an empty list", next_step="Give at least one value")
    different_values = {_hashable(value) for value in values}
    if len(different_values) < len(values):
        what = f"sweep.{shown(key)} holds a value twice: {shown(values)}"
        raise RequestError(what, next_step="Name each value once")
    if key in SWEEPABLE:
        return [{key: value} for value in values]
    return [_table_fields(key, value) for value in values]


def _not_sweepable(key: str) -> RequestError:
    """Return the error for a key of [sweep] that is neither a field that can be swept nor a section.

    It names the field that is probably meant; else the fields that share a part with the key, "engine" with
    "train.engine" and "train.lr" with all of [train]; else the sections.
    """
    what = f"sweep.{shown(key)} is no field that can be swept"
    name = key.rpartition(".")[2]
    meaning = meant_key(name)  # the study's field where `name` is another program's word for one: "lr", "batch_size"
    if meaning is not None and meaning.field in SWEEPABLE:
        return RequestError(what, next_step=f'Write "{meaning.field}" = [...]')
    if key in ("gpus", "scaling.gpus"):
        return RequestError(what, next_step="It is a list already: write gpus = [1, 2, 4] in [scaling]")
    first_part = key.partition(".")[0]
    related_fields = [field for field in SWEEPABLE if first_part in field.split(".")]
    all_sections = [f"{section}.FIELD" for section in _SWEPT_SECTIONS]
    return RequestError(what, valid=related_fields or all_sections, hint=nearest(key, SWEEPABLE))


def _hashable(value: Any) -> Hashable:
    """Return a TOML value in a form that a set can hold; two forms are equal where the values are.

    Example: {"depths": [2, 2]} becomes frozenset({("depths", (2, 2))}).
    """
    if isinstance(value, dict):
        return frozenset((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, list):
        return tuple(map(_hashable, value))
    return cast("Hashable", value)


def _table_fields(section: str, table: Any) -> FieldValues:
    """Return the fields of one table under a section's key of [sweep], by dotted name.

    Raises:
        RequestError: it is no table or an empty one, or has a key that cannot be swept.
    """
    subject = f"sweep.{shown(section)}"
    section_keys = [field.partition(".")[2] for field in SWEEPABLE if field.startswith(f"{section}.")]
    if not isinstance(table, dict):
        example = section_keys[0]
        raise RequestError(
            f"{subject} names a section, and holds {shown(table)}",
            next_step=f"Give tables of fields that go together, as {{{example} = ...}}, or sweep one field, as "
            f'"{section}.{example}" = [...]',
        )
    if not table:
        raise RequestError(
            f"{subject} holds an empty table", next_step="Give each table at least one field, or leave it out"
        )
    fields: FieldValues = {}
    for key, value in table.items():
        if key in SWEEPABLE:  # a dotted name, usually of another section: of a split beside the engine that takes it
            fields[key] = value
        elif key in section_keys:
            fields[f"{section}.{key}"] = value
        else:
            what = f"{subject}: {shown(key)} is no field of [{section}] that can be swept"
            raise RequestError(what, valid=section_keys, hint=nearest(key, section_keys))
    return fields
