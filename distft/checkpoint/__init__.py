"""Saving, loading and consolidating: one folder, complete or not there."""
