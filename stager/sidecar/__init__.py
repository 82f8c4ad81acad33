"""The process: composition root, control API, signals, metrics."""
