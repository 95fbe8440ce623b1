"""assay.Study with a program that is a stand-in: interrupts and errors.

Usage: study_test.py PACKAGE_FOLDER
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock

PACKAGE = os.path.abspath(sys.argv[1])
PROGRAM = """
import os, signal, sys, time
def saved(*_):
    print("the runs are saved\\n" * 9999, file=sys.stderr)  # more than a pipe holds
    open("saved", "w").close()
    sys.exit(130)
signal.signal(signal.SIGINT, saved)
os.write(2, b"started\\n")  # print() would fail if the handler prints while it runs
time.sleep(60)
"""
PROGRESS = """
import sys
for line in ("comparing texts", "checking a", "0/2 done  a step 1", "0/2 done  a step 2",
             "1/2 done: a, loss 3.1", "1/2 done  b step 1", "the text is short",
             "2/2 done: b, loss 3.2"):
    print(line, file=sys.stderr)
print('{"verdicts": []}')
"""
CALLER = """
import sys
sys.path.insert(0, sys.argv[1])
import assay
assay.Study("plan.toml").run()
"""


class Study(unittest.TestCase):
    def test_notebook_keeps_the_newest_line_of_progress_only(self):
        sys.path.insert(0, PACKAGE)
        import assay

        shown = []
        place = types.SimpleNamespace(update=lambda data, raw: shown.append(data["text/plain"]))
        shell = types.SimpleNamespace(kernel=None)
        modules = {
            "IPython": types.SimpleNamespace(get_ipython=lambda: shell),
            "IPython.display": types.SimpleNamespace(display=lambda *_, **__: place),
        }
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder, "assay/__main__.py")
            program.parent.mkdir()
            program.write_text(PROGRESS)
            environment = mock.patch.dict(os.environ, {"PYTHONPATH": folder})
            with environment, mock.patch.dict(sys.modules, modules):
                assay.Study("plan.toml").run()
        self.assertEqual(shown[3], "0/2 done  a step 2\n")
        kept = "1/2 done: a, loss 3.1\nthe text is short\n2/2 done: b, loss 3.2\n"
        self.assertEqual(shown[-1], kept)

    def test_interrupt_reaches_the_program_and_its_last_words_are_shown(self):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder, "fake/assay/__main__.py")
            program.parent.mkdir(parents=True)
            program.write_text(PROGRAM)
            caller = subprocess.Popen(
                [sys.executable, "-c", CALLER, PACKAGE],
                cwd=folder, stderr=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": str(program.parents[1])},
            )
            self.assertEqual(caller.stderr.readline(), "started\n")
            caller.send_signal(signal.SIGINT)
            _, said = caller.communicate(timeout=60)
            self.assertTrue(pathlib.Path(folder, "saved").exists())
        self.assertEqual(caller.returncode, -signal.SIGINT, said[-500:])
        self.assertIn("the runs are saved", said)
        self.assertIn("KeyboardInterrupt", said)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
