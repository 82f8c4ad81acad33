"""What a source of a pack is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from stager.pack.findings import Findings
from stager.pack.samples import SourceFile


class Source(Protocol):
    """Where files come from, in an order that depends on nothing but the input.

    Attributes:
        name: A path or URL, for messages.
        keys_are_together: Whether the files of a sample come one after another, and no key comes back later.
    """

    @property
    def name(self) -> str: ...

    @property
    def keys_are_together(self) -> bool: ...

    def files(self, findings: Findings) -> Iterator[SourceFile]:
        """All files that can be packed; what is left out is added to ``findings``. Blocks."""
        ...
