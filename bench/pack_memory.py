"""What memory a survey of millions of files takes, with a shuffle and without; the listing is made up, no file exists.

python bench/pack_memory.py [--files 5000000] [--seed 1]
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from typing import ClassVar

from stager.pack.findings import Findings
from stager.pack.samples import SourceFile
from stager.pack.survey import PackInput, survey


class MadeUp:
    """Two files a sample, a thousand samples a folder, as a directory would give them."""

    name = "/made/up"
    keys_are_together: ClassVar[bool] = True

    def __init__(self, files: int) -> None:
        self.count = files

    def files(self, findings: Findings) -> Iterator[SourceFile]:
        for number in range(self.count // 2):
            key = f"{number // 1000:06d}/{number:09d}"
            for field, size in (("jpg", 20_000), ("json", 200)):
                yield SourceFile(f"{key}.{field}", f"/made/up/{key}.{field}", size, number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--files", type=int, default=5_000_000)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    began = time.perf_counter()
    surveyed = survey(PackInput((MadeUp(options.files),), seed=options.seed))
    samples = sum(len(plan.samples) for plan in surveyed.plans("shard"))
    surveyed.listing.close()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"{options.files} files, seed {options.seed}: {samples} samples in {surveyed.shards} shards,"
        f" surveyed and planned in {time.perf_counter() - began:.0f} s, at most {most} MiB"
    )


if __name__ == "__main__":
    main()
