"""Store runs and their rows in one SQLite file.

The modules of this package never import torch, models or meters.

- `schema` defines the tables.
- `connection` opens and merges database files, and finds out whether the process of a run has
  ended.
- `store` writes and deletes runs.
- `query` reads runs and measurements.
- `export` writes files without private names.
"""

from nanolib.store.schema import Run
from nanolib.store.store import Store

__all__ = ["Run", "Store"]
