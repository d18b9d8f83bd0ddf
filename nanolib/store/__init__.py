"""One SQLite file: rows go in and out, and nothing here knows torch, models or meters.

`database` writes, `reading` reads, both over a `connection`; runs go out by `copying` and `deleting` and come in by `merging`,
which `checks` every row. `schema` says what a file holds, `traces` takes what comes by the thousand, `needs` says what charts
rely on, `sharing` what others may see, `files` what a path may be, `identity` whether the process of a run is gone.
"""

from nanolib.store.database import Store, check_mergeable
from nanolib.store.reading import SHOWN_CASES
from nanolib.store.schema import Run

__all__ = ["SHOWN_CASES", "Run", "Store", "check_mergeable"]
