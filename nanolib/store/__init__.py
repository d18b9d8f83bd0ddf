"""One SQLite file: rows go in and out, and nothing here knows torch, models or meters.

`schema` says what a file holds, `connection` opens it, `store` writes, merges and deletes, `query` reads, `traces` takes what comes
by the thousand, `export` writes what others may see, `identity` says whether the process of a run is gone.
"""

from nanolib.store.query import SHOWN_CASES
from nanolib.store.schema import Run
from nanolib.store.store import Store, check_mergeable

__all__ = ["SHOWN_CASES", "Run", "Store", "check_mergeable"]
