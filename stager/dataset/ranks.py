"""Which rank of how many this process is, and on how many nodes they run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed

from stager.errors import UsageError


@dataclass(frozen=True, slots=True)
class Ranks:
    """A place in the world: ``rank`` of ``world``, on ``nodes`` nodes (1 where nobody says)."""

    rank: int
    world: int
    nodes: int = 1


def find_ranks(rank: int | None = None, world: int | None = None) -> Ranks:
    """The given rank and world size, else torch.distributed's, else the launcher's (RANK, WORLD_SIZE), else one of one.

    Raises:
        UsageError: Only one of the two is given, or the rank is not below the world size.
    """
    if (rank is None) != (world is None):
        raise UsageError("rank and world_size go together: give both or neither", subject="rank")
    environment = os.environ  # noqa: TID251  # the launcher's variables are how a trainer learns its rank
    if rank is None or world is None:
        rank, world = _initialised() or _launched(environment) or (0, 1)
    if not 0 <= rank < world:
        raise UsageError(f"rank {rank} of a world of {world}", subject="rank", hint="ranks count from 0")
    return Ranks(rank, world, _nodes(environment, world))


def check_ranks(ranks: Ranks) -> None:
    """UsageError if torch.distributed was initialised as another world since `find_ranks` was asked."""
    now = _initialised()
    if now is not None and now != (ranks.rank, ranks.world):
        raise UsageError(
            f"the dataset was made for rank {ranks.rank} of {ranks.world}, but this is rank {now[0]} of {now[1]}",
            subject="rank",
            hint="make the StagedDataset after torch.distributed.init_process_group, or give rank and world_size",
        )


def _initialised() -> tuple[int, int] | None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return None


def _launched(environment: Mapping[str, str]) -> tuple[int, int] | None:
    rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    return None if rank is None or world is None else (rank, world)


def _nodes(environment: Mapping[str, str], world: int) -> int:
    on_this_node = _number(environment, "LOCAL_WORLD_SIZE")
    return world // on_this_node if on_this_node and world % on_this_node == 0 else 1


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise UsageError(
            f"{name} is {text!r}, not a number", subject=name, hint="the launcher sets it, or unset it"
        )
    return int(text)
