"""Measures of what the product costs and carries, on this machine and in one run."""
