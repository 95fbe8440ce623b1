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
assert [kind for kind, _ in code] == ["python", "toml", "python"], code
commands = re.findall(r"^    (assay .*)$", page, re.M)
names = [command.split()[1] for command in commands]
assert names == ["check", "run", "track", "track"], commands
assert len(page.split()) < 1200, f"the page has {len(page.split())} words"

CHECKS = """
models = study.verdicts()  # a list or a DataFrame
models = [v["model"] for v in models] if isinstance(models, list) else list(models["model"])
assert models == ["mine"], models
assert study.figure("curve-held-out")._repr_svg_().startswith("<svg")
for call, text in (
    (lambda: study.figure("curve-heldout"), "did you mean 'curve-held-out'"),
    (lambda: assay.Study("no_plan.toml").run(show=False), "no_plan.toml"),
):
    try:
        call()
    except Exception as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)
"""

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
    assert verdicts[0]["equal_tokens"]["value"] is not None, verdicts
    assert run(commands[2])["runs"] == 8
    runs = sorted(pathlib.Path(folder, "study/runs").glob("mine.*"))
    (store,) = pathlib.Path(folder, "study/data").iterdir()
    run(f"assay losses {runs[0]} --data {store} -o mine.jsonl")
    line = pathlib.Path(folder, "mine.jsonl").read_text().split("\n", 1)[0]
    assert json.loads(line)["run"]["model"] == "mine", line

    # The study is done, so it is only read
    pathlib.Path(folder, "notebook.py").write_text(code[2][1] + CHECKS)
    done = subprocess.run(
        [sys.executable, "notebook.py"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
