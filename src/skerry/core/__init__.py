"""Decides. Pure state machines: events in, actions out; no clock, socket, file, thread, random source or array."""
