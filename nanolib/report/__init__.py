"""Show results to people: tables, charts, findings and the report page.

The modules read only measurements, in the form that `Store.measurements` returns.
"""
