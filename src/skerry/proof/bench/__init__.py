"""Measures: subject and reference in one run, in alternation, so that a noisy machine is noisy to both."""
