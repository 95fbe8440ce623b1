"""The Python package, as it is installed from a wheel.

Usage: package_test.py BUILD. Makes the wheel from the build and installs it into BUILD/package.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
import zipfile

BUILD = pathlib.Path(sys.argv[1]).resolve()
SOURCE = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = BUILD / "package"


def run(*command, **options):
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), **options.pop("env", {})}
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=environment, **options
    )


def assay(*arguments, **options):
    return run(PACKAGE / "bin/assay", *arguments, **options)


def python(code, **options):
    return run(sys.executable, "-c", code, **options)


class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        subprocess.run(["rm", "-rf", str(PACKAGE)], check=True)
        made = run(SOURCE / "tools/wheel", BUILD, PACKAGE / "dist")
        if made.returncode:
            raise RuntimeError(made.stdout + made.stderr)
        cls.wheel = pathlib.Path(made.stdout.split()[-1])
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        installed = run(*pip, "--no-deps", "--no-compile", "--target", PACKAGE, cls.wheel)
        if installed.returncode:
            raise RuntimeError(installed.stdout + installed.stderr)

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def check(self, done):
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_user_without_an_entry_in_the_password_file_has_a_name(self):
        nameless = {"LOGNAME": "", "USER": "", "LNAME": "", "USERNAME": ""}
        code = """
import getpass, os, pwd
def unknown(number):
    raise KeyError(number)
pwd.getpwuid = unknown
from assay import _library
_library.load()
assert getpass.getuser() == str(os.getuid())
"""
        self.check(python(code, env=nameless))

    def test_wheel_serves_every_python_and_names_torch(self):
        name = r"assay-[0-9.]+-py3-none-manylinux_2_\d+_x86_64\.whl"
        self.assertRegex(self.wheel.name, name)
        with zipfile.ZipFile(self.wheel) as archive:
            names = archive.namelist()
            metadata = next(n for n in names if n.endswith("/METADATA"))
            self.assertIn("Requires-Dist: torch==2.11.*", archive.read(metadata).decode())
        for file in ("py.typed", "ops.pyi", "libassay.so", "plans/models/smoke.toml"):
            self.assertIn(f"assay/{file}", names)
        self.assertEqual([n for n in names if re.search(r"libtorch|libc10|libgomp|libstdc", n)], [])

    def test_sdist_has_all_files_of_the_wheel_and_needs_no_torch(self):
        made = python(
            f"""
import scikit_build_core.build as build
assert not [name for name in build.get_requires_for_build_sdist() if "torch" in name]
assert "torch==2.11.*" in build.get_requires_for_build_wheel()
build.build_sdist({self.folder.name!r})
""",
            cwd=SOURCE,
        )
        self.check(made)
        self.assertNotIn("WARNING", made.stdout + made.stderr)
        (sdist,) = pathlib.Path(self.folder.name).iterdir()
        with tarfile.open(sdist) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        needed = [SOURCE / name for name in ("CMakeLists.txt", "README.md", "LICENSE")]
        for folder in ("cmake", "src", "plans", "python/assay"):
            files = (SOURCE / folder).rglob("*")
            needed += [file for file in files if file.suffix != ".pyc" and file.is_file()]
        missing = {str(file.relative_to(SOURCE)) for file in needed} - names
        self.assertEqual(missing, set())

    def test_command_gives_what_the_program_gives(self):
        commands = ["--version"], ["list", "mixers"], ["list", "models"], ["describe", "op", "gla"]
        for words in commands:
            program = run(BUILD / "assay", *words, cwd=SOURCE)
            command = self.check(assay(*words, cwd=self.folder.name))
            self.assertEqual(command, program.stdout, words)

    def test_module_is_the_command(self):
        command = self.check(assay("list", "mixers", "--json"))
        module = self.check(run(sys.executable, "-m", "assay", "list", "mixers", "--json"))
        self.assertEqual(module, command)

    def test_bad_input_has_the_exit_code_of_the_program(self):
        done = assay("describe", "mixer", "retentoin", "--json")
        self.assertEqual(done.returncode, 2)
        self.assertIn("did you mean 'retention'", json.loads(done.stdout)["error"])

    def test_reader_that_leaves_ends_the_command_silently(self):
        done = run("sh", "-c", f"{PACKAGE}/bin/assay list mixers | true; echo end")
        self.assertEqual((done.stdout, done.stderr), ("end\n", ""))

    def test_wrong_torch_gives_one_sentence(self):
        fake = pathlib.Path(self.folder.name)
        (fake / "torch").mkdir()
        (fake / "torch/__init__.py").write_text("")
        (fake / "torch-2.99.0.dist-info").mkdir()
        (fake / "torch-2.99.0.dist-info/METADATA").write_text("Name: torch\nVersion: 2.99.0\n")
        path = {"PYTHONPATH": f"{fake}:{PACKAGE}"}
        text = (
            "assay needs torch 2.11.*, and torch 2.99.0 is installed: "
            "run pip install 'torch==2.11.*'"
        )
        done = assay("doctor", env=path)
        self.assertEqual((done.returncode, done.stderr), (1, f"assay: {text}\n"))
        done = python("import assay.ops", env=path)
        self.assertEqual(done.stderr.splitlines()[-1], f"ImportError: {text}")

    def test_functions_equal_the_operators(self):
        self.check(
            python(
                """
import torch, assay, assay.ops
q, k, v = (torch.randn(2, 9, 3, 4, requires_grad=True) for _ in range(3))
g = -torch.rand(2, 9, 3, 4)
out, state = assay.ops.gla(q, k, v, g)
same, _ = torch.ops.assay.gla(q, k, v, g, scale=0.5)
assert torch.equal(out, same)
out.sum().backward()
assert q.grad is not None and state.shape == (2, 3, 4, 4)
assert "exp gk_t" in assay.ops.gla.__doc__
"""
            )
        )

    def test_stub_file_is_current(self):
        printed = self.check(run(sys.executable, SOURCE / "tools/stubs.py"))
        self.assertEqual(printed, (SOURCE / "python/assay/ops.pyi").read_text())

    def test_interrupted_training_is_saved_and_resumed(self):
        folder = self.folder.name
        self.check(assay("data", "synth", "-o", "store", "--documents", "100", cwd=folder))
        train = ["train", SOURCE / "plans/models/smoke.toml", "--data", "store", "-o", "run"]
        train += ["--set", "train.steps=2000", "--set", "train.warmup_steps=1"]
        process = subprocess.Popen(
            [str(word) for word in [PACKAGE / "bin/assay", *train]],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(PACKAGE)},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        metrics = pathlib.Path(folder, "run/metrics.jsonl")
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, errors)
        self.assertIn(b"Continue with --resume", errors)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
