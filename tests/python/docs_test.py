"""Runs docs/python.md: its module, its plan and its commands.

Usage: docs_test.py PAGE BUILD, after package_test.py
"""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

page = pathlib.Path(sys.argv[1]).read_text()
package = pathlib.Path(sys.argv[2]).resolve() / "package"
environment = {**os.environ, "PYTHONPATH": str(package)}

code = re.findall(r"^```(python|toml)\n(.*?)^```$", page, re.S | re.M)
assert [kind for kind, _ in code] == ["python", "toml"], code
commands = re.findall(r"^    (assay .*)$", page, re.M)
names = [command.split()[1] for command in commands]
assert names == ["check", "run", "track", "track"], commands
assert len(page.split()) < 1100, f"the page has {len(page.split())} words"

with tempfile.TemporaryDirectory() as folder:
    for name, (_, text) in zip(("my_mixer.py", "plan.toml"), code):
        pathlib.Path(folder, name).write_text(text)

    def run(command):
        words = [str(package / "bin/assay"), *shlex.split(command, comments=True)[1:], "--json"]
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    assert run(commands[0])["ok"]
    verdicts = run(commands[1])["verdicts"]
    assert [verdict["model"] for verdict in verdicts] == ["mine"], verdicts
    assert run(commands[2])["runs"] == 6
