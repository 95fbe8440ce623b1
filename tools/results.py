#!/usr/bin/env python3
"""Writes the tables of docs/results from the committed records: no figure is copied by hand.

Usage: tools/results.py ASSAY [--check] [PAGE.md ...]

A table of a page is between two comments. The first one names a folder of docs/results/records, a
table of its report (tables/NAME.csv) and the columns that are shown:

    <!-- table fresh_text verdicts: architecture | verdict | R, recall in domain -->
    ...
    <!-- end of table -->

A column that the report has with "low" and "high" is shown as an interval. Tables of speed are made
from documents in docs/results/bench, which `assay bench models --json`, `tools/scaling --json` and
the programs in bench/ with --json print:

    <!-- bench h200_step_1 h200_step_64: model | sequences | ms per step -->
    ...
    <!-- end of table -->

"time=2048" between the documents leaves out rows of other lengths. Columns whose names are lengths
are times of forward and backward in ms, in one row for each form of attention; those whose names
are targets of kernels are tokens per second, in one row for each model.

--check changes nothing and fails when a page differs from its records.
"""

import argparse
import csv
import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
TABLE = re.compile(
    r"<!-- table (?P<records>\S+) (?P<name>\S+): (?P<columns>.*?) -->\n.*?<!-- end of table -->",
    re.DOTALL,
)
BENCH = re.compile(
    r"<!-- bench (?P<documents>[^:]+): (?P<columns>.*?) -->\n.*?<!-- end of table -->", re.DOTALL
)


def signed(value):
    return f"{value:+.3f}".replace("-", "−")


def tokens(value):
    return f"{value / 1e6:.0f}M" if value >= 1e6 else f"{value:.0f}"


def number(name, text):
    """A cell of the report as the page shows it."""
    try:
        value = float(text)
    except ValueError:
        return text
    if "tokens" in name and value >= 1000:
        return tokens(value)
    if name in {"seeds", "runs", "documents"}:
        return text
    if name.startswith(("tokens needed", "epochs", "slope")):
        return f"{value:.2f}"
    return signed(value) if "−" in name or "trend" in name else f"{value:.3f}"


def cell(row, name):
    if f"{name} low" not in row:
        return number(name, row[name]) or "–"
    if not row[name]:
        return "–"
    if not row[f"{name} low"]:
        return signed(float(row[name]))
    estimate, low, high = (float(row[key]) for key in (name, f"{name} low", f"{name} high"))
    return f"{signed(estimate)} [{signed(low)}, {signed(high)}]"


class Reports:
    """Tables of the reports of folders of records, each made once."""

    def __init__(self, program, folder):
        self.program = program
        self.folder = pathlib.Path(folder)

    def rows(self, records, name):
        report = self.folder / records
        if not report.exists():
            subprocess.run(
                [self.program, "report", RESULTS / "records" / records, "-o", report],
                check=True,
                stdout=subprocess.DEVNULL,
            )
        with open(report / "tables" / f"{name}.csv", newline="") as file:
            return list(csv.DictReader(file))


def markdown(match, columns, rows):
    """The comments of the match with the table between them."""
    lines = ["| " + " | ".join(row) + " |" for row in [columns, *rows]]
    lines.insert(1, "|" + "---|" * len(columns))
    return "\n".join([match[0].split("\n", 1)[0], *lines, "<!-- end of table -->"])


def table(reports, match):
    columns = [column.strip() for column in match["columns"].split("|")]
    cells = []
    for row in reports.rows(match["records"], match["name"]):
        unknown = [column for column in columns if column not in row]
        if unknown:
            sys.exit(f"{match['records']}/{match['name']}.csv has no column {unknown}: {list(row)}")
        cells.append([cell(row, column) for column in columns])
    return markdown(match, columns, cells)


def size(number):
    """Bytes as `assay bench models` prints them."""
    for unit in ["B", "KiB", "MiB", "GiB"]:
        if number < 1024 or unit == "GiB":
            return f"{number:.1f} {unit}" if number < 100 else f"{number:.0f} {unit}"
        number /= 1024


def floor(row):
    """Seconds in which a copy moves the bytes of a decoding step."""
    return row["decode"]["bytes"] / row["decode"]["bytes_per_second"]


BENCH_COLUMNS = {
    "model": lambda row: row["model"],
    "parameters": lambda row: f"{row['parameters'] / 1e6:.1f} M",
    "FLOPs per token": lambda row: f"{row['flops_per_token'] / 1e6:.1f} M",
    "tokens/s": lambda row: f"{row['tokens_per_second'] / 1e3:.0f} k",
    "peak memory": lambda row: size(row["peak_memory_bytes"]),
    "seconds per step": lambda row: f"{row['seconds_per_step']:.3f}",
    "sequences": lambda row: str(row["decode"]["sequences"]),
    "ms per step": lambda row: f"{1e3 * row['decode']['seconds']:.3g}",
    "MB": lambda row: f"{row['decode']['bytes'] / 1e6:,.0f}",
    "floor, ms": lambda row: f"{1e3 * floor(row):.2g}",
    "step / floor": lambda row: f"{row['decode']['seconds'] / floor(row):.1f}",
    "ms per token": lambda row: f"{1e3 * row['decode']['seconds_per_token']:.3g}",
}


def ranks(row):
    if row.get("independent"):
        return f"{row['ranks']} independent processes"
    return str(row["ranks"] or "one process")


# Columns of tools/scaling
SCALING_COLUMNS = {
    "ranks": ranks,
    "relative to one rank": lambda row: optional(row.get("efficiency")),
    "of independent processes": lambda row: optional(row.get("of_ceiling")),
    "memory of rank 0, GiB": lambda row: f"{row['memory_bytes'] / 2**30:.2f}",
    "bytes": lambda row: "differ" if row["differing"] else "same",
}


def generation(key):
    return lambda row: figure(row["generation"][key])


# Columns of `assay bench models --decode B --prompt T --generate N`
GENERATION_COLUMNS = {
    "prompts, s": generation("prompt_seconds"),
    "generation, s": generation("seconds"),
    "ms per token": lambda row: figure(
        1e3 * row["generation"]["seconds"] / (row["generation"]["tokens"] - 1)
    ),
}


def thousands(key):
    return lambda row: f"{row[key] / 1e3:.1f} k"


def share_of_loop(key):
    return lambda row: f"{row[key] / row['loop_tokens_per_second']:.2f}"


# Columns of tools/serve-speed
SERVED_COLUMNS = {
    "loop of `assay generate`": thousands("loop_tokens_per_second"),
    "`assay serve`": thousands("served_tokens_per_second"),
    "of the loop": share_of_loop("served_tokens_per_second"),
    "without prompts": thousands("tokens_per_second_without_prompts"),
    "of the loop, without prompts": share_of_loop("tokens_per_second_without_prompts"),
}


# Columns of `assay bench attention`
ATTENTION_COLUMNS = {
    "forward, ms": lambda row: figure(1e3 * row["forward"]),
    "backward, ms": lambda row: figure(1e3 * row["backward"]),
    "both, ms": lambda row: figure(1e3 * (row["forward"] + row["backward"])),
}


def optional(value):
    return "–" if value is None else f"{value:.3f}"


def figure(value):
    """Three digits of a number, and a text as it is."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"
    return "–" if value is None else str(value)


def bench_cell(row, column):
    if column.startswith("state at "):
        return size(row["state_bytes"][column.split()[-1]])
    if isinstance(row.get(column), float):
        return figure(row[column])
    kinds = {
        "ranks": SCALING_COLUMNS,
        "forward": ATTENTION_COLUMNS,
        "generation": GENERATION_COLUMNS,
        "loop_tokens_per_second": SERVED_COLUMNS,
    }
    for columns in [*(kinds[key] for key in kinds if key in row), BENCH_COLUMNS]:
        if column in columns:
            return columns[column](row)
    return figure(row.get(column))


def with_ratios(document):
    """Rows with their speed next to that of the reference: of a model, or cuDNN's attention."""
    rows = document["rows"]
    speeds = {row.get("model"): row.get("tokens_per_second") for row in rows}
    reference = speeds.get(document.get("reference"))
    generations = {row.get("model"): row.get("generation") for row in rows}
    generated = generations.get(document.get("reference"))
    both = {(row.get("form"), row.get("time")): seconds_of(row) for row in rows}
    for row in rows:
        if reference and row.get("tokens_per_second"):
            row["relative"] = row["tokens_per_second"] / reference
        if generated and row.get("generation"):
            for key, name in (("seconds", "generation"), ("total_seconds", "with prompts")):
                row[f"{name}, × {document['reference']}"] = generated[key] / row["generation"][key]
        cudnn = both.get(("full cudnn", row.get("time")))
        if cudnn:
            row["cuDNN's time / this time"] = cudnn / seconds_of(row)
    return rows


def seconds_of(row):
    return row["forward"] + row["backward"] if "forward" in row else None


def by_form(rows):
    forms = {}
    for row in rows:
        form = forms.setdefault(row["form"], {"form": row["form"]})
        form[str(row["time"])] = 1e3 * seconds_of(row) if "forward" in row else None
    return list(forms.values())


def by_size(rows):
    """A row for each operator, with a column for each size."""
    operators = {}
    for row in rows:
        operator = operators.setdefault(row["operator"], {"operator": row["operator"]})
        operator[f"B {row['batch']}, T {row['time']}"] = row["kernel, ms"]
    return list(operators.values())


def by_kernels(rows):
    """A row for each model of the first document, with the speeds of all targets of its kernels
    ($ASSAY_CUDA_TARGET)."""
    models = {}
    for row in rows:
        model = models.setdefault(row["model"], row)
        model[row.get("kernels", "sm_90a")] = f"{row['tokens_per_second'] / 1e3:.3g} k"
    return list(models.values())


def bench_table(match):
    columns = [column.strip() for column in match["columns"].split("|")]
    rows = []
    for name in match["documents"].split():
        key, _, value = name.partition("=")
        if value:
            rows = [row for row in rows if str(row[key]) == value]
        else:
            document = json.loads((RESULTS / "bench" / f"{name}.json").read_text())
            facts = {name: value for name, value in document.items() if name != "rows"}
            rows += [facts | row for row in with_ratios(document)]
    if columns[1].isdigit():
        rows = by_form(rows)
    if columns[1].startswith("B "):
        rows = by_size(rows)
    if "compute_80" in columns:
        rows = by_kernels(rows)
    return markdown(match, columns, [[bench_cell(row, name) for name in columns] for row in rows])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("program", help="the program assay")
    parser.add_argument("pages", nargs="*", type=pathlib.Path, help="default: all of docs/results")
    parser.add_argument("--check", action="store_true", help="change nothing; fail on a difference")
    options = parser.parse_args()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        reports = Reports(options.program, folder)
        for page in options.pages or sorted(RESULTS.glob("*.md")):
            text = page.read_text()
            new = TABLE.sub(lambda match: table(reports, match), text)
            new = BENCH.sub(bench_table, new)
            if new == text:
                continue
            wrong.append(str(page))
            if not options.check:
                page.write_text(new)
    what = "differs from its records" if options.check else "written"
    print("\n".join(f"{what}: {page}" for page in wrong))
    sys.exit(1 if options.check and wrong else 0)


if __name__ == "__main__":
    main()
