"""Torch datasets and loaders over the node cache: the only package that imports torch."""
