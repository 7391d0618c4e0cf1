from __future__ import annotations

import pytest

from vitscale.schedulers.host_lists import expand_host_list


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node7", ["node7"]),
        ("a,b-1.example", ["a", "b-1.example"]),
        ("node[1-3,7],login1", ["node1", "node2", "node3", "node7", "login1"]),
        ("node[08-10]", ["node08", "node09", "node10"]),
        ("node[099-101]", ["node099", "node100", "node101"]),
        ("nid[1-2]-hsn", ["nid1-hsn", "nid2-hsn"]),
        ("node[2,1-2]", ["node2", "node1"]),
    ],
)
def test_names(text: str, names: list[str]) -> None:
    assert expand_host_list(text) == names


@pytest.mark.parametrize(
    "text",
    ["", ",", "node1,", "node[]", "node[1-", "node[3-1]", "node[a-b]", "r[1-2]n[1-2]", "a b", "$(x)", "n[1-999999999]",
     "n[0-99999],m", "n" * 200_000],
)  # fmt: skip
def test_texts_that_are_no_list(text: str) -> None:
    with pytest.raises(ValueError, match=r"host|numbers|long"):
        expand_host_list(text)
