"""The sheet of answers: what nanolib counts, plans and trains, and must go on saying.

`sheet/` holds one file per suite and notebook: each case with every answer that is the same on every machine. `names.py` is the
one table between nanolib's words and the sheet's: after a renaming it changes, and the sheet stays. After a change of answers
that is meant, `python -m tests.golden.write` makes the files anew, and their diff is the list old → new.
"""
