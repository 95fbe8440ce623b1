"""Reads the records of a folder into a study."""

import json
import math
import pathlib

import numpy as np

from .study import HELD_OUT, TEST, Group, Study


def add_shared(record, shared):
    """Adds what the records of a folder leave out because all of them have it."""
    for key, value in shared.items():
        if isinstance(value, dict) and key in record:
            add_shared(record[key], value)
        else:
            record.setdefault(key, value)


def read_records(folder, visited=None):
    """{key: record} of a folder and of those that its plan.json names."""
    visited = set() if visited is None else visited
    folder = pathlib.Path(folder).resolve()
    if folder in visited:
        return {}
    visited.add(folder)
    plan = json.loads((folder / "plan.json").read_text())
    records = {}
    for file in sorted(folder.glob("*.json")):
        record = json.loads(file.read_text())
        if file.name == "plan.json" or not record.get("format", "").startswith("assay-run-"):
            continue
        add_shared(record, plan["shared"])
        records.setdefault(record["key"], record)
    for other in plan.get("records", []):
        records = read_records(folder / other, visited) | records
    return records


def comparable(runs):
    """The same data, and the same version of the numerics of every operator."""
    versions = set()
    for run in runs:
        made = run["provenance"]
        versions |= {("data", made["data"]), *made["numerics"].items()}
    return len(versions) == len({name for name, _ in versions})


def read_group(model, tokens, runs, sets):
    losses = {}
    for text, names in sets.items():
        clusters = [[r["end"]["sets"][s]["clusters"] for r in runs] for s in names]
        for kind, key in (("all", "nll"), ("recall", "recall_nll"), ("bounded", "bounded_nll")):
            if all(key in c for of_set in clusters for c in of_set):
                losses[text, kind] = [np.array([c[key] for c in of_set]) for of_set in clusters]
        pairs = zip(losses[text, "all"], losses[text, "recall"])
        losses[text, "other"] = [everything - recall for everything, recall in pairs]
    of_domains = [[r["end"]["sets"][s]["loss"] for r in runs] for s in sets[HELD_OUT]]
    unique = runs[0]["provenance"].get("train_tokens")
    return Group(
        model=model,
        tokens=tokens,
        epochs=tokens / unique if unique else math.nan,
        held_out=np.mean(of_domains, axis=0),
        training_loss=np.array([r["evaluations"]["training_loss"][-1] for r in runs]),
        losses=losses,
    )


def read_study(folder):
    plan = json.loads((pathlib.Path(folder) / "plan.json").read_text())
    setting = plan["settings"][0]
    domains = {TEST: setting["out_of_domain"], HELD_OUT: setting["train"]}
    split = {TEST: setting["test"], HELD_OUT: setting["held_out"]}
    sets = {text: [f"{d}.{split[text]}" for d in names] for text, names in domains.items()}
    records = read_records(folder)
    runs = {}  # by model, tokens and key; a run can serve two purposes
    for run in plan["runs"]:
        if run["purpose"] == "study" and run["key"] in records:
            budgets = runs.setdefault(run["model"], {})
            budgets.setdefault(run["tokens"], {})[run["key"]] = records[run["key"]]
    all_of = {m: [r for b in budgets.values() for r in b.values()] for m, budgets in runs.items()}
    reference = all_of[plan["reference"]]
    targets = {}
    for text, names in sets.items():
        for kind, key in (("all", "tokens"), ("recall", "recall_tokens")):
            clusters = [reference[0]["end"]["sets"][s]["clusters"][key] for s in names]
            targets[text, kind] = [np.array(numbers, float) for numbers in clusters]
    groups = []
    for model in sorted(runs, key=plan["models"].index):
        if comparable(reference + all_of[model]):
            for tokens, of_budget in sorted(runs[model].items()):
                groups.append(read_group(model, tokens, list(of_budget.values()), sets))
    groups.sort(key=lambda group: group.model != plan["reference"])
    table = [
        row
        for row in plan.get("variances") or []
        if row["seeds"] > 1 and (row["study"] != plan["name"] or row["model"] not in runs)
    ]
    return Study(domains, targets, groups, len(runs[plan["reference"]]), table)
