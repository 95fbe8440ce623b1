"""assay.nn: every registered mixer as a module of PyTorch.

Usage: nn_test.py BUILD, after package_test.py
"""

import copy
import io
import json
import math
import pathlib
import tempfile
import unittest
import unittest.mock

import hosted  # before torch, which it sets up
import numpy as np
import torch

from assay import _mixers, nn, ops
from assay._mixers import tomllib

KINDS = nn._Core.kinds()
D_MODEL, TIME = 48, 37
# Their gradient is not the slope: that of a softmax, or of a choice. A choice has no gradient.
NOT_SMOOTH = {"top1_element", "block_selection", "nsa"}


def examples():
    """(name, make) for each configuration that a mixer is tested with."""
    for kind in KINDS:
        for number, table in enumerate(nn._Core.describe(kind)[5]):
            fields = tomllib.loads(table)

            def make(kind=kind, fields=fields):
                module = nn.Mixer(kind, D_MODEL, seed=1, dtype=torch.float64, **fields)
                noise = torch.Generator().manual_seed(2)
                with torch.no_grad():  # off the starting values, so that each part has an effect
                    for p in module.parameters():
                        size = p.shape[-1] ** -0.5 if p.dim() > 1 else 0.3
                        p.add_(size * torch.randn(p.shape, generator=noise, dtype=p.dtype))
                return module

            yield f"{kind} {number}", make


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


class Mixers(unittest.TestCase):
    def test_output_does_not_depend_on_cuts(self):
        for name, make in examples():
            with self.subTest(name), torch.no_grad():
                module, x = make(), random(2, TIME, D_MODEL)
                whole, _ = module(x)
                self.assertEqual(whole.shape, x.shape)
                for piece in (1, 16):
                    state, parts = None, []
                    for part in x.split(piece, 1):
                        y, state = module(part, state)
                        parts.append(y)
                    self.assertLess(error(torch.cat(parts, 1), whole), 1e-11, piece)

    def test_gradient_is_the_slope(self):
        for name, make in examples():
            with self.subTest(name):
                module, x, c = make(), random(2, TIME, D_MODEL), random(2, TIME, D_MODEL, seed=1)
                (module(x)[0] * c).sum().backward()
                for key, parameter in module.named_parameters():
                    self.assertIsInstance(parameter, torch.nn.Parameter)
                    if name.split()[0] not in NOT_SMOOTH:
                        self.assertGreater(parameter.grad.norm(), 1e-6, key)
                if name.split()[0] in NOT_SMOOTH:
                    continue
                moves = [random(*p.shape, seed=i) for i, p in enumerate(module.parameters())]
                slope = sum((p.grad * m).sum() for p, m in zip(module.parameters(), moves))

                def moved(step):
                    with torch.no_grad():
                        for p, move in zip(module.parameters(), moves):
                            p.add_(step * move)
                        value = (module(x)[0] * c).sum()
                        for p, move in zip(module.parameters(), moves):
                            p.sub_(step * move)
                    return value

                quotient = (moved(1e-6) - moved(-1e-6)) / 2e-6
                self.assertAlmostEqual(
                    quotient.item(), slope.item(), delta=1e-5 * abs(slope.item()) + 1e-3
                )

    def test_copies_and_conversions_keep_parameters_shared(self):
        for name, make in examples():
            with self.subTest(name):
                module, x = make(), random(1, 5, D_MODEL)
                expected, _ = module(x)
                file = io.BytesIO()
                torch.save(module, file)
                file.seek(0)
                loaded = nn.Mixer(module.kind, D_MODEL, **module.fields).double()
                loaded.load_state_dict(module.state_dict())
                others = copy.deepcopy(module), torch.load(file, weights_only=False), loaded
                for other in others:
                    self.assertTrue(torch.equal(other(x)[0], expected))
                    other(x)[0].sum().backward()
                    with torch.no_grad():
                        for p in other.parameters():
                            if module.kind not in NOT_SMOOTH:
                                self.assertIsNotNone(p.grad)
                            p.zero_()
                    self.assertFalse(torch.equal(other(x)[0], expected))
                self.assertTrue(torch.equal(module(x)[0], expected))
                single = module.float()(x.float())[0]
                self.assertLess(error(single.double(), expected), 1e-4)

    def test_names_and_fields_are_checked(self):
        self.assertEqual(len(dir(nn)), len(KINDS) + 1)
        reserved = set(nn.inspect.signature(nn.Mixer.__init__).parameters)
        for name in set(dir(nn)) - {"Mixer"}:
            fields = nn._Core.describe(nn._KINDS[name])[1]
            self.assertFalse(reserved & set(fields), name)
            self.assertIn("Fields:", getattr(nn, name).__doc__)
        self.assertEqual(nn.GatedDeltaNet(64, num_heads=2).kind, "gated_delta_net")
        for call, text in (
            (lambda: nn.Mixer("gated_delta_ned", 64), "did you mean 'gated_delta_net'"),
            (lambda: nn.GatedDeltanet, "did you mean 'GatedDeltaNet'"),
            (lambda: nn.GLA(64, num_head=2), "did you mean 'num_heads'"),
            (lambda: nn.GLA(64, num_heads="two"), "num_heads"),
            (lambda: nn.GLA(64, num_heads=5), "num_heads = 5"),
            (lambda: nn.GLA(64)(torch.zeros(1, 3, 63)), "must be \\[batch, time, 64\\]"),
            (lambda: nn.GLA(64, layer=2, num_layers=2), "layer = 2"),
        ):
            with self.assertRaisesRegex((ValueError, AttributeError), text):
                call()
        module = nn.GLA(64)
        copies = {key: value.clone() for key, value in module.named_parameters()}
        with self.assertRaisesRegex(RuntimeError, "was replaced"):
            torch.func.functional_call(module, copies, (torch.zeros(1, 3, 64),))

    def test_arguments_that_are_not_tensors_are_named(self):
        array, x = np.zeros((1, 3, 64), np.float32), torch.zeros(1, 3, 64)
        heads = torch.zeros(1, 3, 2, 8)
        module = nn.GLA(64)
        for call, text in (
            (lambda: module(array), "gla: x must be a torch.Tensor, not ndarray"),
            (lambda: module((x, {})), "gla: x must be a torch.Tensor, not tuple"),
            (lambda: module(x, x), "gla: state must be a dict or None, not Tensor"),
            (
                lambda: ops.linear_attention(array, heads, heads),
                "assay.ops.linear_attention: q must be a torch.Tensor, not ndarray",
            ),
            (lambda: ops.linear_attention([heads], heads, heads), "q must .* not list"),
            (
                lambda: ops.linear_attention(heads, heads, v=heads, initial_state=(heads,)),
                "initial_state must be a torch.Tensor, not tuple",
            ),
            (lambda: ops.linear_attention(heads, None, heads), "k must .* not NoneType"),
        ):
            with self.assertRaisesRegex(TypeError, text):
                call()
        with self.assertRaisesRegex(RuntimeError, "'scale'"):
            ops.linear_attention(heads, heads, heads, scale="a")

    def test_seed_decides_the_starting_values(self):
        weights = [nn.GLA(64, seed=seed).out_proj.weight for seed in (1, 1, 2)]
        self.assertTrue(torch.equal(weights[0], weights[1]))
        self.assertFalse(torch.equal(weights[0], weights[2]))
        self.assertGreater(weights[0].std(), 0.01)  # an output, whose start the model decides


class Run(unittest.TestCase):
    """A model of every mixer, computed from its modules, gives what the program gives."""

    def test_layers_of_a_run_give_the_scores_of_the_program(self):
        mixers = [kind for kind in KINDS if kind not in ("nsa",)]
        mixers = [kind for kind in mixers if not kind.endswith(("glu", "gelu", "channel_mix"))]
        with tempfile.TemporaryDirectory() as folder:
            run = pathlib.Path(folder) / "run"
            (pathlib.Path(folder) / "model.toml").write_text(
                f"[model]\nd_model = 64\nnum_layers = {len(mixers)}\n"
                f"pattern = {json.dumps(mixers)}\n[train]\nsteps = 1\nbatch_size = 2\n"
                "sequence_length = 32\nlearning_rate = 1e-3\nwarmup_steps = 1\nend_tokens = 64\n"
                "eval_tokens = 64\n"
            )
            hosted.assay(folder, "data", "synth", "-o", "store", "--documents", "10")
            hosted.assay(folder, "train", "model.toml", "--data", "store", "-o", run)
            tokens = [5, 9, 30, 2, 77, 5, 9, 1]
            line = json.dumps({"id": "a", "tokens": tokens})
            (pathlib.Path(folder) / "lines.jsonl").write_text(line + "\n")
            said = hosted.assay(folder, "score", "--model", run, "lines.jsonl")
            expected = json.loads(said.splitlines()[0])["logprobs"][1:]
            found = self.logprobs(run, tokens, len(mixers))
        for a, b in zip(found, expected, strict=True):
            self.assertAlmostEqual(a, b, delta=1e-4)

    def logprobs(self, run, tokens, num_layers):
        _, file = nn._files_of(run)
        weights = nn._read_tensors(file, "")

        def norm(x, name):
            return torch.nn.functional.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], 1e-5)

        x, handed = weights["embedding"][torch.tensor([tokens])], {}
        with torch.no_grad():
            for i in range(num_layers):
                mixer = nn.Mixer.from_run(run, i)
                channel = nn.Mixer.from_run(run, i, "channel_mixer")
                x = x + mixer(norm(x, f"layers_{i}.mixer_norm"), None, handed)[0]
                x = x + channel(norm(x, f"layers_{i}.channel_norm"))[0]
            head = weights.get("head.weight", weights["embedding"])
            scores = (norm(x, "norm") @ head.T).log_softmax(-1)[0, :-1]
        return scores.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


WITH_TRITON = """
import torch
import triton

@triton.jit
def kernel(x, y):
    pass

class UsesTriton(torch.nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.proj = torch.nn.Linear(d_model, d_model)

    def forward(self, x):
        y = torch.zeros_like(x)
        kernel[(1,)](self.proj(x), y)
        return y
"""


class TritonKernels(unittest.TestCase):
    def test_flops_are_counted_without_kernels(self):
        from triton.runtime.jit import JITFunction

        started = []
        handle = _mixers._create(WITH_TRITON, "with_triton.py", "UsesTriton", "", 8, 0, 1)
        record = lambda *args, **_: started.append(args)  # noqa: E731
        with unittest.mock.patch.object(JITFunction, "run", record):
            flops = _mixers._flops(handle, 16)
        _mixers._release(handle)
        self.assertEqual(flops, 2 * 8 * 8)
        self.assertEqual(started, [])

    def test_plan_gets_its_keys_on_the_cpu(self):
        modules = (WITH_TRITON, True), (WITH_TRITON.replace("kernel[(1,)]", "print"), False)
        for source, expected in modules:
            handle = _mixers._create(source, "with_triton.py", "UsesTriton", "", 8, 0, 1)
            self.assertEqual(_mixers._needs_gpu(handle), expected)
            _mixers._release(handle)

    def test_check_measures_one_configuration_that_works(self):
        from triton.runtime.autotuner import Autotuner

        measured = []

        def measure(self, config):
            measured.append(config)
            return [math.inf if config == "too large" else 1.0] * 3

        tuner = object.__new__(Autotuner)
        tuner.cache = {"key": "small"}
        with unittest.mock.patch.object(Autotuner, "_bench", measure):
            with _mixers.first_configuration():
                for config in ["too large", "small", "other"] * 2:
                    tuner._bench(config=config)
            self.assertEqual(measured, ["too large", "small", "small"])
            self.assertEqual(tuner.cache, {})
            tuner._bench(config="other")
        self.assertEqual(measured[-1], "other")


class TwoProducts(torch.nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.up = torch.nn.Linear(d_model, 2 * d_model)
        self.down = torch.nn.Linear(2 * d_model, d_model, bias=False)

    def forward(self, x):
        return self.down(self.up(x).tanh())


class HostedProducts(unittest.TestCase):
    def setUp(self):
        self.module = TwoProducts(D_MODEL)
        self.hosted = _mixers.Hosted(copy.deepcopy(self.module))
        self.exact = copy.deepcopy(self.module).double()
        self.x = random(2, TIME, D_MODEL)

    def gradients(self, function):
        hosted = self.hosted.module.parameters()
        found = function(lambda x: self.hosted(x, [], [])[0], self.x.bfloat16(), list(hosted))
        return zip(found, function(self.exact, self.x, list(self.exact.parameters())))

    def test_gradients_of_weights_are_not_rounded_to_bfloat16(self):
        def first(module, x, parameters):
            return torch.autograd.grad(module(x).square().sum(), parameters)

        for found, expected in self.gradients(first):
            self.assertLess(error(found.double(), expected), 0.02)
            self.assertFalse(torch.equal(found, found.bfloat16().float()))

    def test_gradients_have_gradients(self):
        def second(module, x, parameters):
            slopes = torch.autograd.grad(module(x).square().sum(), parameters, create_graph=True)
            return torch.autograd.grad(sum(slope.square().sum() for slope in slopes), parameters)

        for found, expected in self.gradients(second):
            self.assertLess(error(found.double(), expected), 0.05)

    def test_other_forms_of_calls_are_those_of_torch(self):
        self.assertIn("forward", vars(self.hosted.module.up))
        own = copy.deepcopy(self.module)
        own.up.forward = kept = lambda x: torch.cat([x, x], -1)
        _mixers.Hosted(own)
        self.assertIs(own.up.forward, kept)
        plain = self.module(self.x.float())
        torch.testing.assert_close(self.hosted(self.x.float(), [], [])[0], plain)
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = (
                torch.func.grad(lambda x, module=module: module(x).sum())(self.x.bfloat16())
                for module in (self.hosted.module, self.module)
            )
        torch.testing.assert_close(found, expected)


STARTS = """
import random
import secrets
import numpy
import torch

class Starts(torch.nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([DRAWN]))

    def forward(self, x):
        return self.scale * x
"""


class StartingValues(unittest.TestCase):
    def start(self, drawn, seed):
        source = STARTS.replace("DRAWN", drawn)
        handle = _mixers._create(source, "starts.py", "Starts", "", 8, 0, 1)
        try:
            _mixers._initialise(handle, seed)
            return _mixers._hosted[handle].module.scale.item()
        finally:
            _mixers._release(handle)

    def test_all_common_generators_start_from_the_seed(self):
        for drawn in "torch.rand(()).item()", "random.random()", "numpy.random.rand()":
            with self.subTest(drawn):
                self.assertEqual(self.start(drawn, 1), self.start(drawn, 1))
                self.assertNotEqual(self.start(drawn, 1), self.start(drawn, 2))

    def test_values_without_a_seed_are_refused(self):
        with self.assertRaisesRegex(_mixers.PythonModuleError, "starts.py:12: .* 'scale' starts"):
            self.start("float(secrets.randbelow(10**6))", 1)


class TorchCompile(unittest.TestCase):
    """Runs after Run: it starts threads of autograd, and a process with them has no copies."""

    def test_compiled_function_gives_the_same_results(self):
        mixer, x = nn.Mixer("gated_delta_net", D_MODEL, seed=1), random(2, TIME, D_MODEL).float()

        def function(x):
            return mixer(x.tanh())[0].square().mean()

        def results(function):
            y = function(x)
            return [y, *torch.autograd.grad(y, list(mixer.parameters()))]

        heads = random(1, 5, 2, 8).float()
        whole = torch.compile(ops.linear_attention, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(whole(heads, heads, heads), ops.linear_attention(*3 * [heads]))
        with self.assertRaisesRegex(Exception, "Mixer"):
            torch.compile(function, backend="aot_eager", fullgraph=True)(x)
        compiled = torch.compile(function, backend="aot_eager")
        for found, expected in zip(results(compiled), results(function)):
            torch.testing.assert_close(found, expected)


if __name__ == "__main__":
    unittest.main(argv=hosted.sys.argv[:1])
