"""Show results to people: tables, charts, findings and the report page.

The modules read only tables of measurements from `Store.measurements`.
"""
