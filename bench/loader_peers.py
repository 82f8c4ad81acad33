"""One loader reads the same samples twice, in this process; what it took is printed as JSON. `loaders.py` runs it.

    python bench/loader_peers.py DATA READER process|workers

Each loader gets its own format, written by its own writer, and is used as its documentation shows. Nothing is decoded.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

BATCH = 64
WORKERS = 2
SAMPLES_PER_SHARD = 500


def samples(count: int) -> Iterator[dict[str, bytes]]:
    """A member of about 40 KB and a small JSON each."""
    chance = random.Random(1)
    for number in range(count):
        yield {
            "bin": chance.randbytes(chance.randint(35_000, 45_000)),
            "json": json.dumps({"n": number}).encode(),
        }


def write_tars(folder: Path, count: int) -> None:
    """For webdataset and for us."""
    import webdataset

    folder.mkdir()
    with webdataset.ShardWriter(f"{folder}/shard-%06d.tar", maxcount=SAMPLES_PER_SHARD, verbose=0) as writer:
        for number, sample in enumerate(samples(count)):
            writer.write({"__key__": f"{number:08d}", **sample})


def streaming() -> Any:
    """mosaicml-streaming, which imports torchvision, whose wheel on PyPI does not load beside a torch for CPUs."""
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        # The operators that are looked for while it is imported. Nothing of torchvision is used here.
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        sys.modules["torchvision::declared"] = declared  # type: ignore[assignment]  # kept alive
    import streaming

    return streaming


def write_mds(folder: Path, count: int) -> None:
    """For mosaicml-streaming."""
    with streaming().MDSWriter(out=str(folder), columns={"bin": "bytes", "json": "bytes"}) as writer:
        for sample in samples(count):
            writer.write(sample)


def write_litdata(folder: Path, count: int) -> None:
    """For litdata."""
    import litdata

    made = list(samples(count))
    litdata.optimize(
        fn=partial(_nth, made),
        inputs=list(range(count)),
        output_dir=str(folder),
        num_workers=1,
        chunk_bytes="64MB",
    )


def _nth(made: list[dict[str, bytes]], number: int) -> dict[str, bytes]:
    return made[number]


WRITERS = {"tar": write_tars, "mds": write_mds, "litdata": write_litdata}


def webdataset_reader(data: Path, way: str) -> Iterable[Any]:
    import webdataset
    from torch.utils.data import DataLoader

    urls = sorted(str(path) for path in (data / "tar").glob("*.tar"))
    plain = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
    if way == "process":
        return plain
    batches = plain.batched(BATCH, collation_fn=list)
    return DataLoader(batches, batch_size=None, num_workers=WORKERS, persistent_workers=True)


def streaming_reader(data: Path, way: str) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    dataset = streaming().StreamingDataset(local=str(data / "mds"), shuffle=False, batch_size=BATCH)
    if way == "process":
        return dataset
    return DataLoader(
        dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=list, persistent_workers=True
    )


def litdata_reader(data: Path, way: str) -> Iterable[Any]:
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(str(data / "litdata"), shuffle=False)
    if way == "process":
        return dataset
    return StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=_as_bytes, persistent_workers=True
    )


def _as_bytes(batch: list[dict[str, memoryview]]) -> list[dict[str, bytes]]:
    # litdata gives views of its chunks, which do not go through a pipe.
    return [{name: bytes(view) for name, view in sample.items()} for sample in batch]


def stager_reader(data: Path, way: str, *, copy: bool = True, batched: bool = False) -> Iterable[Any]:
    from stager import StagedDataset, StagedLoader

    size = BATCH if batched or way == "workers" else None
    dataset = StagedDataset(data / "tar", shuffle=False, decode=False, copy=copy, batch_size=size)
    if way == "process":
        return dataset
    return StagedLoader(dataset, num_workers=WORKERS, persistent_workers=True)


READERS: dict[str, Callable[[Path, str], Iterable[Any]]] = {
    "webdataset": webdataset_reader,
    "mosaicml-streaming": streaming_reader,
    "litdata": litdata_reader,  # in one process it gives views
    "stager": stager_reader,
    "stager, views": partial(stager_reader, copy=False, batched=True),
}


def contents(item: Any) -> Iterator[Any]:
    """The bytes of an item's large members: of one sample, of a list of them, or of a batch by columns."""
    if isinstance(item, list):
        for one in item:
            yield one["bin"]
    elif isinstance(item["bin"], list):
        yield from item["bin"]
    else:
        yield item["bin"]


def measure(make: Callable[[], Iterable[Any]]) -> dict[str, Any]:
    """Two passes over a new reader: the first opens and indexes everything, the second finds it open."""
    memory = PeakMemory()
    passes: list[dict[str, Any]] = []
    reader = None
    for _ in range(2):
        began = time.perf_counter()
        if reader is None:
            reader = make()
        count = size = touched = 0
        for item in reader:
            for data in contents(item):
                count += 1
                size += len(data)
                # A byte of the end is looked at, so that nobody hands out what is not there.
                touched += data[-1]
        seconds = time.perf_counter() - began
        passes.append({"samples": count, "bytes": size, "touched": touched, "seconds": seconds})
    peak = memory.stop()
    del reader
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in used)
    return {"passes": passes, "cpu_s": cpu_s, "memory_mib": peak}


class PeakMemory:
    """The most memory that this process and its children had that is not a file's: looked at every 50 ms."""

    def __init__(self) -> None:
        self._peak_kib = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """MiB."""
        self._stop.set()
        self._thread.join()
        return self._peak_kib / 1024

    def _look(self) -> None:
        while not self._stop.wait(0.05):
            self._peak_kib = max(self._peak_kib, _tree_kib("self"))


def _tree_kib(pid: str) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        tasks = list(Path(f"/proc/{pid}/task").glob("*/children"))
        children = [child for task in tasks for child in task.read_text().split()]
    except OSError:
        return 0
    own = sum(
        int(line.split()[1]) for line in status.splitlines() if line.startswith(("RssAnon:", "RssShmem:"))
    )
    return own + sum(map(_tree_kib, children))


def main() -> None:
    data, reader, way = sys.argv[1:]
    if way == "write":
        count = int(reader.partition(":")[2])
        WRITERS[reader.partition(":")[0]](Path(data, reader.partition(":")[0]), count)
        return
    # Imports are not what is measured.
    {"litdata": _import_litdata, "mosaicml-streaming": streaming}.get(reader, _import_others)()
    print(json.dumps(measure(partial(READERS[reader], Path(data), way))))


def _import_litdata() -> None:
    import litdata  # noqa: F401


def _import_others() -> None:
    import webdataset  # noqa: F401

    import stager.dataset  # noqa: F401


if __name__ == "__main__":
    main()
