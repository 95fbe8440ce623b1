"""Runs the Python blocks of docs/operators.md as one program, and compares its table of signatures
with the operators.

Usage: docs_test.py PAGE LIBASSAY PROGRAM
"""

import pathlib
import re
import sys

page, library, program = pathlib.Path(sys.argv[1]).read_text(), sys.argv[2], sys.argv[3]
blocks = re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)
assert len(blocks) >= 4, f"{len(blocks)} Python blocks in the page"
source = "\n".join(blocks).replace("build/libassay.so", library).replace("build/assay", program)
exec(compile(source, sys.argv[1], "exec"), {"__name__": "__main__"})

import torch  # noqa: E402


def row(schema):
    """The row of the table for an operator: `name(argument, option=default)` | results |"""
    arguments = (
        f"{a.name}={a.default_value!r}" if a.has_default_value() else a.name
        for a in schema.arguments
    )
    results = ", ".join(result.name for result in schema.returns)
    return f"| `{schema.name.removeprefix('assay::')}({', '.join(arguments)})` | {results} |"


schemas = [s for s in torch._C._jit_get_all_schemas() if re.match("assay::[a-z]", s.name)]
expected = sorted(map(row, schemas))
found = sorted(line for line in page.splitlines() if re.match(r"\| `\w+\(", line))
assert expected, "no operators were loaded"
assert found == expected, "the table of operators should be:\n" + "\n".join(expected)
