"""Compares the verdicts of the table in docs/architectures.md with those of docs/results.

Usage: docs_verdicts_test.py DOCS
"""

import pathlib
import sys

DOCS = pathlib.Path(sys.argv[1])
CONTROL = "twin of the reference"  # no architecture of its own
# The reference, and the model of the section "A new model against this ladder".
IN_TEXT = {"Transformer++": "reference", "Transformer": "not settled"}
VERDICTS = {"reference", "degraded", "better", "equivalent", "not settled", "open"}


def verdicts(page, column):
    """{architecture: verdict} of the rows of a page that have a verdict in this column."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (DOCS / page).read_text().splitlines()
        if line.startswith("| ")
    ]
    return {row[0]: row[column] for row in rows if len(row) > column and row[column] in VERDICTS}


measured = verdicts("results/recurrent.md", 1) | verdicts("results/limited_domain.md", 1)
assert measured.pop(CONTROL, None), f"limited_domain.md has no row '{CONTROL}'"
found = verdicts("architectures.md", 2)
# Other rows of chunks.md are variants of an architecture.
measured = {k: v for k, v in verdicts("results/chunks.md", 1).items() if k in found} | measured
expected = measured | IN_TEXT
wrong = [
    f"{name}: {found.get(name)} in architectures.md, {expected.get(name, 'open')} in docs/results"
    for name in sorted(found | expected)
    if found.get(name) != expected.get(name, "open")
]
assert not wrong, "\n".join(wrong)
