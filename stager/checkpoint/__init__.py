"""Checkpoints: detect, seal, upload, publish, retain, restore."""
