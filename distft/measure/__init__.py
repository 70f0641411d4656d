"""Counting what runs: bytes that collectives move, bytes that model state holds."""

from distft.measure.collectives import CollectiveRecord, CollectiveRecords, count_collectives
from distft.measure.memory import ModelStateBytes, model_state_bytes, trained_tensors

__all__ = [
    "CollectiveRecord",
    "CollectiveRecords",
    "ModelStateBytes",
    "count_collectives",
    "model_state_bytes",
    "trained_tensors",
]
