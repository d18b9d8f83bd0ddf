"""Store runs and their rows in one SQLite file, without torch, models or meters.

`schema` defines the tables, and `connection` opens and merges files. `store` writes and deletes,
`query` reads, and `traces` writes the rows of a trace in a thread. `export` writes files without
private names, and `identity` finds out whether the process of a run has ended.
"""

from nanolib.store.connection import check_mergeable
from nanolib.store.schema import Run
from nanolib.store.store import Store

__all__ = ["Run", "Store", "check_mergeable"]
