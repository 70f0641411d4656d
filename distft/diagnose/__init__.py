"""Proof and diagnosis: whether strategies train alike, what holds in a run, and what was wrong."""
