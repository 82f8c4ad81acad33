"""Orbax: ``<step>/``, renamed from ``<step>.orbax-checkpoint-tmp``; on object stores marked by ``commit_success.txt``.

``_CHECKPOINT_METADATA`` gets its time of commit when everything is written. Arrays lie in OCDBT databases, one a process
and one over them, each with a ``manifest.ocdbt``. Source: Orbax ``_src/path/atomicity.py``,
``_src/metadata/step_metadata_serialization.py``.
"""

from __future__ import annotations

import re

from stager.formats.layouts.api import SETTLE_MARKED_S, SETTLE_SOUND_S, Candidate, Unfinished
from stager.formats.layouts.rules import Found, Rules, read_json
from stager.formats.layouts.steps import is_directory_name

_METADATA = "_CHECKPOINT_METADATA"
_SUCCESS = "commit_success.txt"
_PROCESS = re.compile(r"(?P<database>(?P<over>.*/)?ocdbt\.process_[0-9]+)/.+", re.DOTALL)


def _claims(candidate: Candidate) -> bool:
    return not candidate.is_file and is_directory_name(candidate.name) and _METADATA in candidate.listing


def _check(candidate: Candidate) -> Found:
    committed = read_json(candidate, _METADATA).get("commit_timestamp_nsecs")
    if not isinstance(committed, int) or committed <= 0:
        raise Unfinished(f"`{_METADATA}` has no time of commit yet")
    processes = [match for path in candidate.listing if (match := _PROCESS.fullmatch(path))]
    # One over those of the processes; it comes when all have written.
    databases = {f"{match['database']}/" for match in processes} | {match["over"] or "" for match in processes}
    for database in sorted(databases):
        manifest = f"{database}manifest.ocdbt"
        if manifest not in candidate.listing or candidate.listing[manifest].size == 0:
            raise Unfinished(f"no `{manifest}` yet")
    if len(candidate.listing) == 1:
        raise Unfinished(f"it holds nothing but `{_METADATA}`")
    return Found(SETTLE_SOUND_S if _SUCCESS in candidate.listing else SETTLE_MARKED_S)


LAYOUT = Rules("orbax", _claims, _check, (re.compile(_METADATA), re.compile(re.escape(_SUCCESS))))
