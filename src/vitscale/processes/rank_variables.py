"""The variables by which each launcher tells a process which rank it is: the one table of outside names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RankVariables:
    """The names that one family of launchers uses."""

    rank: str
    world_size: str
    local_rank: str
    others: tuple[str, ...] = ()
    """Further names that would mislead a process they were not meant for."""

    def given(self, environment: Mapping[str, str]) -> bool:
        """Whether a launcher of this family has started the process."""
        return self.rank in environment and self.world_size in environment


TORCH = RankVariables(
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    ("LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE"),
)
"""torchrun and DeepSpeed's launcher."""
OPEN_MPI = RankVariables(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",)
)
SLURM = RankVariables("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ("SLURM_NODEID", "SLURM_STEP_ID"))
"""srun."""

FAMILIES = (TORCH, OPEN_MPI, SLURM)
"""The innermost launcher first: torchrun may be started by srun, mpirun within a Slurm allocation."""

ALL_NAMES = tuple(
    name for family in FAMILIES for name in (family.rank, family.world_size, family.local_rank, *family.others)
)
"""Left over from a launcher around the driver, they would make a rank join a world that is not its own."""

LIBRARY_SETTINGS = (
    "NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "CUDA_", "TORCH_", "PYTORCH_", "DS_", "NVIDIA_TF32_",
)  # fmt: skip
"""Beginnings of the names of variables that libraries read: handed to all ranks, and recorded with each run."""
