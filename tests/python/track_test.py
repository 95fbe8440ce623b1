"""assay track: event files of TensorBoard, and what other libraries are given.

Usage: track_test.py PACKAGE_FOLDER PROGRAM
"""

import contextlib
import io
import json
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import types
import unittest

sys.path.insert(0, sys.argv[1])
import assay._track as track  # noqa: E402

PROGRAM = pathlib.Path(sys.argv[2]).resolve()
SMOKE = pathlib.Path(__file__).resolve().parents[2] / "plans/models/smoke.toml"
SETTINGS = (
    *("steps=6", "warmup_steps=1", "log_every=1"),
    *("eval_every=3", "eval_tokens=64", "end_tokens=64"),
)


def fields(data):
    """The fields of a message of protocol buffers: [(number, value)]."""

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    at, found = 0, []
    while at < len(data):
        key = varint()
        size = {0: None, 1: 8, 2: None, 5: 4}[key & 7]
        if key & 7 == 0:
            found.append((key >> 3, varint()))
            continue
        if size is None:
            size = varint()
        found.append((key >> 3, data[at : at + size]))
        at += size
    return found


def scalars(folder):
    """{(tag, step): value} of all event files below a folder; each value may occur once."""
    found = {}
    for file in folder.rglob("events.out.tfevents.*"):
        data, events = file.read_bytes(), []
        while data:
            (length,), (check,) = struct.unpack("<Q", data[:8]), struct.unpack("<I", data[8:12])
            assert check == track.masked_crc32c(data[:8])
            body, data = data[12 : 12 + length], data[12 + length :]
            assert struct.unpack("<I", data[:4])[0] == track.masked_crc32c(body)
            events.append(fields(body))
            data = data[4:]
        assert (3, b"brain.Event:2") in events[0] and len(events) > 1
        for event in map(dict, events[1:]):
            assert 1e9 < struct.unpack("<d", event[1])[0] < 1e10
            for _, value in fields(event[5]):
                tag, number = (v for _, v in fields(value))
                key = tag.decode(), event[2]
                assert key not in found, f"{key} is there twice"
                found[key] = struct.unpack("<f", number)[0]
    return found


class Track(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.base = tempfile.TemporaryDirectory()
        cls.made = pathlib.Path(cls.base.name)
        run = cls.made / "runs/small.3k.seed-1.0123abcd"
        train = "train", SMOKE, "--data", "store", "-o", run, "--threads", "1"
        for words in (
            ("data", "synth", "-o", "store", "--documents", "10"),
            (*train, *(word for text in SETTINGS for word in ("--set", f"train.{text}"))),
        ):
            words = [str(word) for word in (PROGRAM, *words)]
            subprocess.run(words, cwd=cls.made, check=True, capture_output=True)
        cls.lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        shutil.rmtree(cls.made / "store")

    @classmethod
    def tearDownClass(cls):
        cls.base.cleanup()

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.study = pathlib.Path(folder.name) / "study"
        shutil.copytree(self.made, self.study)
        (self.run_folder,) = (self.study / "runs").iterdir()

    def has(self, lines, more=""):
        (self.run_folder / "metrics.jsonl").write_text("".join(lines) + more)

    def track(self, *words, code=0):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            self.assertEqual(track.main([str(self.study), "--json", *words]), code, err)
        return json.loads(out.getvalue())

    def expected(self):
        found = {}
        for entry in map(json.loads, self.lines):
            for name, value in entry.get("evaluation", {}).items():
                found[f"loss/{name}", entry["step"]] = value["loss"]
            if "grad_norm" in entry:
                found["train/loss", entry["step"]] = entry["loss"]
        return found

    def check_scalars(self):
        found = scalars(self.study / "tensorboard")
        expected = self.expected()
        self.assertGreater(len(expected), 12)
        for key, value in expected.items():
            self.assertAlmostEqual(found[key], value, delta=1e-5 * abs(value))
        self.assertEqual(len([k for k in found if k[0] == "train/loss"]), 6)

    def test_checksum_is_that_of_its_definition(self):
        crc = 0xE3069283  # CRC-32C of "123456789" [RFC 3720, B.4 has the polynomial]
        masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
        self.assertEqual(track.masked_crc32c(b"123456789"), masked)

    def test_event_file_has_each_scalar_once(self):
        self.assertEqual(self.track()["points"], len(self.lines))
        self.check_scalars()
        self.assertEqual(self.track()["points"], 0)
        self.check_scalars()
        self.assertEqual([f.name for f in (self.study / "tensorboard").iterdir() if f.is_dir()],
                         ["small.3k.seed-1"])

    def test_growing_and_resumed_run_is_continued(self):
        self.has(self.lines[:5], more=self.lines[5][:10])
        self.assertEqual(self.track()["points"], 5)
        self.has(self.lines[:3])  # a resumed run repeats steps
        self.assertEqual(self.track()["points"], 0)
        self.has(self.lines)
        # A killed call has written more than its cursor says
        (file,) = self.study.rglob("events.out.tfevents.*")
        file.write_bytes(file.read_bytes() + b"half a record")
        self.assertEqual(self.track()["points"], len(self.lines) - 5)
        self.check_scalars()

    def test_follow_ends_with_the_run(self):
        self.study = self.run_folder
        self.assertEqual(self.track("--follow", "--interval", "0.01")["runs"], 1)
        self.assertEqual(len(list(self.study.glob("tensorboard/*/events*"))), 1)

    def test_library_gets_each_step_once(self):
        logged = []
        fake = types.ModuleType("wandb")
        fake.log = lambda values, step: logged.append((step, values))
        fake.finish = lambda: logged.append("end")
        fake.init = lambda **options: logged.append(options) or fake
        sys.modules["wandb"] = fake
        self.addCleanup(sys.modules.pop, "wandb")
        self.track("--to", "wandb", "--project", "mine")
        start, *steps, end = logged
        self.assertEqual((start["group"], start["name"]), ("small", "small.3k.seed-1"))
        self.assertEqual((start["config"]["train.steps"], end), (6, "end"))
        self.assertEqual([step for step, _ in steps], sorted(step for step, _ in steps))
        self.assertEqual(len(steps), len(self.lines))
        self.track("--to", "wandb", "--project", "mine")
        self.assertEqual(len(logged), len(self.lines) + 2)

    def test_missing_library_and_study_give_one_sentence(self):
        sys.modules["trackio"] = None
        self.addCleanup(sys.modules.pop, "trackio")
        self.assertIn("run pip install trackio", self.track("--to", "trackio", code=2)["error"])
        shutil.rmtree(self.study / "runs")
        self.assertIn("there is no run with metrics.jsonl", self.track(code=2)["error"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
