"""What is known of batch systems without asking them: the variables of their jobs, and their words for messages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitscale
from vitscale.machine.batch_systems import BATCH_SYSTEMS, FLUX, LSF, PBS, SLURM, BatchSystemFacts, system_of_job


@pytest.mark.parametrize(
    ("variables", "system"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "12"}, SLURM),
        ({"PBS_JOBID": "12.pbs1"}, None),  # PBS names no nodes
        ({"PBS_JOBID": "12.pbs1", "PBS_NODEFILE": "/var/nodes"}, PBS),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "node1 8"}, LSF),
        ({"LSB_MCPU_HOSTS": "node1 8"}, None),
        ({"FLUX_ENCLOSING_ID": "f1"}, None),  # also outside jobs
    ],
)
def test_the_job_around_a_process(variables: dict[str, str], system: BatchSystemFacts | None) -> None:
    assert system_of_job(variables) is system


def test_no_two_have_a_word_in_common() -> None:
    for field in ("title", "allocation_command", "cancel_program", "list_command", "job_id_variable"):
        words = {getattr(system, field) for system in BATCH_SYSTEMS.values()}
        assert len(words) == len(BATCH_SYSTEMS)
    assert FLUX.list_command.format(names="a") == "flux jobs -a"
    assert SLURM.list_command.format(names="a,b") == "squeue --name=a,b"


def batch_systems_in_comparison(tree: ast.AST) -> Iterator[ast.Compare]:
    """Yield comparisons of what is called a scheduler or a system with a name of one of them."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        parts = list(ast.walk(node))
        names = {getattr(part, "attr", getattr(part, "id", None)) for part in parts}
        texts = {part.value for part in parts if isinstance(part, ast.Constant)}
        if names & {"scheduler", "system", "submitter", "title"} and texts & {*BATCH_SYSTEMS, *TITLES}:
            yield node


TITLES = [system.title for system in BATCH_SYSTEMS.values()]


def test_no_name_of_a_batch_system_is_compared() -> None:
    """Who differs by batch system asks its facts, so that a new one need not be looked for."""
    package = Path(vitscale.__file__).parent
    quoted_names = [f'"{name}"' for name in (*BATCH_SYSTEMS, *TITLES)]
    texts = {file: file.read_text(encoding="utf-8") for file in package.rglob("*.py")}
    with_a_name = [file for file, text in texts.items() if any(name in text for name in quoted_names)]
    found = [
        f"{file.relative_to(package)}:{comparison.lineno}"
        for file in with_a_name
        for comparison in batch_systems_in_comparison(ast.parse(texts[file]))
    ]
    assert found == []
    assert [*batch_systems_in_comparison(ast.parse('if scheduler in ("local", "pbs"): pass'))] != []
