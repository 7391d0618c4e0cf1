"""The answer of a function of `vitscale`: a document for readers, fields for programs, both from one object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from vitscale.present.document import Document
from vitscale.present.unread import Unread, beginning_with_unread, with_unread


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

    @property
    @abstractmethod
    def unread(self) -> Sequence[Unread] | None:
        """Finished runs that it lacks, for they cannot be read; None where it rests on no stored results."""

    @abstractmethod
    def _answer_fields(self) -> Mapping[str, Any]:
        """The content of its JSON, without the envelope and what is unread."""

    @abstractmethod
    def _answer_document(self) -> Document:
        """The document for readers, without what is unread."""

    def fields(self) -> Mapping[str, Any]:
        """Return the content of its JSON, without the envelope; where it rests on results, first what is unread."""
        fields = self._answer_fields()
        return fields if self.unread is None else with_unread(fields, self.unread)

    def document(self) -> Document:
        """Return the document for readers, which begins with what is unread: else it would look like any other."""
        return beginning_with_unread(self._answer_document(), self.unread or ())

    def to_json(self) -> str:
        """Return the text that the verb prints with `--json`: null stands for what is unavailable."""
        from vitscale.present.data import envelope

        return envelope(self.verb, self.fields())

    def to_markdown(self) -> str:
        """Return the document as Markdown; parts that are folded elsewhere are open here."""
        from vitscale.present.markdown import to_markdown

        return to_markdown(self.document())

    @override
    def __repr__(self) -> str:
        return f"<{self.verb}: {self.summary}>"

    def _repr_markdown_(self) -> str:
        """Return the document for a notebook that takes Markdown."""
        return self.to_markdown()

    def _repr_html_(self) -> str:
        """Return the document for a notebook that takes HTML: a folded part opens on request."""
        from vitscale.present.html import to_fragment

        return to_fragment(self.document())
