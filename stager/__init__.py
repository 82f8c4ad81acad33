"""stager: tiers for training data and checkpoints, one daemon per node.

The names below are imported on first use, so that ``import stager`` costs neither torch nor aiobotocore.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["StagedDataset", "StagedLoader", "TokenBlocks", "__version__", "commit", "read_commit"]

if TYPE_CHECKING:
    from stager.client.commit import commit, read_commit
    from stager.dataset import StagedDataset, StagedLoader, TokenBlocks

_HOMES = {
    "StagedDataset": "stager.dataset",
    "StagedLoader": "stager.dataset",
    "TokenBlocks": "stager.dataset",
    "commit": "stager.client.commit",
    "read_commit": "stager.client.commit",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'stager' has no attribute {name!r}")
    return getattr(import_module(home), name)
