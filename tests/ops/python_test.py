"""Assay's operators as torch sees them: fake tensors, opcheck, torch.compile, torch.export, refused
arguments.

Usage: python_test.py LIBASSAY PROGRAM
"""

import json
import subprocess
import sys
import unittest

import torch
from torch.autograd import forward_ad
from torch._subclasses.fake_tensor import FakeTensorMode

LIBRARY, PROGRAM = sys.argv[1:3]
torch.ops.load_library(LIBRARY)
OPS = torch.ops.assay

B, T, H, K, V, DM, N = 2, 33, 4, 8, 6, 12, 5


def numbers(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype) * 0.5


def decays(*shape, dtype=torch.float32):
    return -torch.rand(*shape, dtype=dtype)


def attention(kv_heads=2):
    return [numbers(B, T, H, K), numbers(B, T, kv_heads, K), numbers(B, T, kv_heads, K)]


def heads():
    return [numbers(B, T, H, K), numbers(B, T, H, K), numbers(B, T, H, V)]


STATE = (B, H, K, V)


def calls():
    """Calls of every operator: (name, positional arguments, keyword arguments)."""
    torch.manual_seed(1)
    gate = torch.rand(B, T, H)
    scan = [
        numbers(B, T, DM),
        numbers(B, T, DM),
        decays(DM, N),
        numbers(B, T, 2, N),
        numbers(B, T, 2, N),
    ]
    by_token = [
        numbers(B, T, DM),
        numbers(B, T, DM),
        decays(B, T, N),
        numbers(B, T, 1, N),
        numbers(B, T, 1, N),
    ]
    ssd = [
        numbers(B, T, H, V),
        torch.rand(B, T, H),
        decays(H),
        numbers(B, T, 2, N),
        numbers(B, T, 2, N),
    ]
    longhorn = [numbers(B, T, DM), numbers(B, T, DM), numbers(B, T, N), numbers(B, T, N)]
    chosen = torch.zeros(B, H, T, 1, dtype=torch.int64)
    rwkv7 = [
        numbers(B, T, H, K),
        decays(B, T, H, K),
        *heads()[1:],
        numbers(B, T, H, K),
        numbers(B, T, H, K),
    ]
    return [
        ("window_attention", [*attention(), 7, 0.3], {}),
        ("window_attention", [*attention(), -1, 0.3], {"alibi_slopes": torch.rand(H)}),
        ("window_attention", [*attention(), 7, 0.3], {"sinks": torch.rand(H)}),
        ("window_attention", [*attention(), 7, 0.3], {"decay_sums": -torch.rand(B, T, H)}),
        ("top1_element", [*attention(), 0.3], {}),
        ("top1_chunk", [*attention(), 8, 0.3], {}),
        ("top1_chunk", [*attention(), 8, 0.3], {"selection": "approx", "top_k": 2}),
        ("top1_chunk", [*attention(), 8, 0.3], {"selected": chosen}),
        ("chunk_summaries", [numbers(B, T, 2, K), 8], {}),
        ("selective_scan", scan, {}),
        (
            "selective_scan",
            scan,
            {
                "D": numbers(DM),
                "z": numbers(B, T, DM),
                "delta_bias": numbers(DM),
                "delta_softplus": True,
                "initial_state": numbers(B, DM, N),
            },
        ),
        ("selective_scan", by_token, {"delta_softplus": True}),
        (
            "ssd",
            ssd,
            {"D": numbers(H), "z": numbers(B, T, H, V), "initial_state": numbers(B, H, V, N)},
        ),
        ("linear_attention", [*heads(), 0.3], {}),
        ("simple_gla", [*heads(), decays(B, T, H), 0.3], {"initial_state": numbers(*STATE)}),
        ("gla", [*heads(), decays(B, T, H, K), 0.3], {"initial_state": numbers(*STATE)}),
        ("delta_rule", [*heads(), gate, 0.3], {}),
        (
            "gated_delta_rule",
            [*heads(), decays(B, T, H), gate, 0.3],
            {"initial_state": numbers(*STATE)},
        ),
        ("rwkv5", [*heads(), decays(H, K), numbers(H, K), 0.3], {}),
        ("rwkv6", [*heads(), decays(B, T, H, K), numbers(H, K), 0.3], {}),
        ("rwkv7", [*rwkv7, 0.3], {}),
        ("longhorn", longhorn, {"D": numbers(DM), "dt_bias": numbers(DM)}),
        ("longhorn", longhorn, {"exact": True, "z": numbers(B, T, DM)}),
        ("taylor_exp_attention", [*heads(), 0.3, True, 1e-6], {}),
        ("taylor_exp_attention", [*heads(), 0.3, False, 1e-6], {}),
        (
            "causal_conv1d",
            [numbers(B, T, DM), numbers(DM, 4)],
            {"bias": numbers(DM), "activation": "silu"},
        ),
    ]


NOT_DIFFERENTIABLE = {"chunk_summaries"}


def mapped(function, args, kwargs):
    """The arguments with `function` applied to every tensor."""
    of_one = lambda value: function(value) if isinstance(value, torch.Tensor) else value
    return [of_one(value) for value in args], {
        name: of_one(value) for name, value in kwargs.items()
    }


def leaf(tensor):
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def as_list(results):
    return list(results) if isinstance(results, (tuple, list)) else [results]


def layout(tensor):
    """Shape, dtype, the strides that matter, and device."""
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape) if size > 1]
    return tuple(tensor.shape), tensor.dtype, strides, tensor.device.type


def loss(results):
    return sum(result.square().sum() for result in as_list(results) if result.requires_grad)


class Operators(unittest.TestCase):
    def for_each_call(self, check):
        """Runs check(name, operator, args, kwargs) for every call and reports every failure."""
        for name, args, kwargs in calls():
            with self.subTest(name, keywords=sorted(kwargs)):
                check(name, getattr(OPS, name), args, kwargs)

    def test_every_operator_is_called_here(self):
        names = {
            name for name in torch._C._dispatch_get_all_op_names() if name.startswith("assay::")
        }
        public = {name.removeprefix("assay::") for name in names if not name.startswith("assay::_")}
        self.assertEqual(public, {name for name, _, _ in calls()})

    def test_program_lists_the_operators_of_torch(self):
        listed = subprocess.run(
            [PROGRAM, "list", "ops", "--json"], capture_output=True, check=True
        ).stdout
        self.assertEqual(sorted(json.loads(listed)), sorted({name for name, _, _ in calls()}))

    def test_fake_results_have_the_layout_of_real_ones(self):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):

            def check(name, op, args, kwargs):
                cast = lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
                args, kwargs = mapped(cast, args, kwargs)
                real = [layout(result) for result in as_list(op(*args, **kwargs))]
                mode = FakeTensorMode()
                args, kwargs = mapped(mode.from_tensor, args, kwargs)
                with mode:
                    fake = [layout(result) for result in as_list(op(*args, **kwargs))]
                self.assertEqual(fake, real)

            self.for_each_call(check)

    def test_meta_results_have_the_layout_of_real_ones(self):
        def check(name, op, args, kwargs):
            real = [layout(result)[:3] for result in as_list(op(*args, **kwargs))]
            args, kwargs = mapped(lambda tensor: tensor.to("meta"), args, kwargs)
            self.assertEqual([layout(result)[:3] for result in as_list(op(*args, **kwargs))], real)

        self.for_each_call(check)

    def test_fake_gradients_have_the_shapes_of_their_tensors(self):
        def check(name, op, args, kwargs):
            if name in NOT_DIFFERENTIABLE:
                return
            mode = FakeTensorMode()
            args, kwargs = mapped(lambda tensor: mode.from_tensor(leaf(tensor)), args, kwargs)
            leaves = [
                x
                for x in [*args, *kwargs.values()]
                if isinstance(x, torch.Tensor) and x.requires_grad
            ]
            with mode:
                gradients = torch.autograd.grad(loss(op(*args, **kwargs)), leaves)
            self.assertEqual([tuple(x.shape) for x in gradients], [tuple(x.shape) for x in leaves])

        self.for_each_call(check)

    def test_opcheck_passes(self):
        def check(name, op, args, kwargs):
            utils = ["test_schema", "test_faketensor"]
            if name not in NOT_DIFFERENTIABLE:
                utils += ["test_autograd_registration", "test_aot_dispatch_static"]
                args, kwargs = mapped(leaf, args, kwargs)
            torch.library.opcheck(op.default, tuple(args), kwargs, test_utils=utils)

        self.for_each_call(check)

    def test_compiled_values_and_gradients_equal_eager_ones(self):
        def results_and_gradients(call, args, kwargs):
            args, kwargs = mapped(leaf, args, kwargs)
            results = call(*args, **kwargs)
            loss(results).backward()
            tensors = [
                x
                for x in [*args, *kwargs.values()]
                if isinstance(x, torch.Tensor) and x.requires_grad
            ]
            return [*as_list(results), *[x.grad for x in tensors]]

        def check(name, op, args, kwargs):
            if name not in ("gla", "selective_scan", "top1_chunk", "window_attention"):
                return
            torch._dynamo.reset()
            compiled = torch.compile(
                lambda *args, **kwargs: op(*args, **kwargs), fullgraph=True, backend="aot_eager"
            )
            eager = results_and_gradients(op, args, kwargs)
            for found, expected in zip(
                results_and_gradients(compiled, args, kwargs), eager, strict=True
            ):
                torch.testing.assert_close(found, expected)

        self.for_each_call(check)

    def test_second_derivative_raises(self):
        def check(name, op, args, kwargs):
            if name in NOT_DIFFERENTIABLE:
                return
            args, kwargs = mapped(leaf, args, kwargs)
            leaves = [
                x
                for x in [*args, *kwargs.values()]
                if isinstance(x, torch.Tensor) and x.requires_grad
            ]
            value = loss(op(*args, **kwargs)).square()
            gradients = torch.autograd.grad(value, leaves, create_graph=True)
            penalty = sum(gradient.square().sum() for gradient in gradients)
            error = f"assay::{name} has no second derivative"
            for tensor in leaves:
                with self.assertRaisesRegex(RuntimeError, error):
                    torch.autograd.grad(penalty, tensor, retain_graph=True, allow_unused=True)
            with self.assertRaisesRegex(RuntimeError, error):
                penalty.backward()

        self.for_each_call(check)

    def test_forward_mode_raises(self):
        def check(name, op, args, kwargs):
            i = next(i for i, x in enumerate(args) if torch.is_tensor(x) and x.is_floating_point())
            call = lambda x: op(*args[:i], x, *args[i + 1 :], **kwargs)
            error = f"assay::{name} has no forward-mode derivative"
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(args[i], torch.ones_like(args[i]))
                for tensor in (dual, dual.clone().requires_grad_()):
                    with self.assertRaisesRegex(NotImplementedError, error):
                        call(tensor)
            with self.assertRaisesRegex(NotImplementedError, error):
                torch.func.jvp(call, (args[i],), (args[i],))

        self.for_each_call(check)

    def test_batched_gradients_are_refused_by_name(self):
        def check(name, op, args, kwargs):
            if name in NOT_DIFFERENTIABLE:
                return
            x = leaf(args[0])
            result = as_list(op(x, *args[1:], **kwargs))[0]
            several = torch.ones(3, *result.shape)
            error = f"assay::{name} cannot compute the gradients of several vectors at once"
            with self.assertRaisesRegex(NotImplementedError, error):
                torch.autograd.grad(result, x, several, is_grads_batched=True)

        self.for_each_call(check)

    def test_negative_views_are_read_with_their_sign(self):
        def check(name, op, args, kwargs):
            expected = as_list(op(*args, **kwargs))
            # The same numbers, which torch keeps with the other sign
            negative = lambda x: torch._neg_view(-x) if x.is_floating_point() else x
            found = as_list(op(*mapped(negative, args, {})[0], **mapped(negative, [], kwargs)[1]))
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)

        self.for_each_call(check)

    def test_zero_tensors_of_torch_are_read_as_zeros(self):
        def check(name, op, args, kwargs):
            for i, x in enumerate(args):
                if not torch.is_tensor(x) or not x.is_floating_point():
                    continue
                zero = torch._efficientzerotensor(x.shape)
                for a, b in zip(
                    as_list(op(*args[:i], zero, *args[i + 1 :], **kwargs)),
                    as_list(op(*args[:i], torch.zeros(x.shape), *args[i + 1 :], **kwargs)),
                    strict=True,
                ):
                    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)

        self.for_each_call(check)

    def test_compiled_function_takes_other_lengths(self):
        call = torch.compile(lambda *args: OPS.gla(*args, 0.3), fullgraph=True, backend="aot_eager")
        for time in (33, 40, 41, 57):
            args = [
                numbers(B, time, H, K),
                numbers(B, time, H, K),
                numbers(B, time, H, V),
                decays(B, time, H, K),
            ]
            torch.testing.assert_close(call(*args), OPS.gla(*args, 0.3))

    def test_exported_program_gives_the_same_values(self):
        class Module(torch.nn.Module):
            def forward(self, q, k, v, gk):
                return OPS.gla(q, k, v, gk, 0.3)

        args = (*heads(), decays(B, T, H, K))
        program = torch.export.export(Module(), args)
        torch.testing.assert_close(program.module()(*args), Module()(*args))

    def test_mixed_float64_is_refused_by_name(self):
        def check(name, op, args, kwargs):
            names = [argument.name for argument in op.default._schema.arguments]
            tensors = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor)]
            for device in ("cpu", "meta"):
                for i in tensors[1:]:
                    if not args[i].is_floating_point():
                        continue
                    mixed = [*args[:i], args[i].double(), *args[i + 1 :]]
                    mixed, named = mapped(lambda tensor: tensor.to(device), mixed, kwargs)
                    expected = f"{name}: {names[i]} holds Double, but {names[0]} holds Float"
                    with self.assertRaisesRegex(ValueError, expected):
                        op(*mixed, **named)

        self.for_each_call(check)

    def test_meta_tensor_among_others_is_refused(self):
        def check(name, op, args, kwargs):
            names = [argument.name for argument in op.default._schema.arguments]
            tensors = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor)]
            for i in tensors if len(tensors) > 1 else []:
                mixed = [*args[:i], args[i].to("meta"), *args[i + 1 :]]
                named = names[tensors[1 if i == tensors[0] else 0]]
                with self.assertRaisesRegex(ValueError, f"{name}: {named} is on cpu"):
                    op(*mixed, **kwargs)

        self.for_each_call(check)

    def test_wrong_shape_of_a_fake_tensor_is_refused_by_name(self):
        with FakeTensorMode():
            q, k, v = torch.empty(B, T, H, K), torch.empty(B, T, H, K + 1), torch.empty(B, T, H, V)
            with self.assertRaisesRegex(Exception, "gla: k has shape"):
                OPS.gla(q, k, v, torch.empty(B, T, H, K), 0.3)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
