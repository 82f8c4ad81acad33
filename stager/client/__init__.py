"""Blocking client of the control API, standard library only."""
