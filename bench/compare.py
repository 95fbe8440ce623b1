#!/usr/bin/env python3
"""Compares two documents of a benchmark, as --json prints them, and names what became slower.

Usage: compare.py EARLIER.json LATER.json [--percent 2]

Two rows are compared if their texts, whole numbers and flags are equal; sizes in bytes may differ.
Less is better for times, and more for tokens per second. Other numbers and the columns of
transformers, fla and loops are left out. Exit code 1: something is slower by more than --percent,
or nothing could be compared.
"""

import argparse
import json
import pathlib
import re
import sys

TIMES = ("ms", "µs", "seconds", "forward", "backward", "both")
LEFT_OUT = ("floor", "/ this time", "transformers", "loop", "fla")
PASSES = re.compile(r"[0-9.]+ \+ [0-9.]+")  # forward + backward


def figures(row, prefix=""):
    """Names and values of all times and rates, those of a part of the row, too."""
    for name, value in row.items():
        if any(word in name for word in LEFT_OUT):
            continue
        if isinstance(value, dict):
            yield from figures(value, f"{prefix}{name} ")
        elif isinstance(value, str) and PASSES.fullmatch(value):
            yield prefix + name, sum(map(float, value.split(" + ")))
        elif isinstance(value, float):
            yield prefix + name, value


def key(row):
    return tuple(
        (name, value)
        for name, value in sorted(row.items())
        if type(value) in (str, int, bool) and not name.endswith("bytes")
        if not PASSES.fullmatch(str(value)) and not name.startswith("difference")
    )


def is_rate(name):
    return "tokens/s" in name or "tokens_per_second" in name


def is_time(name):
    return any(word in TIMES for word in name.replace("_", " ").replace(",", " ").split())


def rows(path):
    try:
        found = json.loads(path.read_text())["rows"]
        return {key(row): dict(figures(row)) for row in found}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        sys.exit(f"{path}: not a document with rows, as --json prints ({error!r})")


def change(name, before, after):
    """The relative change of the speed; None if it has none."""
    if not before or not after:
        return None
    if is_rate(name):
        return after / before - 1
    return before / after - 1 if is_time(name) else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("earlier", type=pathlib.Path)
    parser.add_argument("later", type=pathlib.Path)
    parser.add_argument("--percent", type=float, default=2)
    args = parser.parse_args()
    earlier, later = rows(args.earlier), rows(args.later)
    slower, compared = 0, 0
    for row, after in later.items():
        title = ", ".join(f"{name} {value}" for name, value in row if name != "parameters")
        for name, value in after.items():
            found = change(name, earlier.get(row, {}).get(name), value)
            if found is None:
                continue
            compared += 1
            is_slower = 100 * found < -args.percent
            slower += is_slower
            print(f"{'slower' if is_slower else '':7} {100 * found:+6.1f} %  {title}: {name}")
    if not compared:
        sys.exit(f"{args.earlier} and {args.later} have no row in common")
    if slower:
        sys.exit(f"{slower} of {compared} figures are slower by more than {args.percent:g} %")


if __name__ == "__main__":
    main()
