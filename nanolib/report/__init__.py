"""Show results to people: tables, charts, findings and the report page.

Each section reads only a table of measurements, such as the result of `Store.measurements`.
"""
