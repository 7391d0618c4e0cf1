"""What a function of `vitscale` returns: a document for readers, fields for programs, both from one object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from vitscale.present.document import Document


class VerbResult(ABC):
    """The result of one verb. A notebook shows its document, a terminal prints it, `to_json` is the verb's `--json`."""

    @property
    @abstractmethod
    def verb(self) -> str:
        """Name of the verb in the envelope of its JSON, as in `present.data.VERSIONS`."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """A few words on what is in it, for its `repr`."""

    @abstractmethod
    def fields(self) -> Mapping[str, Any]:
        """The content of its JSON, without the envelope."""

    @abstractmethod
    def document(self) -> Document:
        """What a reader sees."""

    def to_json(self) -> str:
        """Returns the text that the verb prints with `--json`: null stands for what is unavailable."""
        from vitscale.present.data import envelope

        return envelope(self.verb, self.fields())

    def to_markdown(self) -> str:
        """Returns the document as Markdown; parts that are folded elsewhere are open here."""
        from vitscale.present.markdown import to_markdown

        return to_markdown(self.document())

    @override
    def __repr__(self) -> str:
        return f"<{self.verb}: {self.summary}>"

    def _repr_markdown_(self) -> str:
        """What a notebook shows that takes Markdown."""
        return self.to_markdown()

    def _repr_html_(self) -> str:
        """What a notebook shows that takes HTML: a folded part opens on request."""
        from vitscale.present.html import to_fragment

        return to_fragment(self.document())
