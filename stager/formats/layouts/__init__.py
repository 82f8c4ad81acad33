"""Checkpoint layouts, one file each: how each framework's complete checkpoint is recognised."""
