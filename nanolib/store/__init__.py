"""One SQLite file: rows go in and out, and nothing here knows torch, models or meters.

`database` reads and writes, `schema` says what a file holds, `traces` takes what comes by the thousand, `merging` and `checks` take
in what others wrote, `needs` says what charts rely on, `sharing` what others may see, `files` what a path may be.
"""

from nanolib.store.database import SHOWN_CASES, Store, check_mergeable
from nanolib.store.schema import Run

__all__ = ["SHOWN_CASES", "Run", "Store", "check_mergeable"]
