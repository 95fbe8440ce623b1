"""assay check FILE.py:CLASS: whether a PyTorch module can be a mixer in a plan."""

import argparse
import contextlib
import copy
import json
import os
import re
import sys
import typing

import torch
from torch.autograd.gradcheck import GradcheckError, gradcheck

from . import _mixers
from ._mixers import Hosted, PythonModuleError, construct, describe, find_class, load

# Relative error of results that must be equal but for rounding
_LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.02}
_HALF = 0.05  # of bfloat16 against the most precise results, by Euclidean norms


class Result(typing.NamedTuple):
    name: str
    ok: bool
    message: str


class _Stop(Exception):
    """A check whose failure leaves nothing for the later ones."""


def _error(found, expected):
    """The largest difference over the largest value."""
    scale = max(expected.abs().max().item(), 1e-30)
    return (found - expected).abs().max().item() / scale


def _fail(hosted, text):
    raise PythonModuleError(f"{hosted.where}: {text}")


def check_forward(hosted, x):
    """Shape, dtype and values of the output, and that the call changes neither x nor a buffer."""
    hosted.place_buffers(x)
    before = x.clone()
    buffers = {n: b.clone() for n, b in hosted.module.named_buffers()}
    y = hosted(x, [], [])[0]  # checks the shape
    # With bfloat16, norms give float32
    if hosted.returned not in (x.dtype, torch.promote_types(x.dtype, torch.float32)):
        _fail(hosted, f"forward returns {hosted.returned} for an input of {x.dtype}")
    if not torch.equal(x, before):
        _fail(hosted, "forward changes its input in place; work on a copy")
    if not y.isfinite().all():
        _fail(hosted, "forward returns values that are NaN or infinite")
    for name, buffer in hosted.module.named_buffers():
        if not torch.equal(buffer, buffers[name]):
            _fail(
                hosted,
                f"forward changes the buffer '{name}'. Checkpoints do not hold buffers, so a "
                "run could not be resumed. Keep what changes in the state",
            )


def check_gradients(hosted, x):
    """The input and every parameter get a gradient. Returns the number of parameters."""
    found = _gradients(hosted, x)
    for name, gradient in found.items():
        if name == "y":
            continue
        if gradient is None or not gradient.any():
            _fail(
                hosted,
                f"{name} gets no gradient. Is it used in forward, and is there a detach(), a "
                ".data, an argmax or a no_grad() between it and the output?",
            )
        if not gradient.isfinite().all():
            _fail(hosted, f"the gradient of {name} is NaN or infinite")
    return len(found) - 2


def _gradients(hosted, x):
    """The output, and the gradients of the input and of every parameter, by what they are."""
    x = x.clone().requires_grad_()
    named = dict(hosted.module.named_parameters())
    y = hosted(x, [], [])[0]
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    if not y.requires_grad:
        _fail(hosted, "the output has no gradient: forward is computed without autograd")
    gradients = torch.autograd.grad(
        (y * weights).sum() + y.square().sum(), [x, *named.values()], allow_unused=True
    )
    names = ["the input", *(f"the parameter '{name}'" for name in named)]
    return {"y": y.detach()} | dict(zip(names, gradients))


class _Checker:
    def __init__(self, make, d_model, device):
        self.make, self.d_model, self.device = make, d_model, device
        self.results = []

    def run(self):
        try:
            for check in (
                self.constructor,
                self.shape_and_dtype,
                self.lengths,
                self.repeated,
                self.causality,
                self.rows,
                self.gradients,
                self.gradcheck,
                self.half,
                self.cuts,
            ):
                self._one(check)
        except _Stop:
            pass
        return self.results

    def _one(self, check):
        name = check.__name__.replace("_", " ")
        try:
            self.results.append(Result(name, True, check() or ""))
        except PythonModuleError as error:
            self.results.append(Result(name, False, str(error)))
        except _Stop:
            raise
        except Exception as error:
            self.results.append(Result(name, False, describe(error, self.files)))
        if not self.results[-1].ok and len(self.results) <= 4:  # the others need these
            raise _Stop

    def fail(self, text):
        _fail(self.hosted, text)

    def _copy(self, dtype):
        # With bfloat16, parameters stay float32, as in training
        wide = torch.promote_types(dtype, torch.float32)
        return Hosted(copy.deepcopy(self.hosted.module).to(wide), self.files)

    def _find_precision(self):
        """Sets `exact`, a copy in the widest dtype in which the module is precise.

        Kernels may refuse a dtype, or compute in a narrower one. A change of the input far below
        the limit of errors shows this: it must change the output, and by less than the limit.
        """
        computes = {}
        self.refused = ""
        for dtype, limit in _LIMITS.items():
            x = self._x(2, 16)
            hosted = self._copy(dtype)
            try:
                with torch.no_grad():
                    y, again = (self._whole(hosted, x.to(dtype)) for _ in range(2))
                    near = self._whole(hosted, (x * (1 + limit / 1000)).to(dtype))
            except PythonModuleError as error:
                self.refused = self.refused or str(error)
                continue
            computes[dtype] = hosted
            # Random results have no precision; the check `repeated` refuses them
            if 0 < _error(near, y) < limit or not torch.equal(y, again):
                break
        # A module that computes in no dtype fails in the next check
        self.wide, self.exact = next(
            reversed(computes.items()), (torch.float64, self._copy(torch.float64))
        )
        self.limit = _LIMITS[self.wide]
        only_half = list(computes) in ([torch.bfloat16], [torch.float64, torch.bfloat16])
        self.dtype = torch.bfloat16 if only_half else torch.float32

    def _x(self, rows, time, dtype=torch.float64, seed=0):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, time, self.d_model, dtype=torch.float64, generator=generator)
        return x.to(self.device, dtype)

    def _whole(self, hosted, x):
        return hosted(x, [], [])[0]

    # Each returns a remark or nothing, and raises PythonModuleError with what is wrong.

    def constructor(self):
        self.files = None
        self.hosted = Hosted(self.make())
        self.where = self.hosted.where
        self.files = self.hosted.files = {self.where.rpartition(":")[0]}
        module = self.hosted.module
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_meta:
                raise PythonModuleError(
                    f"{self.where}: '{name}' is on the device meta, where tensors have no values"
                )
        # Starting values of zero hide what is behind them
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.add_(0.05 * torch.randn_like(parameter))
        module.to(self.device)
        self._find_precision()

    def shape_and_dtype(self):
        check_forward(self.hosted, self._x(2, 16, self.dtype))
        if self.wide != torch.float64:
            why = f": {self.refused}" if self.refused else ""
            return (
                f"the widest dtype with precise results is {self.wide}, so the checks below allow "
                f"errors of {self.limit:g}{why}"
            )

    def lengths(self):
        for time in (1, 2, 7, 33):
            try:
                self._whole(self.hosted, self._x(2, time, self.dtype))
            except PythonModuleError as error:
                raise PythonModuleError(f"with sequences of length {time}: {error}") from error

    def causality(self):
        """No output reads a later token."""
        self._causal(24, range(1, 24))
        self._causal(150, (64, 127, 128))  # long sequences may have another kernel

    def _causal(self, time, positions):
        x, other = (self._x(1, time, self.wide, seed) for seed in (1, 2))
        with torch.no_grad():
            y = self._whole(self.exact, x)
            for position in positions:
                changed = torch.cat([x[:, :position], other[:, position:]], 1)
                difference = self._whole(self.exact, changed)[:, :position] - y[:, :position]
                by_position = difference.abs().amax((0, 2)) / y.abs().max().clamp_min(1e-30)
                leaks = (by_position > self.limit).nonzero()
                if len(leaks):
                    first = int(leaks[0])
                    self.fail(
                        f"the output at position {first} changes when the tokens from position "
                        f"{position} on change (by {by_position[first]:.2g} of the largest value). "
                        "A language model that reads later tokens has losses without meaning. Does "
                        "it take a mean, a norm or a softmax over time without a causal mask?"
                    )

    def rows(self):
        """The sequences of a batch do not influence each other."""
        x = self._x(3, 16, self.wide, seed=3)
        with torch.no_grad():
            alone = self._whole(self.exact, x[:1])
            error = _error(self._whole(self.exact, x)[:1], alone)
        if error > self.limit:
            self.fail(
                f"the output of a sequence depends on the others of its batch (relative error "
                f"{error:.2g}). Is a norm or a mean taken over the batch?"
            )

    def repeated(self):
        """Two calls give the same bits."""
        x = self._x(2, 16, self.dtype, seed=4)
        first, second = _gradients(self.hosted, x), _gradients(self.hosted, x)
        for name in first:
            if first[name] is not None and not torch.equal(first[name], second[name]):
                self.fail(
                    f"two calls with the same input differ in {name}. Does forward draw random "
                    "numbers (dropout) or keep something from call to call? Evaluation would draw "
                    "them, too, and a run could not be resumed bit for bit"
                )

    def gradients(self):
        """The input and every parameter get a gradient."""
        number = check_gradients(self.hosted, self._x(2, 16, self.dtype, seed=5))
        return f"{number} parameter{'s' * (number != 1)}"

    def gradcheck(self):
        """Gradients in float64 agree with finite differences."""
        if self.wide != torch.float64:
            return "left out: it needs float64"
        module = self.exact.module
        names = [name for name, p in module.named_parameters()]
        values = [p.detach().clone().requires_grad_() for p in module.parameters()]

        def function(x, *parameters):
            given = dict(zip(names, parameters))
            arguments = (x, None) if self.exact.keeps_state else (x,)
            out = torch.func.functional_call(module, given, arguments)
            return out[0] if isinstance(out, tuple) else out

        x = self._x(1, 5, seed=6).requires_grad_()
        try:
            gradcheck(function, (x, *values), fast_mode=True)
        except GradcheckError as error:
            found = re.search(r"with respect to input (\d+)", str(error))
            of = ("the input", *(f"the parameter '{name}'" for name in names))
            self.fail(
                f"the gradient of {of[int(found[1])] if found else 'an input'} differs from finite "
                "differences in float64. Is a detach() in forward or a backward function wrong, or "
                "is the module computed in float32 inside?"
            )

    def half(self):
        """Results in bfloat16 are close to the most precise ones."""
        if self.wide == torch.bfloat16:
            return "left out: there are no results to compare with"
        x = self._x(2, 33, torch.bfloat16, seed=7)
        with torch.no_grad():
            exact = self._whole(self.exact, x.to(self.wide)).double()
            found = self._whole(self.hosted, x).double()
        error = ((found - exact).norm() / exact.norm().clamp_min(1e-30)).item()
        if not error < _HALF:
            self.fail(
                f"results in bfloat16 are {error:.1%} off those in {self.wide} (limit {_HALF:.0%}). "
                "Compute decays, sums over time and norms in float32"
            )
        return f"{error:.2%} off"

    def cuts(self):
        """With a state: wherever a sequence is cut, the output is the same."""
        if not self.hosted.keeps_state:
            return "no state: decoding reads the whole sequence again for every token"
        time = 21
        x = self._x(2, time, self.wide, seed=8)
        with torch.no_grad():
            whole = self._whole(self.exact, x)
            for piece in (1, 4, 13):
                tensors, names, parts = [], [], []
                for begin in range(0, time, piece):
                    y, tensors, names = self.exact(x[:, begin : begin + piece], tensors, names)
                    parts.append(y)
                    for name, tensor in zip(names, tensors):
                        if tensor.dim() and tensor.shape[0] != 2:
                            self.fail(
                                f"the tensor '{name}' of the state has the shape "
                                f"{list(tensor.shape)}; its first dimension must be the batch"
                            )
                error = _error(torch.cat(parts, 1), whole)
                if error > self.limit:
                    self.fail(
                        f"pieces of {piece} token{'s' * (piece != 1)} give another output than the "
                        f"whole sequence (relative error {error:.2g}). Does the state hold all that "
                        "later tokens need, and is it used?"
                    )


def _checked(make, d_model, device):
    with torch.random.fork_rng(devices=[]), _mixers.first_configuration():
        torch.manual_seed(0)
        return _Checker(make, d_model, device).run()


def check(cls, d_model=64, *, device="cpu", **fields):
    """Checks whether a module can be a mixer in a plan. Returns a list of (name, ok, message).

    cls: CLASS(d_model, **fields), an nn.Module with forward(x) -> y or
    forward(x, state) -> (y, state).
    """
    return _checked(lambda: construct(cls, d_model, fields), d_model, device)


def _field(text):
    """"key=value" of the command line; the value is TOML, or else a string."""
    key, equals, value = text.partition("=")
    if not equals:
        raise PythonModuleError(f"'{text}' is not a field; expected key=value")
    try:
        return key, _mixers.tomllib.loads(f"x = {value}")["x"]
    except _mixers.tomllib.TOMLDecodeError:
        return key, value


def _results(options):
    name, colon, cls = options.module.rpartition(":")
    if not colon:
        raise PythonModuleError(f"'{options.module}' names no class; expected FILE.py:CLASS")
    source = ""
    if name.endswith(".py"):
        if not os.path.isfile(name):
            raise PythonModuleError(f"{name}: no such file")
        with open(name, encoding="utf-8") as file:
            source = file.read()
    found = find_class(load(name, source), cls, name)
    fields = dict(_field(text) for text in options.fields)
    return _checked(
        lambda: construct(found, options.d_model, fields), options.d_model, options.device
    )


def main(arguments):
    parser = argparse.ArgumentParser(
        prog="assay check",
        description="Check whether a PyTorch module can be a mixer in a plan: causality, gradients, "
        "precision, and the law of mixers if it has a state.",
    )
    parser.add_argument("module", metavar="FILE.py:CLASS", help="or MODULE:CLASS")
    parser.add_argument(
        "fields", nargs="*", default=[], metavar="key=value", help="fields of the constructor"
    )
    parser.add_argument("--d-model", type=int, default=64, help="width (default: 64)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N (default: cpu)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    options = parser.parse_intermixed_args(arguments)
    cls = options.module.rpartition(":")[2]
    try:
        with contextlib.redirect_stdout(sys.stderr):  # for modules that print
            results = _results(options)
    except PythonModuleError as error:
        if options.json:
            print(json.dumps({"error": str(error), "exit_code": 2}))
        print(f"assay: {error}", file=sys.stderr)
        return 2
    ok = all(result.ok for result in results)
    if options.json:
        print(json.dumps({"ok": ok, "checks": [result._asdict() for result in results]}, indent=2))
    else:
        for result in results:
            print(f"{'ok    ' if result.ok else 'FAILED'} {result.name:<16} {result.message}")
        print(
            f"{cls} can be a mixer in a plan."
            if ok
            else f"{cls} cannot be a mixer in a plan yet. Nothing was changed."
        )
    return 0 if ok else 1
