"""What packing finds in its input: what was left out and counted, and what may not be left out without a word.

A finding is either *excluded* by a rule that is always on (hidden files), *skipped* because the user said so, or *refused*:
then nothing is written, and one error names all of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Literal

from stager.errors import UsageError

EXAMPLES_MAX = 10

OnProblem = Literal["fail", "skip"]
OnLink = Literal["inside", "follow", "skip"]


class Kind(StrEnum):
    """What can be found. The value stands in summaries."""

    HIDDEN = "hidden"
    UNWANTED = "not asked for by --include and --exclude"
    SPECIAL = "special file"
    LINK_SKIPPED = "symbolic link"
    LINK = "symbolic link that leads out of the source, to a directory, or nowhere"
    UNREADABLE = "cannot be read"
    UNKEYABLE = "its name makes no sample"
    DOUBLE = "the same field of the same sample again"
    DOTTED = "dot in the stem"


HINTS = {
    Kind.LINK: "`--symlinks follow` packs what they point to, `--symlinks skip` leaves them out",
    Kind.UNREADABLE: "make them readable for this user, or leave them out with `--on-error skip`",
    Kind.UNKEYABLE: "a sample's name is `key.field`, e.g. `001.jpg`: rename them, or leave them out with"
    " `--on-unkeyable skip`",
    Kind.DOUBLE: "fields are compared in lower case: rename one, or keep only the first with `--on-unkeyable skip`",
}


@dataclass(frozen=True, slots=True)
class Policies:
    """What is done with input that cannot be packed as it is.

    Attributes:
        on_error: A file that cannot be read, has vanished, or changes while it is read.
        on_unkeyable: A name that makes no sample by webdataset's rules, or the same field of a sample twice.
        symlinks: ``inside`` packs links to files within their source and refuses the others.
        include: Patterns of file names; a file must match one of them, if there is any.
        exclude: Patterns of names of files and directories that are left out.
    """

    on_error: OnProblem = "fail"
    on_unkeyable: OnProblem = "fail"
    symlinks: OnLink = "inside"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def wants(self, name: str, *, directory: bool = False) -> bool:
        """Whether a file or directory of this last part of its path is to be looked at."""
        if any(fnmatchcase(name, pattern) for pattern in self.exclude):
            return False
        return directory or not self.include or any(fnmatchcase(name, pattern) for pattern in self.include)

    def refuses(self, kind: Kind) -> bool:
        match kind:
            case Kind.UNREADABLE:
                return self.on_error == "fail"
            case Kind.UNKEYABLE | Kind.DOUBLE:
                return self.on_unkeyable == "fail"
            case Kind.LINK:
                return True
            case _:
                return False


@dataclass(slots=True)
class Findings:
    """Counts of what was found, with a few examples of each kind.

    Attributes:
        counts: How many of each kind.
        examples: ``path: reason`` of the first few of each kind.
    """

    policies: Policies = field(default_factory=Policies)
    counts: Counter[Kind] = field(default_factory=Counter)
    examples: dict[Kind, list[str]] = field(default_factory=dict)

    def add(self, kind: Kind, path: str, reason: str = "") -> None:
        self.counts[kind] += 1
        shown = self.examples.setdefault(kind, [])
        if len(shown) < EXAMPLES_MAX:
            shown.append(f"{shown_path(path)}: {reason}" if reason else shown_path(path))

    @property
    def left_out(self) -> dict[str, int]:
        """How many files were left out, by reason, sorted; warnings are not among them."""
        return {str(kind): count for kind, count in sorted(self.counts.items()) if kind is not Kind.DOTTED}

    def raise_refused(self) -> None:
        """One error for everything that the policies do not allow to be left out.

        Raises:
            UsageError: There is such a thing; names the first few of each kind.
        """
        refused = [kind for kind in Kind if self.counts[kind] and self.policies.refuses(kind)]
        if not refused:
            return
        lines = []
        for kind in refused:
            count = self.counts[kind]
            lines.append(f"{count} {'file' if count == 1 else 'files'}: {kind}")
            lines += [f"  {example}" for example in self.examples[kind]]
            if count > EXAMPLES_MAX:
                lines.append(f"  and {count - EXAMPLES_MAX} more")
        raise UsageError(
            "nothing was packed, because the input has problems\n" + "\n".join(lines),
            subject=self.examples[refused[0]][0],
            hint="; ".join(HINTS[kind] for kind in refused),
        )


def shown_path(path: str) -> str:
    """A path in backquotes; bytes that are not UTF-8 and control characters are escaped, so that it prints anywhere."""
    plain = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return (
        "`"
        + "".join(
            letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in plain
        )
        + "`"
    )
