"""What benchmarks in Python print: rows of figures; with --json also where they were measured."""

import datetime
import json
import os
import pathlib
import platform
import subprocess

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent


def device_name(device):
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    info = pathlib.Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
    name = names[0].split(":", 1)[1].strip() if names else platform.processor()
    kind = "AVX-512" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "AVX2"
    return f"{name} ({kind}), {len(os.sched_getaffinity(0))} cores"


def commit():
    """Of the checkout; "" outside of one."""
    command = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip()


def print_row(row):
    cells = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()]
    print("; ".join(cells), flush=True)


def print_json(rows, device="cpu", **facts):
    """`rows`: of one table, each with the names of its columns. `facts`: of all rows."""
    now = datetime.datetime.now(datetime.timezone.utc)
    document = {
        "assay": commit(),
        "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": device_name(device),
        "torch": torch.__version__,
        **facts,
        "rows": rows,
    }
    print(json.dumps(document, indent=1))
