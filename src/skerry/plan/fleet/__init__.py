"""Goodput before anything is bought: failures simulated, the paper's tables beside ours, real runs against it."""
