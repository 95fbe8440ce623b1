"""bench/compare.py names what became slower, and nothing else."""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "bench"))
import compare  # noqa: E402


def compared(earlier, later, *options):
    """What is printed, and the message of the end; "" if nothing is slower."""
    with tempfile.TemporaryDirectory() as name:
        files = [pathlib.Path(name) / "earlier.json", pathlib.Path(name) / "later.json"]
        for file, rows in zip(files, (earlier, later)):
            file.write_text(rows if isinstance(rows, str) else json.dumps({"rows": rows}))
        out = io.StringIO()
        arguments = ["compare.py", *map(str, files), *options]
        with mock.patch.object(sys, "argv", arguments), contextlib.redirect_stdout(out):
            try:
                compare.main()
            except SystemExit as end:
                return out.getvalue(), str(end.code)
        return out.getvalue(), ""


class Compare(unittest.TestCase):
    def test_slower_times_and_rates_are_named(self):
        before = [
            {"model": "a", "tokens_per_second": 100.0, "peak_memory_bytes": 7},
            {"form": "full", "time": 64, "forward": 1.0, "backward": 2.0},
            {"operator": "gla", "kernel, ms": "10 + 30", "floor, µs": 1.0},
            {"model": "b", "decode": {"seconds": 1.0, "sequences": 64}},
        ]
        after = [
            {"model": "a", "tokens_per_second": 97.0, "peak_memory_bytes": 9},
            {"form": "full", "time": 64, "forward": 1.01, "backward": 2.1},
            {"operator": "gla", "kernel, ms": "11 + 30", "floor, µs": 9.0},
            {"model": "b", "decode": {"seconds": 1.5, "sequences": 64}},
        ]
        out, end = compared(before, after)
        slower = [line for line in out.splitlines() if line.startswith("slower")]
        self.assertEqual(len(slower), 4, out)
        for text in ("model a: tokens_per_second", "time 64: backward", "gla: kernel", "b: decode"):
            self.assertTrue(any(text in line for line in slower), (text, slower))
        self.assertIn("4 of 5 figures", end)
        self.assertEqual(compared(before, after, "--percent", "60")[1], "")
        self.assertEqual(compared(after, before)[1], "")

    def test_figures_of_peers_and_of_other_rows_are_left_out(self):
        before = [{"T": 64, "Assay, tokens/s": 9.0, "transformers, tokens/s": 9.0}]
        after = [{"T": 64, "Assay, tokens/s": 9.0, "transformers, tokens/s": 1.0}]
        self.assertEqual(compared(before, after)[1], "")
        other = [{"T": 128, "Assay, tokens/s": 1.0}]
        self.assertIn("no row in common", compared(before, other)[1])

    def test_what_is_no_document_is_rejected(self):
        for text in ("", "[]", '{"rows": 3}', '{"rows": [3]}'):
            self.assertIn("not a document with rows", compared(text, [])[1], text)


if __name__ == "__main__":
    unittest.main()
