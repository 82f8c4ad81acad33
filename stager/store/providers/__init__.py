"""Providers of object storage, as data: what differs between them, and nothing that a probe can find out."""

from __future__ import annotations

from stager.store.providers.profiles import PROFILES, Profile, find_profile

__all__ = ["PROFILES", "Profile", "find_profile"]
