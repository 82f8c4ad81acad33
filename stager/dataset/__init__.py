"""Torch datasets and loaders over the node cache: the only package that imports torch."""

from __future__ import annotations

from stager.dataset.collating import Batch, collate_samples
from stager.dataset.loader import StagedLoader
from stager.dataset.staged import StagedDataset
from stager.dataset.tokens import TokenBlocks

__all__ = ["Batch", "StagedDataset", "StagedLoader", "TokenBlocks", "collate_samples"]
