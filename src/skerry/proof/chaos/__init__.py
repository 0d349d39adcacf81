"""Tortures. Faults on purpose, in real processes: what they cost, measured."""
