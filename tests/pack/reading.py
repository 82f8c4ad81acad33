"""Shards as plain webdataset reads them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from typing import Any

import webdataset


def read_with_webdataset(shards: Sequence[str]) -> list[dict[str, Any]]:
    """All samples, undecoded. webdataset leaves its files to the garbage collector, which is waited for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        found = list(webdataset.WebDataset(list(shards), shardshuffle=False))
        gc.collect()
    return found
