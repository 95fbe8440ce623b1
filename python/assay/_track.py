"""assay track: the scalars of runs, for TensorBoard, wandb, Trackio and MLflow.

metrics.jsonl of each run is read; docs/runs.md has its keys. What was written is kept in a file
next to the study, so that another call goes on where the last one ended.
"""

import argparse
import datetime
import importlib
import json
import os
import pathlib
import re
import sqlite3
import struct
import sys
import time

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

_NAME = re.compile(r"(?P<name>(?P<model>.+)\.[^.]+\.seed-.+)\.[0-9a-f]{8}")


class TrackError(Exception):
    """An error that the user can correct, in one sentence."""


class Run:
    """A run folder, which may be growing, and what of it was written: `cursor`."""

    def __init__(self, folder, cursors):
        self.folder = folder
        found = _NAME.fullmatch(folder.name)
        self.name, self.model = found.group("name", "model") if found else (folder.name,) * 2
        self.cursor = cursors.setdefault(folder.name, {"training": -1, "evaluation": -1})

    def new_points(self):
        """[(step, time, {tag: value})] that were not written yet. A resumed run repeats steps."""
        started, seconds, points = self._started(), 0, []
        for line in (self.folder / "metrics.jsonl").read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                break  # is being written
            entry = json.loads(line)
            kind = "evaluation" if "evaluation" in entry else "training"
            if kind == "training":
                seconds = entry["seconds"]
            if entry["step"] <= self.cursor[kind]:
                continue
            self.cursor[kind] = entry["step"]
            values = _of_evaluation(entry) if kind == "evaluation" else _of_training(entry)
            values = {tag: float(v) for tag, v in values.items() if v is not None}
            points.append((entry["step"], started + seconds, values))
        return points

    def config(self):
        """The values of config.toml: {"train.seed": 1, ...}."""
        flat = {}

        def flatten(prefix, table):
            for key, value in table.items():
                if isinstance(value, dict):
                    flatten(f"{prefix}{key}.", value)
                elif key != "python_source":
                    flat[prefix + key] = value

        flatten("", tomllib.loads((self.folder / "config.toml").read_text()))
        return flat

    def is_done(self):
        return (self.folder / "done.json").exists()

    def _started(self):
        text = json.loads((self.folder / "run.json").read_text())["started"]
        return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _of_training(entry):
    keys = "loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "tokens"
    return {f"train/{key}": entry.get(key) for key in keys}


def _of_evaluation(entry):
    values = {"evaluation/held_out_loss": entry.get("held_out_loss")}
    for name, found in entry["evaluation"].items():
        values[f"loss/{name}"] = found["loss"]
        values[f"bits_per_byte/{name}"] = found["bits_per_byte"] or None
        values[f"recall_loss/{name}"] = found["slices"].get("repeated_bigram", {}).get("loss")
    return values


# TensorBoard: a TFRecord is u64 length, its checksum, bytes, their checksum. The bytes are a
# message Event of tensorflow/core/util/event.proto, in the encoding of protocol buffers.


def _crc_table():
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        yield byte


_CRC = tuple(_crc_table())


def masked_crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _record(data):
    length = struct.pack("<Q", len(data))
    return b"".join(
        (length, struct.pack("<I", masked_crc32c(length)), data)
        + (struct.pack("<I", masked_crc32c(data)),)
    )


def _varint(number):
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def _bytes_field(number, data):
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _event(wall_time, step, values):
    """Event{1 wall_time, 2 step, 5 Summary{1 Value{1 tag, 2 simple_value}}}"""
    summary = b"".join(
        _bytes_field(1, _bytes_field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
        for tag, value in values.items()
    )
    head = b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step)
    return head + _bytes_field(5, summary)


class _TensorBoard:
    package = None
    interval = 5

    def __init__(self, options):
        self.folder = options.output or options.study / "tensorboard"
        self.cursors = self.folder / "assay-track.json"
        self.place = f"{self.folder}; show it with `tensorboard --logdir {self.folder}`"

    def write(self, run, points):
        folder = self.folder / run.name
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"events.out.tfevents.{int(points[0][1])}.assay"
        file = folder / run.cursor.setdefault("file", file.name)
        with open(file, "ab") as stream:
            # What a killed call has written past its cursor is written again
            stream.truncate(run.cursor.get("bytes", 0))
            if "bytes" not in run.cursor:
                version = _bytes_field(3, b"brain.Event:2")
                stream.write(_record(b"\x09" + struct.pack("<d", points[0][1]) + version))
            for step, wall_time, values in points:
                stream.write(_record(_event(wall_time, step, values)))
            stream.flush()
            run.cursor["bytes"] = stream.tell()


class _Wandb:
    package = "wandb"
    interval = 30

    def __init__(self, options):
        self.library = _library_of(self.package)
        self.project = options.project or options.study.resolve().name
        self.cursors = options.study / f"assay-track-{self.package}-{self.project}.json"
        self.place = f"the project {self.project} of {self.package}"

    def write(self, run, points):
        tracked = self.start(run)
        for step, _, values in points:
            tracked.log(values, step=step)
        tracked.finish()

    def start(self, run):
        return self.library.init(
            project=self.project,
            id=run.folder.name,
            name=run.name,
            group=run.model,
            config=run.config(),
            resume="allow",
        )


class _Trackio(_Wandb):
    package = "trackio"

    def start(self, run):
        return self.library.init(
            project=self.project,
            name=run.name,
            group=run.model,
            config=run.config(),
            resume="allow",
        )


class _Mlflow(_Wandb):
    package = "mlflow"

    def write(self, run, points):
        client = self.library.MlflowClient()
        experiment = self.library.set_experiment(self.project).experiment_id
        if "run_id" not in run.cursor:
            run.cursor["run_id"] = client.create_run(experiment, run_name=run.name).info.run_id
            for key, value in run.config().items():
                client.log_param(run.cursor["run_id"], key, str(value)[:500])
        metrics = [
            self.library.entities.Metric(tag, value, int(wall_time * 1000), step)
            for step, wall_time, values in points
            for tag, value in values.items()
        ]
        for begin in range(0, len(metrics), 1000):  # the limit of a batch
            client.log_batch(run.cursor["run_id"], metrics[begin : begin + 1000])
        if run.is_done():
            client.set_terminated(run.cursor["run_id"])


_TARGETS = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
    "mlflow": _Mlflow,
}


def _library_of(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TrackError(f"{name} cannot be imported ({error}): run pip install {name}") from None


def _runs_of(folder):
    """The folders of the runs of a study that have begun, or the run itself."""
    if (folder / "metrics.jsonl").exists():
        return [folder]
    return sorted(file.parent for file in folder.glob("runs/*/metrics.jsonl"))


def _is_finished(folder):
    """No run of the study will go on: each one is done or has failed."""
    database = folder / "study.sqlite"
    if not database.exists():
        return (folder / "done.json").exists()
    connection = sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)
    try:
        query = "SELECT count(*) FROM runs WHERE status NOT IN ('done', 'failed')"
        return connection.execute(query).fetchone()[0] == 0
    finally:
        connection.close()


def _write_cursors(file, cursors):
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(json.dumps(cursors, indent=1))
    os.replace(unfinished, file)


def track(options):
    """Writes what is new, and goes on with --follow. The number of runs and points."""
    if not options.study.is_dir():
        raise TrackError(f"{options.study}: there is no such folder")
    target = _TARGETS[options.to](options)
    cursors = json.loads(target.cursors.read_text()) if target.cursors.exists() else {}
    runs, points = set(), 0
    while True:
        finished = not options.follow or _is_finished(options.study)
        for folder in _runs_of(options.study):
            run = Run(folder, cursors)
            new = run.new_points()
            runs.add(folder)
            points += len(new)
            if new:
                target.write(run, new)
                _write_cursors(target.cursors, cursors)
        if finished:
            break
        time.sleep(options.interval or target.interval)
    if not runs:
        raise TrackError(f"{options.study}: there is no run with metrics.jsonl here or in runs/")
    return len(runs), points, target.place


def main(arguments):
    parser = argparse.ArgumentParser(
        prog="assay track",
        description="Write the metrics of a study or a run for TensorBoard, wandb, Trackio or "
        "MLflow. A second call adds what is new.",
    )
    parser.add_argument("study", type=pathlib.Path, help="folder of a study or of a run")
    parser.add_argument("--to", choices=list(_TARGETS), default="tensorboard")
    parser.add_argument(
        "-o",
        "--output",
        type=pathlib.Path,
        help="folder of event files (default: STUDY/tensorboard)",
    )
    parser.add_argument(
        "--project", help="of wandb, Trackio and MLflow (default: the name of the folder)"
    )
    parser.add_argument(
        "--follow", action="store_true", help="until all runs of the study are done"
    )
    parser.add_argument(
        "--interval", type=float, help="seconds between two looks (default: 5, with a library 30)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    options = parser.parse_args(arguments)
    try:
        runs, points, place = track(options)
    except TrackError as error:
        if options.json:
            print(json.dumps({"error": str(error), "exit_code": 2}))
        print(f"assay: {error}. Nothing was changed.", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"runs": runs, "points": points, "place": place}))
    else:
        print(f"{points} new points of {runs} runs are in {place}")
    return 0
