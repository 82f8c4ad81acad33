"""When a reader's lanes read which shards in an epoch, window by window. Pure.

A window's shards are taken as needed from its first sample to its last: within a window the order is random, so that each
is needed early. Only of the window that is being read the order of first needs is looked up, for a good start.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import merge

from stager.formats.order import EpochOrder, LaneWindow, ShardUse, peak_live_bytes


class EpochSchedule:
    """One epoch of some lanes."""

    def __init__(self, order: EpochOrder, lanes: Sequence[int]) -> None:
        self.samples = order.samples
        self._order = order
        self._lanes = lanes
        self._windows = [list(order.iter_windows(lane)) for lane in lanes]
        self._ends = [[window.end for window in windows] for windows in self._windows]
        # Nearly every shard is read in one window only; at the cuts between lanes some are read in two.
        self._first_window: dict[int, LaneWindow] = {}
        self._more_windows: dict[int, list[LaneWindow]] = {}
        for windows in self._windows:
            for window in windows:
                for shard in window.shards:
                    if self._first_window.setdefault(shard, window) is not window:
                        self._more_windows.setdefault(shard, []).append(window)
        self._needs: dict[int, tuple[int, list[tuple[int, int]]]] = {}

    def next_use(self, shard: int, position: int) -> int | None:
        """The position of the next use of ``shard``: ``position`` while its window is read, None after the last."""
        window = self._first_window.get(shard)
        if window is None:
            return None
        # Asked for everything that is here whenever something must go: the usual case is kept short.
        if shard not in self._more_windows:
            return max(window.first, position) if window.end > position else None
        windows = [window, *self._more_windows[shard]]
        return min((max(found.first, position) for found in windows if found.end > position), default=None)

    def upcoming(self, position: int) -> Iterator[tuple[int, int]]:
        """``(position of its use, shard)`` from ``position`` on, nearest first; a shard may come twice."""
        return merge(*(self._lane_upcoming(place, position) for place in range(len(self._lanes))))

    def bytes_needed(self, shard_bytes: Sequence[int]) -> int:
        """The cache with which these lanes fetch no shard twice in the epoch."""
        return peak_live_bytes(
            (
                ShardUse(shard, lane, window.first, window.end)
                for lane, windows in zip(self._lanes, self._windows, strict=True)
                for window in windows
                for shard in window.shards
            ),
            shard_bytes,
        )

    def _lane_upcoming(self, place: int, position: int) -> Iterator[tuple[int, int]]:
        windows = self._windows[place]
        current = bisect_right(self._ends[place], position)
        if current < len(windows):
            yield from self._needs_of(place, windows[current], position)
        for window in windows[current + 1 :]:
            for shard in window.shards:
                yield window.first, shard

    def _needs_of(self, place: int, window: LaneWindow, position: int) -> list[tuple[int, int]]:
        """First needs in the window that is being read, as of when it was first asked about."""
        known = self._needs.get(place)
        if known is None or known[0] != window.first:
            uses = self._order.iter_uses(max(position, window.first), (self._lanes[place],))
            needs = []
            for use in uses:
                if use.end > window.end:
                    break
                needs.append((use.first, use.shard))
            # The rest of the window's shards have been read, or come too late to matter.
            seen = {shard for _, shard in needs}
            needs += [(window.end - 1, shard) for shard in window.shards if shard not in seen]
            known = self._needs[place] = (window.first, needs)
        return [(max(first, position), shard) for first, shard in known[1]]
