"""Modules of PyTorch in plans: training, resuming, evaluation, decoding and a study.

Usage: plan_test.py BUILD, after package_test.py
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

BUILD = pathlib.Path(sys.argv[1]).resolve()
PACKAGE = BUILD / "package"

# The mixer gla of C++, with the names and shapes of its parameters.
TWIN = '''
import torch
from torch import nn

import assay.ops


class LowRank(nn.Module):
    def __init__(self, d_model, rank, width):
        super().__init__()
        self.down_proj = nn.Linear(d_model, rank, bias=False)
        self.up_proj = nn.Linear(rank, width)

    def forward(self, x):
        return self.up_proj(self.down_proj(x))


class Twin(nn.Module):
    """Gated linear attention. "Quotes" and \\\\ are kept."""

    def __init__(self, d_model, num_heads: int = 4):
        super().__init__()
        self.H, self.K, self.V = num_heads, d_model // 2, d_model
        self.qkvg_proj = nn.Linear(d_model, 2 * self.K + 2 * self.V, bias=False)
        self.gk = LowRank(d_model, 16, self.K)
        self.norm = nn.RMSNorm(self.V // num_heads, eps=1e-5)
        self.out_proj = nn.Linear(self.V, d_model, bias=False)

    def forward(self, x, state):
        q, k, v, z = self.qkvg_proj(x).split([self.K, self.K, self.V, self.V], -1)
        q, k, v = (t.unflatten(-1, (self.H, -1)) for t in (q, k, v))
        decay = nn.functional.logsigmoid(self.gk(x)).unflatten(-1, (self.H, -1)) / 16
        y, state = assay.ops.gla(q, k, v, decay, initial_state=state)
        return self.out_proj(self.norm(y).flatten(2) * nn.functional.silu(z)), {"S": state}
'''
MODEL = """
[model]
d_model = 32
num_layers = 2
pattern = ["{mixer}"]
{python}
[model.{table}]
num_heads = 4
[train]
steps = 20
batch_size = 4
sequence_length = 64
learning_rate = 3e-3
warmup_steps = 4
eval_every = 20
checkpoint_every = 10
keep_steps = [10, 20]
"""


def environment():
    return {**os.environ, "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1"}


class Plan(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.base = tempfile.TemporaryDirectory()
        cls.store = pathlib.Path(cls.base.name) / "store"
        cls.run_in(cls.base.name, "data", "synth", "-o", cls.store, "--documents", "100")

    @classmethod
    def tearDownClass(cls):
        cls.base.cleanup()

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.write("my_mixer.py", TWIN)
        python = 'python = "my_mixer.py"'
        self.write("python.toml", MODEL.format(mixer="python:Twin", table="Twin", python=python))
        self.write("cpp.toml", MODEL.format(mixer="gla", table="gla", python=""))

    def write(self, name, text):
        (self.folder / name).write_text(text)

    @classmethod
    def run_in(cls, folder, *words, code=0, program=PACKAGE / "bin/assay"):
        words = [str(word) for word in (program, *words)]
        done = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, env=environment()
        )
        if done.returncode != code:
            raise AssertionError(f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout + (done.stderr if code else "")

    def assay(self, *words, **options):
        return self.run_in(self.folder, *words, **options)

    def train(self, config, run, *words):
        self.assay("train", config, "--data", self.store, "-o", run, *words)

    def test_run_equals_that_of_the_same_mixer_in_cpp(self):
        self.train("cpp.toml", "cpp")
        self.train("python.toml", "twin")
        # With the weights of one, both have the same losses, decode alike, and score alike
        for weights in self.folder.glob("twin/checkpoints/*"):
            shutil.rmtree(weights)
        for weights in self.folder.glob("cpp/checkpoints/*"):
            shutil.copytree(weights, self.folder / "twin/checkpoints" / weights.name)
        found = {}
        for run in ("cpp", "twin"):
            said = self.assay("eval", "loss", run, "--data", self.store, "--json")
            found[run] = {k: v["loss"] for k, v in json.loads(said)["evaluation"].items()}
        self.assertGreater(len(found["cpp"]), 3)
        for name, loss in found["cpp"].items():
            self.assertAlmostEqual(found["twin"][name], loss, delta=2e-6)
        words = ["--tokens", "5,9,30,2", "--max-tokens", "12", "--temperature", "0", "--json"]
        cpp, twin = (
            json.loads(self.assay("generate", "--model", run, *words))["samples"]
            for run in ("cpp", "twin")
        )
        self.assertEqual(twin, cpp)

    def test_resumed_run_has_the_same_bytes(self):
        self.train("python.toml", "whole")
        shutil.copytree(self.folder / "whole", self.folder / "cut")
        shutil.rmtree(self.folder / "cut/checkpoints/step-20")
        (self.folder / "cut/done.json").unlink()
        self.write("my_mixer.py", "# changed: a run keeps its code\n")
        shutil.copy(self.folder / "whole/config.toml", self.folder / "python.toml")
        self.train("python.toml", "cut", "--resume")
        step = "checkpoints/step-20/model.safetensors"
        whole, cut = ((self.folder / run / step).read_bytes() for run in ("whole", "cut"))
        self.assertEqual(whole, cut)

    def test_seed_decides_the_starting_values(self):
        keys = set()
        for seed in (1, 1, 2):
            run = f"run{len(list(self.folder.glob('run*')))}"
            self.train("python.toml", run, "--set", f"train.seed={seed}", "--set", "train.steps=1",
                       "--set", "train.keep_steps=[1]")
            keys.add((self.folder / run / "checkpoints/step-1/model.safetensors").read_bytes())
        self.assertEqual(len(keys), 2)

    def test_key_depends_on_the_text_of_the_file(self):
        def key():
            said = self.assay(
                "train", "python.toml", "--data", self.store, "-o", "run", "--dry-run", "--json"
            )
            return json.loads(said)["key"]

        first = key()
        self.assertEqual(key(), first)
        self.write("my_mixer.py", TWIN + "\n# a comment\n")
        self.assertNotEqual(key(), first)

    def test_program_without_python_says_what_to_do(self):
        said = self.assay(
            *("train", "python.toml", "--data", self.store, "-o", "run"),
            code=2,
            program=BUILD / "assay",
        )
        self.assertIn("this program has no Python", said)
        self.assertIn("pip install .", said)
        said = self.assay("check", "my_mixer.py:Twin", code=2, program=BUILD / "assay")
        self.assertIn("`assay check` needs Python", said)

    def test_mistakes_are_refused_with_file_and_line(self):
        def refused(**replacements):
            text = (self.folder / "python.toml").read_text()
            for old, new in replacements.items():
                text = text.replace(old, new)
            self.write("wrong.toml", text)
            return self.assay("train", "wrong.toml", "--data", self.store, "-o", "run", code=2)

        self.assertRegex(refused(num_heads="num_head"), r"wrong.toml:.*did you mean 'num_heads'")
        self.assertRegex(refused(Twin="Twinn"), r"wrong.toml:.*did you mean 'Twin'")
        self.assertIn("wrong.toml:6", refused(my_mixer="no_mixer"))
        self.write("my_mixer.py", TWIN.replace("self.out_proj(self.norm", "self.out(self.norm"))
        self.assertRegex(refused(), r"my_mixer.py:\d+: AttributeError: .*'out'")
        self.write("my_mixer.py", TWIN.replace("def forward(self, x, state)", "def forward(self"))
        self.assertRegex(refused(), r"my_mixer.py:\d+: SyntaxError")

    def test_study_compares_a_python_module(self):
        self.write(
            "plan.toml",
            """
reference = "attention_model"
models    = ["attention_model", "mine"]
seeds     = [1]
tokens    = [2048]
ladder    = { tokens = [1024, 2048], seeds = [1, 2] }
data.store           = "STORE"
data.train           = ["known_a", "known_b"]
data.out_of_domain   = ["fresh_a"]
data.sequence_length = 64

train     = { batch = 8, learning_rate = 6e-3, warmup_steps = 1, eval_tokens = 256 }
size      = { d_model = 32, num_layers = 2 }
[model.attention_model]
base      = "transformer++"
attention = { num_heads = 2 }
[model.mine]
base    = "transformer++"
pattern = ["python:Twin"]
python  = "my_mixer.py"
""".replace("STORE", str(self.store)),
        )
        outside = self.folder / "outside"
        outside.mkdir()
        said = json.loads(
            self.run_in(outside, "run", "../plan.toml", "-o", "../study", "--json")
        )
        self.assertEqual([v["model"] for v in said["verdicts"]], ["mine"])
        self.assertEqual(said["runs"], 5)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
