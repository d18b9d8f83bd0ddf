"""A text in every column that can hold one, whatever the schema is."""

import json

ENDINGS = (".sqlite", ".json", ".csv", ".md")  # of what others get
LISTS = ("gpus", "disturbances", "flags", "names")
MAPPINGS = ("params", "versions", "dtypes", "factors", "details")


def text_columns(db):
    """Table → its columns of text, whatever the schema holds."""
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = {
        table: [row[1] for row in db.execute(f"PRAGMA table_info({table})") if row[2] == "TEXT"] for table in tables
    }
    return {table: columns for table, columns in found.items() if columns}


def fill(db, texts):
    """For each text a run, with its machine, rows and trace, that holds it in every column of text."""
    db.execute("PRAGMA foreign_keys = OFF")
    run_ids = []
    for number, text in enumerate(texts):
        for table, columns in text_columns(db).items():
            values = {}
            for column in columns:
                values[column] = f"{text} {number}" if column.endswith("_id") else text
                if column in LISTS:
                    values[column] = json.dumps([{text: text}] if column == "gpus" else [text])
                if column in MAPPINGS:
                    values[column] = json.dumps({text: {text: [text]}, "rendezvous": "meetpoint:29500"})
            values |= {"cases": 1} if table == "runs" else {"n": 1} if table == "measurements" else {}
            marks = ", ".join("?" * len(values))
            db.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", list(values.values()))
        run_ids.append(f"{text} {number}")
    return run_ids
