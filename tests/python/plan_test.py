"""Modules of PyTorch in plans: training, resuming, evaluation, decoding and a study.

Usage: plan_test.py BUILD, after package_test.py
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

import hosted

BUILD = pathlib.Path(sys.argv[1]).resolve()
TWIN = pathlib.Path(__file__).with_name("twin.py").read_text()
BROKEN = pathlib.Path(__file__).with_name("broken.py").read_text()
# Ends the process in the third step where the environment says so
KILLED = """

import os
import signal

steps = 0


class Killed(Twin):
    def forward(self, x, state):
        global steps
        steps += torch.is_grad_enabled() and x.requires_grad
        if steps == int(os.environ.get("KILLED_AT", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x, state)
"""
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
end_tokens = 1024
checkpoint_every = 10
keep_steps = [10, 20]
gradient_slices = 2
"""
PLAN = """
reference = "transformer++"
models    = ["transformer++", "mine"]
seeds     = [1]
tokens    = [2048]
ladder    = { tokens = [1024, 2048], seeds = [1, 2] }
data      = { train = ["known_a", "known_b"], out_of_domain = ["fresh_a"], sequence_length = 64 }
train     = { batch = 8, learning_rate = 6e-3, warmup_steps = 1, eval_tokens = 256 }
size      = { d_model = 32, num_layers = 1, attention = { num_heads = 2 } }
[model.mine]
base    = "transformer++"
pattern = ["python:Twin"]
python  = "my_mixer.py"
"""
PLACE_OF_PYTHON = "plan.toml:13:11: model.mine: "
WEIGHTS = "checkpoints/step-20/model.safetensors"


class Plan(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.base = tempfile.TemporaryDirectory()
        cls.store = pathlib.Path(cls.base.name) / "store"
        hosted.assay(cls.base.name, "data", "synth", "-o", cls.store, "--documents", "20")

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

    def bytes_of(self, file):
        return (self.folder / file).read_bytes()

    def assay(self, *words, **options):
        return hosted.assay(self.folder, *words, **options)

    def train(self, config, run, *words, **options):
        return self.assay("train", config, "--data", self.store, "-o", run, *words, **options)

    def refused_without_python(self, *words):
        done = subprocess.run(
            [str(word) for word in (BUILD / "assay", *words)],
            cwd=self.folder, capture_output=True, text=True,
        )
        self.assertEqual(done.returncode, 2, done.stderr)
        return done.stderr

    def test_run_equals_that_of_the_same_mixer_in_cpp(self):
        self.assay("check", "my_mixer.py:Twin", "num_heads=4")
        self.train("cpp.toml", "cpp")
        self.train("python.toml", "twin")
        # With the weights of one, both have the same losses, decode alike, and score alike
        for weights in self.folder.glob("twin/checkpoints/*"):
            shutil.rmtree(weights)
        for weights in self.folder.glob("cpp/checkpoints/*"):
            shutil.copytree(weights, self.folder / "twin/checkpoints" / weights.name)
        found = {}
        for run in ("cpp", "twin"):
            words = "eval", "loss", run, "--data", self.store, "--tokens", 2048, "--json"
            said = self.assay(*words)
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

    def test_killed_run_and_two_ranks_give_the_same_bytes(self):
        self.write("my_mixer.py", TWIN + KILLED)
        config = (self.folder / "python.toml").read_text().replace("Twin", "Killed")
        self.write("killed.toml", config)
        self.train("killed.toml", "whole")
        # 2 layers and 2 slices: four calls per step
        self.train("killed.toml", "cut", code=-signal.SIGKILL, KILLED_AT=str(4 * 12 + 1))
        self.assertEqual(
            [step.name for step in self.folder.glob("cut/checkpoints/step-*")], ["step-10"]
        )
        self.train("killed.toml", "ranks", "--ranks", "2", "--device", "cpu", "--threads", "1")
        self.assertEqual(self.bytes_of("ranks/" + WEIGHTS), self.bytes_of("whole/" + WEIGHTS))
        self.write("my_mixer.py", "# changed: a run keeps its code\n")
        self.train("cut/config.toml", "cut", "--resume")
        self.assertEqual(self.bytes_of("cut/" + WEIGHTS), self.bytes_of("whole/" + WEIGHTS))

    def test_seed_decides_the_starting_values(self):
        def weights(run, seed):
            options = f"train.seed={seed}", "train.steps=1", "train.keep_steps=[1]"
            self.train("python.toml", run, *(w for o in options for w in ("--set", o)))
            return self.bytes_of(f"{run}/checkpoints/step-1/model.safetensors")

        first = weights("first", 1)
        self.assertEqual(weights("again", 1), first)
        self.assertNotEqual(weights("other", 2), first)

    def test_key_depends_on_the_text_of_the_file(self):
        def key():
            return json.loads(self.train("python.toml", "run", "--dry-run", "--json"))["key"]

        first = key()
        self.assertEqual(key(), first)
        self.write("my_mixer.py", TWIN + "\n# a comment\n")
        self.assertNotEqual(key(), first)

    def test_layer_of_an_imported_package_trains_and_its_files_are_in_the_key(self):
        package = self.folder / "likefla"
        package.mkdir()
        sys.path.append(str(self.folder))
        self.addCleanup(sys.path.remove, str(self.folder))
        self.write("likefla/__init__.py", "")
        self.write("likefla/ops.py", "")
        self.write("likefla/layers.py", BROKEN)
        names = {"mixer": "python:LayerOfFla", "table": "LayerOfFla"}
        self.write("fla.toml", MODEL.format(python='python = "likefla.layers"', **names))

        def key():
            return json.loads(self.train("fla.toml", "run", "--dry-run", "--json"))["key"]

        first = key()
        self.train("fla.toml", "run")
        self.assertTrue((self.folder / "run" / WEIGHTS).exists())
        self.write("likefla/ops.py", "# another kernel\n")
        self.assertNotEqual(key(), first)

    def test_program_without_python_says_what_to_do(self):
        said = self.refused_without_python(
            "train", "python.toml", "--data", self.store, "-o", "run"
        )
        self.assertIn("this program has no Python", said)
        self.assertIn("pip install .", said)
        said = self.refused_without_python("check", "my_mixer.py:Twin")
        self.assertIn("`assay check` needs Python", said)

    def test_mistakes_are_refused_with_file_and_line(self):
        def refused(**replacements):
            text = (self.folder / "python.toml").read_text()
            for old, new in replacements.items():
                text = text.replace(old, new)
            self.write("wrong.toml", text)
            return self.train("wrong.toml", "run", code=2)

        self.assertRegex(refused(num_heads="num_head"), r"wrong.toml:.*did you mean 'num_heads'")
        self.assertRegex(refused(Twin="Twinn"), r"wrong.toml:.*did you mean 'Twin'")
        self.assertIn("wrong.toml:6", refused(my_mixer="no_mixer"))
        self.assertIn('did you mean "python:Twin"?', refused(**{"python:": ""}))
        self.write("my_mixer.py", TWIN.replace("self.out_proj(self.norm", "self.out(self.norm"))
        self.assertRegex(refused(), r"my_mixer.py:\d+: AttributeError: .*'out'")
        self.write("my_mixer.py", TWIN.replace("def forward(self, x, state)", "def forward(self"))
        self.assertRegex(refused(), r"my_mixer.py:\d+: SyntaxError")

    def refused_plan(self, mixer="Twin"):
        self.write("plan.toml", PLAN.replace("Twin", mixer))
        words = "run", "plan.toml", "--data", self.store, "-o", "study", "--dry-run"
        return self.assay(*words, code=2)

    def test_plan_refuses_what_check_refuses_with_its_words(self):
        self.write("my_mixer.py", BROKEN)
        for name in (
            "ChangesItsInput", "Detached", "DetachedParameter", "EndsTheProgram",
            "StateOnAnotherDevice", "WrongDtype",
        ):
            with self.subTest(name):
                said = self.assay("check", f"my_mixer.py:{name}", "--d-model=32", "--json", code=1)
                reason = next(c["message"] for c in json.loads(said)["checks"] if not c["ok"])
                self.assertRegex(reason, r"^my_mixer.py:\d+: ")
                self.assertIn(PLACE_OF_PYTHON + reason, self.refused_plan(name))

    def test_plan_with_a_module_that_reads_later_tokens_names_the_line(self):
        self.write("my_mixer.py", BROKEN)
        said = self.refused_plan("ReadsTheFuture")
        self.assertIn("python:ReadsTheFuture reads later tokens", said)
        self.assertRegex(said, r"at my_mixer.py:\d+; `assay check my_mixer.py:ReadsTheFuture` says")

    def test_plan_with_a_random_module_names_the_line(self):
        self.write("my_mixer.py", BROKEN)
        for name in "DropsValues", "ScalesAtRandom":
            said = self.refused_plan(name)
            self.assertRegex(said, f"python:{name} returns other values .* at my_mixer.py:\\d+; ")

    def test_plan_accepts_a_module_that_prints(self):
        self.write("my_mixer.py", BROKEN)
        self.write("plan.toml", PLAN.replace("Twin", "Prints"))
        words = "run", "plan.toml", "--data", self.store, "-o", "study", "--dry-run", "--json"
        self.assertEqual(len(json.loads(self.assay(*words))["runs"]), 5)

    def test_module_that_cannot_be_built_is_refused_with_both_places(self):
        for line in ("if if", "import no_such_module", "import sys; sys.exit(3)"):
            self.write("my_mixer.py", line + "\n")
            self.assertIn(PLACE_OF_PYTHON + "my_mixer.py:1: ", self.refused_plan())
        self.write("my_mixer.py", TWIN)
        self.assertIn(
            PLACE_OF_PYTHON + "my_mixer.py: there is no class 'Twins'", self.refused_plan("Twins")
        )

    def test_plan_finds_the_file_next_to_it(self):
        self.write("plan.toml", PLAN)
        outside = self.folder / "outside"
        outside.mkdir()
        words = "run", "../plan.toml", "--data", self.store, "-o", "../study", "--dry-run"
        said = json.loads(hosted.assay(outside, *words, "--json"))
        names = [run["name"] for run in said["runs"]]
        self.assertEqual((len(names), sum("mine" in name for name in names)), (5, 1), names)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
