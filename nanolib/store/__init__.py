"""One SQLite file: rows go in and out, and nothing here knows torch, models or meters.

`schema` defines the tables, `connection` opens and merges files, `store` writes and deletes,
`query` reads, `traces` writes rows by the thousand, `export` writes what others may see, and
`identity` finds out whether the process of a run has ended.
"""

from nanolib.store.connection import check_mergeable
from nanolib.store.schema import Run
from nanolib.store.store import Store

__all__ = ["Run", "Store", "check_mergeable"]
