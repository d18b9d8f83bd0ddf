"""What a person sees: tables, charts, verdicts and the page. It knows only rows: what `Store.measurements` returns."""
