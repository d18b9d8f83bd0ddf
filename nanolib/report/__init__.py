"""Show results to people: tables, charts, findings and the report page.

The sections read only tables of measurements, as from `Store.measurements`.
"""
