"""Performs. A node owns arrays and carries out its machine's actions in list order; sockets and time are handed in."""
