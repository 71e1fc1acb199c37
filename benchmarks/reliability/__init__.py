"""Faults done to real trainings on purpose, and what is left of them."""
