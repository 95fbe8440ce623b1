"""Compares verdicts and speeds of the table in docs/architectures.md with those of docs/results.

Usage: docs_verdicts_test.py DOCS
"""

import json
import pathlib
import sys

DOCS = pathlib.Path(sys.argv[1])
VERDICTS = {"reference", "degraded", "better", "equivalent", "not worse", "not settled"}


def rows(page, column):
    """The cells of the rows of a page that have code, or plain text, in this column."""
    lines = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [row for row in cells if len(row) > column]


# The table of all architectures is the first; that of the hybrids comes later.
measured = {}
for row in rows("results/fresh_text.md", 4):
    if row[1] in VERDICTS:
        measured.setdefault(row[0], row[1])
assert measured.pop("twin", None), "fresh_text.md has no row 'twin'"
found = {row[1].strip("`"): row[2] for row in rows("architectures.md", 8) if row[1][0] == "`"}
wrong = [
    f"{preset}: {verdict} in architectures.md, {measured.get(preset, 'open')} in fresh_text.md"
    for preset, verdict in sorted(found.items())
    if verdict != measured.get(preset, "open")
]
speeds = json.loads((DOCS / "results/bench/h200_models.json").read_text())["rows"]
speeds = {row["model"]: f"{row['tokens_per_second'] / 1e3:.0f} k" for row in speeds}
wrong += [
    f"{row[1]}: {row[5]} tokens/s in architectures.md"
    for row in rows("architectures.md", 8)
    if row[1][0] == "`" and row[5] != speeds.get(row[1].strip("`"), "–")
]
presets = {path.stem for path in (DOCS.parent / "plans/models").glob("*.toml")}
missing = sorted((set(measured) & presets) - set(found))
assert not wrong and not missing, "\n".join(wrong + missing)
