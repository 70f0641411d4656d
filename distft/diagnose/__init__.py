"""Proof and diagnosis: whether strategies train alike, and what is wrong where they do not."""
