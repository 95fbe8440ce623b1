"""assay check: modules that can be mixers, and broken ones with the message of each.

Usage: check_test.py PACKAGE_FOLDER
"""

import contextlib
import io
import json
import pathlib
import re
import sys
import tempfile
import time
import unittest

sys.path.insert(0, sys.argv[1])
import assay._check as check  # noqa: E402

MODULES = pathlib.Path(__file__).with_name("broken.py")

# (class, failing check, what the message says)
BROKEN = [
    ("ReadsTheFuture", "causality", "the output at position 0 changes when the tokens from"),
    ("WrongShape", "shape and dtype", r"returns the shape \[2, 16, 15\]; expected that of x"),
    ("WrongDtype", "shape and dtype", "returns torch.float64 for an input of torch.float32"),
    ("NeedsEvenLength", "lengths", "with sequences of length 1: .*RuntimeError: "),
    ("DetachedParameter", "gradients", "the parameter 'proj.weight' gets no gradient"),
    ("DetachedParameter", "gradcheck", "the gradient of the parameter 'proj.weight' differs"),
    ("WrongBackward", "gradcheck", "differs from finite differences in float64"),
    ("LosesPrecision", "half", r"results in bfloat16 are \d+\.\d% off those in torch.float64"),
    ("ForgetsState", "cuts", "pieces of 1 token give another output than the whole sequence"),
    ("DropsValues", "repeated", "two calls with the same input differ in y"),
    ("ScalesAtRandom", "repeated", "two calls with the same input differ in y"),
    ("MixesTheBatch", "rows", "the output of a sequence depends on the others of its batch"),
    ("CountsCalls", "shape and dtype", "forward changes the buffer 'calls'"),
    ("ChangesItsInput", "shape and dtype", "forward changes its input in place"),
    ("RaisesError", "shape and dtype", "AttributeError: .*no attribute 'projection'"),
    ("WithoutWidth", "constructor", "must take d_model or hidden_size; it takes size"),
    ("RaisesInTriton", "shape and dtype", "TypeError: .*Kernels of Triton need a GPU"),
    ("Detached", "repeated", "the output has no gradient"),
    ("FrozenParameter", "constructor", r"'proj.bias' has requires_grad = False.*a buffer"),
    ("EndsTheProgram", "shape and dtype", r"the module calls sys\.exit\(3\)"),
    ("NeedsAnArgument", "constructor", "TypeError: NeedsAnArgument.*argument: 'needed'"),
    ("BufferWithoutValues", "constructor", "'offset' is on the device meta"),
    ("StateOnAnotherDevice", "shape and dtype", "tensor 'state' of the state is on meta"),
    ("ReadsTheFutureInBfloat16", "causality", "the output at position 0 changes when"),
]


def run(*arguments):
    """Exit code, the JSON document, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = check.main([*arguments, "--d-model", "16", "--json"])
    return code, json.loads(out.getvalue()), err.getvalue()


class Check(unittest.TestCase):
    def test_good_module_passes_every_check(self):
        for name in ("Good", "GoodWithoutState", "LayerOfFla"):
            code, document, _ = run(f"{MODULES}:{name}")
            failed = [c for c in document["checks"] if not c["ok"]]
            self.assertEqual((code, failed, len(document["checks"])), (0, [], 10), name)

    def test_kernels_without_float64_are_compared_in_the_widest_dtype(self):
        cases = ("OnlyFloat32", ["gradcheck"]), ("OnlyBfloat16", ["gradcheck", "half"])
        for name, left_out in cases:
            code, document, _ = run(f"{MODULES}:{name}")
            said = {c["name"]: c["message"] for c in document["checks"]}
            self.assertEqual(code, 0, said)
            self.assertIn(f"torch.{name.removeprefix('Only').lower()}", said["shape and dtype"])
            self.assertEqual([n for n in said if said[n].startswith("left out")], left_out)

    def test_broken_module_fails_with_its_reason_and_place(self):
        lines = MODULES.read_text().splitlines()
        for name, failing, message in BROKEN:
            with self.subTest(name):
                code, document, _ = run(f"{MODULES}:{name}")
                failed = {c["name"]: c["message"] for c in document["checks"] if not c["ok"]}
                self.assertEqual(code, 1)
                self.assertIn(failing, failed)
                self.assertRegex(failed[failing], message)
                place = re.search(re.escape(str(MODULES)) + r":(\d+)", failed[failing])
                self.assertIsNotNone(place, failed[failing])
                begin = next(i for i, line in enumerate(lines, 1) if f"class {name}(" in line)
                self.assertIn(int(place[1]) - begin, range(20))

    def test_random_module_is_not_said_to_lack_precision(self):
        _, document, _ = run(f"{MODULES}:DropsValues")
        said = {c["name"]: c["message"] for c in document["checks"]}
        self.assertEqual(said["shape and dtype"], "")

    def test_unknown_class_is_refused_with_the_nearest_name(self):
        code, document, err = run(f"{MODULES}:Goood")
        self.assertEqual(code, 2)
        self.assertIn("did you mean 'Good'?", document["error"])
        self.assertIn(document["error"], err)

    def test_unknown_field_is_refused_with_the_nearest_name(self):
        code, document, _ = run(f"{MODULES}:Good", "gat=1.5")
        self.assertEqual(code, 1)
        self.assertIn("no field 'gat'; did you mean 'gate'?", document["checks"][0]["message"])
        # **kwargs would accept it
        code, document, _ = run(f"{MODULES}:LayerOfFla", "num_head=4")
        self.assertEqual(code, 1)
        self.assertIn("did you mean 'num_heads'?", document["checks"][0]["message"])

        code, document, _ = run(f"{MODULES}:Good", "d_model=7")
        self.assertEqual(code, 1)
        self.assertIn("'d_model' of Good is the d_model of the", document["checks"][0]["message"])

    def test_module_that_is_a_file_is_refused_with_the_name_of_the_file(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            pathlib.Path("mine.py").touch()
            code, document, _ = run("mine:Good")
        self.assertEqual(code, 2)
        self.assertIn("'mine'; did you mean 'mine.py'?", document["error"])

    def test_text_that_a_module_prints_is_not_in_the_json_document(self):
        code, document, err = run(f"{MODULES}:Prints")
        self.assertEqual((code, document["ok"]), (0, True))
        self.assertIn("forward is called", err)

    def test_syntax_error_is_reported_with_its_line(self):
        with self.assertRaises(check.PythonModuleError) as caught:
            check.load("bad.py", "import torch\nclass A(torch.nn.Module:\n")
        self.assertRegex(str(caught.exception), r"bad\.py:2: SyntaxError: ")

    def test_check_takes_seconds(self):
        begin = time.monotonic()
        run(f"{MODULES}:Good")
        self.assertLess(time.monotonic() - begin, 30)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
