"""What all equality and checkpoint tests share: each world of ranks is started once."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import jobs
from engines.curves import Curve, train
from forks import prepared_here


class Worlds:
    """Curves by number of ranks, trained when they are first asked for."""

    def __init__(self, folder: Path, *, by_day: bool) -> None:
        self.folder, self.by_day = folder, by_day
        self._curves: dict[int, dict[str, Curve]] = {}

    def __getitem__(self, ranks: int) -> dict[str, Curve]:
        if ranks not in self._curves:
            if ranks != 2:
                self[2]  # leaves the checkpoints
            self._curves[ranks] = train(
                jobs.of_world(ranks, self.folder / "2", by_day=self.by_day),
                ranks,
                self.folder / str(ranks),
                prepared_here(),
            )
        return self._curves[ranks]


@pytest.fixture(scope="session", params=["some", pytest.param("every", marks=pytest.mark.nightly)])
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("curves"), by_day=request.param == "some")
