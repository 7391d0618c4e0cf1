"""YAML files for other programs: a comment, and documents whose texts of several lines are blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml


def _represent_text(dumper: Any, text: str) -> Any:
    """Represent a text as YAML; one of several lines as a block."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper: Any = type("_Dumper", (yaml.SafeDumper,), {})
_Dumper.add_representer(str, _represent_text)


def yaml_file(comment: str, *documents: Mapping[str, Any]) -> str:
    """Return the text of a YAML file: a comment of one line, and then the documents, keys in their order."""
    texts = [
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=False) for document in documents
    ]
    return f"# {comment}\n" + "---\n".join(texts)
