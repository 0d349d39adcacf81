"""The durable store: a hash-chained tape and content-addressed files."""

from skerry.errors import FileDamaged, StoreError, StoreInUse, TapeDamaged, TapeUnknown

from .files import DiskFiles, FileSystem
from .store import Store
from .tape import Record, Tape, read_all

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
    "TapeUnknown",
    "read_all",
]
