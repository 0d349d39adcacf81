"""Drives. Real sockets, clocks, signals and processes around the nodes."""
