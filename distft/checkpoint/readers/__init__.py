"""Readers of every checkpoint format; each returns a shard map."""
