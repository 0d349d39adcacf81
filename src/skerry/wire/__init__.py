"""Tensors <-> bytes <-> peers."""
