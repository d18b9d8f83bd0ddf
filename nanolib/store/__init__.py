"""One SQLite file: rows go in and out, and nothing here knows torch, models or meters.

`schema` defines the tables, `connection` opens a file, `store` writes and deletes, `merge` imports,
`query` reads, `traces` writes rows by the thousand, `export` writes what others may see, and
`identity` finds out whether the process of a run has ended.
"""

from nanolib.store.merge import check_mergeable
from nanolib.store.schema import Run
from nanolib.store.store import Store

__all__ = ["Run", "Store", "check_mergeable"]
