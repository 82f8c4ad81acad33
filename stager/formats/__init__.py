"""Bytes to values and back: pure, without files, network, clock or torch."""
