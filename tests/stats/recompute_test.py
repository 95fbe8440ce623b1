"""Compares the numbers of `assay report` with those that recompute/ computes from the records.

Usage: recompute_test.py ASSAY RECORDS...

RECORDS are folders with a plan.json, or folders of such folders. Estimates must agree to 1e-6 nats.
Half-widths of intervals must agree to 2 %, because the factor that makes intervals simultaneous
comes from other random numbers.
"""

import csv
import functools
import json
import math
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from recompute.curve import Curve
from recompute.intervals import simultaneous_factor, t_quantile, t_quantiles
from recompute.records import read_study
from recompute.study import HELD_OUT, TEST, Group, Study

ESTIMATE = 1e-6
HALF_WIDTH = 0.02
FLOOR = 1e-6  # nats; half-widths below it are not compared


# ---- Synthetic studies whose answer is known


def synthetic(offset, slope, tokens=(1, 2, 4), seeds=4, noise=0.0, seed=5):
    """o = 1 + slope h + offset and r = 2 + slope h / 2 + offset, plus noise of each run."""
    random = np.random.default_rng(seed)
    domains = {TEST: ["x", "y"], HELD_OUT: ["a", "b"]}
    targets = {}
    for text, names in domains.items():
        targets[text, "all"] = [random.uniform(1e3, 2e3, 12) for _ in names]
        targets[text, "recall"] = [t / 4 for t in targets[text, "all"]]

    def group(model, budget, held_out, shift):
        h = held_out + noise * random.standard_normal(seeds)
        o = 1 + slope * h + shift + noise * random.standard_normal(seeds)
        r = 2 + slope * h / 2 + shift + noise * random.standard_normal(seeds)
        losses = {}
        for text, mean, recall in ((TEST, o, 0.2 - budget / 100 + 0 * o), (HELD_OUT, h, r)):
            tokens_of = targets[text, "all"], targets[text, "recall"]
            losses[text, "all"] = [mean[:, None] * t for t in tokens_of[0]]
            losses[text, "recall"] = [recall[:, None] * t for t in tokens_of[1]]
            pairs = zip(losses[text, "all"], losses[text, "recall"])
            losses[text, "other"] = [a - b for a, b in pairs]
        return Group(model, budget, 0.5, h, h, losses)

    groups = [group("reference", b, 4 - 0.3 * math.log2(b), 0) for b in tokens]
    groups += [group("contender", tokens[1], 3.55, offset)]
    return Study(domains, targets, groups, len(tokens), [])


def check_quantiles():
    for freedom, expected in ((1, 12.7062), (2, 4.3027), (7, 2.3646), (1e6, 1.95996)):
        found = t_quantile(freedom)
        assert abs(found / expected - 1) < 1e-4, (freedom, found, expected)
        assert abs(t_quantiles(np.array([freedom]))[0] / found - 1) < 1e-3, freedom


def check_curve():
    """A line and a parabola through the rungs are read exactly."""
    held_out = np.array([4.0, 3.5, 3.2, 3.0])
    for loss_at in (lambda h: 1 + 0.5 * h, lambda h: 1 + (h - 2) ** 2):
        curve = Curve(held_out, loss_at(held_out))
        for h in (4.0, 3.7, 3.3, 3.1, 3.0):
            assert abs(curve.weights(h) @ loss_at(held_out) - loss_at(h)) < 1e-12, h
        assert abs(sum(curve.weights(4.1)) - 1) < 1e-12


def check_known_answer():
    study = synthetic(offset=0.1, slope=0.7)
    index = study.judged("contender")
    recall = study.measure(HELD_OUT, "recall")
    found = study.delta(index).value, study.number([index], study.all).value
    assert np.allclose(found, 0.1, atol=1e-9), found
    # r falls by half of the slope, and its own tangent is subtracted.
    assert abs(study.number([index], recall).value - 0.1) < 1e-9


def check_coverage():
    """E of one contender and its interval, in studies with noise between seeds."""
    studies = [synthetic(offset=0.1, slope=0.7, noise=0.01, seed=seed) for seed in range(400)]
    found = [s.number(s.with_tangent("contender", s.all), s.all).interval() for s in studies]
    held = np.mean([low <= 0.1 <= high for _, low, high in found])
    assert 0.92 <= held <= 0.98, held
    assert abs(np.mean([value for value, _, _ in found]) - 0.1) < 0.002


# ---- The program


class Comparison:
    def __init__(self):
        self.count = 0
        self.wrong = []

    def check(self, what, program, own):
        """Both are (estimate, low, high); None where there is no number."""
        self.count += 1
        if program is None or own is None:
            if (program is None) != (own is None):
                self.wrong.append(f"{what}: program {program}, recomputed {own}")
            return
        half = [(high - low) / 2 for _, low, high in (program, own)]
        if not abs(program[0] - own[0]) <= ESTIMATE:
            self.wrong.append(f"{what}: estimate {program[0]:.7f}, recomputed {own[0]:.7f}")
        elif math.isnan(half[0]) and math.isnan(half[1]) or max(half) < FLOOR:
            return
        elif not abs(half[0] - half[1]) <= HALF_WIDTH * half[1]:
            self.wrong.append(f"{what}: half-width {half[0]:.5f}, recomputed {half[1]:.5f}")


def json_interval(number, key):
    """None without a number; ends are NaN where the interval is unknown."""
    if number.get(key) is None:
        return None
    ends = [math.nan if end is None else end for end in number["interval"]]
    return number[key], *ends


def csv_interval(row, column):
    if not row.get(column):
        return None
    return tuple(float(row.get(column + end) or "nan") for end in ("", " low", " high"))


def rows_of(folder, table):
    path = folder / "tables" / f"{table}.csv"
    return list(csv.DictReader(path.open())) if path.exists() else []


def compare(assay, folder):
    study = read_study(folder)
    with tempfile.TemporaryDirectory() as out:
        command = [assay, "report", str(folder), "-o", f"{out}/report", "--json"]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        verdicts = {row["model"]: row for row in json.loads(printed)["verdicts"]}
        tables = {
            name: rows_of(pathlib.Path(out) / "report", name)
            for name in ("delta-by-domain", "delta-by-recall", "delta-by-budget", "equal-tokens")
        }
    result = Comparison()
    compare_verdicts(study, verdicts, result)
    compare_tables(study, tables, result)
    return study, result


def simultaneous(study):
    """{number: {model: interval}} of Delta_end, E and R."""
    recall = study.measure(HELD_OUT, "recall")
    found = {"delta_end": {}, "equal_tokens": {}, "recall": {}}
    for model in study.models:
        index = study.judged(model)
        if index is not None:
            found["delta_end"][model] = study.delta(index)
        for name, measure in (("equal_tokens", study.all), ("recall", recall)):
            if budgets := study.with_tangent(model, measure):
                found[name][model] = study.number(budgets, measure)
    for estimates in found.values():
        factor = simultaneous_factor(list(estimates.values()))
        for model, estimate in estimates.items():
            estimates[model] = estimate.interval(factor)
    return found


def compare_verdicts(study, verdicts, result):
    own = simultaneous(study)
    for model in study.models:
        row = verdicts[model]
        name = f"{model}: Delta_end"
        delta = own["delta_end"].get(model) if study.carries_verdict(model) else None
        result.check(name, json_interval(row, "delta_end"), delta)
        for number in ("equal_tokens", "recall"):
            program = json_interval(row[number], "value")
            result.check(f"{model}: {number}", program, own[number].get(model))


def compare_tables(study, tables, result):
    recall = study.measure(HELD_OUT, "recall")

    def check(row, column, name, own):
        result.check(f"{row['architecture']}: {name}", csv_interval(row, column), own)

    for row in tables["delta-by-domain"]:
        index = study.judged(row["architecture"])
        for domain in study.domains[TEST]:
            own = study.delta(index, study.measure(TEST, "all", domain)).interval()
            check(row, domain, domain, own)
        own = study.over_domains(functools.partial(study.delta, index))
        check(row, "domains as a sample", "domains as a sample", own)
        if row.get("bounded loss"):
            own = study.delta(index, study.measure(TEST, "bounded")).interval()
            check(row, "bounded loss", "bounded", own)
    for row in tables["delta-by-recall"]:
        index = study.judged(row["architecture"])
        for targets in ("recall", "other"):
            own = study.delta(index, study.measure(TEST, targets)).interval()
            check(row, f"part on {targets} targets", f"{targets} targets", own)
    for row in tables["delta-by-budget"]:
        group, index = group_of(study, row)
        own = study.delta(index).interval() if group.inside else None
        check(row, "Δ_end", f"Delta_end at {row['tokens']}", own)
    for row in tables["equal-tokens"]:
        group, index = group_of(study, row)
        for column, measure in (("E", study.all), ("R", recall)):
            tangent = index in study.with_tangent(group.model, measure)
            own = study.number([index], measure).interval() if tangent else None
            check(row, column, f"{column} at {row['tokens']}", own)


def group_of(study, row):
    for index in study.models[row["architecture"]]:
        if study.groups[index].tokens == float(row["tokens"]):
            return study.groups[index], index
    raise LookupError(row)


def show(study):
    print(f"{'architecture':24}{'Delta_end':>28}{'E':>28}{'R':>28}")
    own = simultaneous(study)
    for model in study.models:
        cells = [own[n].get(model) for n in ("delta_end", "equal_tokens", "recall")]
        texts = ["{:+.4f} [{:+.4f}, {:+.4f}]".format(*c) if c else "-" for c in cells]
        print(f"{model:24}" + "".join(f"{text:>28}" for text in texts))


def folders(paths):
    for path in map(pathlib.Path, paths):
        plans = [path / "plan.json", *sorted(path.glob("*/plan.json"))]
        yield from (plan.parent for plan in plans if plan.exists())


def main():
    check_quantiles()
    check_curve()
    check_known_answer()
    check_coverage()
    wrong = []
    for folder in folders(sys.argv[2:]):
        study, result = compare(sys.argv[1], folder)
        print(f"{folder}: {result.count} numbers, {len(result.wrong)} differ")
        show(study)
        wrong += [f"{folder}: {line}" for line in result.wrong]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
