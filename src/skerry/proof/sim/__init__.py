"""Simulates. The real core, nodes, store and frames in virtual time, everything drawn from one seed."""
