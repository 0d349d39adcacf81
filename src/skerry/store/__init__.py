"""The durable store: a hash-chained tape and content-addressed files."""

from .files import DiskFiles, FileSystem, StoreError, StoreInUse
from .store import FileDamaged, Store
from .tape import Record, Tape, TapeDamaged, TapeTooNew, read_all

__all__ = [
    "DiskFiles",
    "FileDamaged",
    "FileSystem",
    "Record",
    "Store",
    "StoreError",
    "StoreInUse",
    "Tape",
    "TapeDamaged",
    "TapeTooNew",
    "read_all",
]
