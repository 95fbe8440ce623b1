"""PyTorch modules as mixers of the program: the operators that src/nn/python_mixer.cc calls.

A module is a class CLASS(d_model, **fields), an nn.Module, with
    forward(x) -> y                     x and y [B, T, d_model]
    forward(x, state) -> (y, state)     state: None at the start of a sequence, then what it returned,
                                        a dict of tensors, a tensor or a tuple of them, batch first
The constructor may also take `layer` and `num_layers`. The names and results of
flash-linear-attention are understood, too: `hidden_size` and `layer_idx`, and a forward(x) that
returns (y, ...).
"""

import contextlib
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import math
import os
import pathlib
import random
import re
import sys
import traceback
import unittest.mock

import torch

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

_SINGLE = "state"  # the name of a state that is one tensor
_PREFIX = "assay_python_"  # of the names of modules that are files
_STOPS = (Exception, SystemExit)  # what stops a module; Ctrl-C stops the program


class PythonModuleError(Exception):
    """What is wrong with a module of the user, in one message that names file and line."""


def place_of(error, files=None):
    """"FILE:LINE" of the innermost frame of an error in the module's own code, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if files and f.filename in files] or [
        f for f in frames if os.sep + "torch" + os.sep not in f.filename and f.filename != __file__
    ]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def describe(error, files=None, cls=None):
    """The place, the type and the text of an error, which `cls` raised if no frame shows it."""
    place = place_of(error, files) or place_of_class(cls)
    if isinstance(error, SystemExit):
        code = "" if error.code is None else repr(error.code)
        return f"{place}: the module calls sys.exit({code}); let it raise an error instead"
    text = str(error).split("\n\nAt:\n")[0].strip() or "no message"
    if isinstance(error, SyntaxError):
        text = error.msg
    text = re.sub(rf"\b{_PREFIX}[0-9a-f]+\.", "", text)
    return f"{place}: {type(error).__name__}: {text}"


def in_triton(error):
    """Whether a kernel of Triton failed: it does not run here, or not in this dtype."""
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        if any(f"{os.sep}triton{os.sep}" in frame.filename for frame in frames):
            return True
        error = error.__cause__
    return False


def place_of_class(cls):
    """"FILE:LINE" of the definition of forward, or of the class."""
    for thing in (cls.__dict__.get("forward"), cls):
        with contextlib.suppress(Exception):
            return f"{inspect.getsourcefile(thing)}:{inspect.getsourcelines(thing)[1]}"
    return cls.__module__ if cls else "?"


_loaded = {}  # by (name, source)


def load(name, source=""):
    """The module of a file with this text, or one that is imported."""
    key = (name, source)
    if key not in _loaded:
        _loaded[key] = _load(name, source)
    return _loaded[key]


def _load(name, source):
    try:
        if not name.endswith(".py"):
            _file_of(name)
            return importlib.import_module(name)
        # Files next to it can be imported
        folder = os.path.dirname(os.path.abspath(name))
        if folder not in sys.path:
            sys.path.append(folder)
        digest = hashlib.sha256(source.encode()).hexdigest()
        spec = importlib.util.spec_from_loader(f"{_PREFIX}{digest[:16]}", loader=None)
        module = importlib.util.module_from_spec(spec)
        module.__file__ = name
        sys.modules[module.__name__] = module
        # Messages show the lines that are run, whatever the file holds now
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        exec(compile(source, name, "exec"), module.__dict__)
        return module
    except PythonModuleError:
        raise
    except _STOPS as error:
        raise PythonModuleError(describe(error, {name})) from error


def _file_of(name):
    """The file of a module that can be imported."""
    with contextlib.suppress(ModuleNotFoundError):  # of the packages before a dot
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            return spec.origin
    hint = f"; did you mean '{name}.py'?" if os.path.isfile(f"{name}.py") else ""
    raise PythonModuleError(f"there is no Python module '{name}'{hint}")


def find_class(module, name, where):
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        return found
    if found is not None:
        raise PythonModuleError(f"{where}: '{name}' is not a torch.nn.Module")
    classes = [
        key
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, torch.nn.Module)
    ]
    near = difflib.get_close_matches(name, classes, 1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise PythonModuleError(
        f"{where}: there is no class '{name}'{hint} (modules in it: {', '.join(classes) or 'none'})"
    )


def construct(cls, d_model, fields, layer=0, num_layers=1):
    """An instance, with the fields of the plan as arguments."""
    parameters = inspect.signature(cls.__init__).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [name for name in parameters if name != "self"]
    width = next((name for name in ("d_model", "hidden_size") if name in known), None)
    if width is None:
        raise PythonModuleError(
            f"{place_of_class(cls)}: the constructor of {cls.__name__} must take d_model or "
            f"hidden_size; it takes {', '.join(known) or 'nothing'}"
        )
    place = {width: d_model, "layer": layer, "layer_idx": layer, "num_layers": num_layers}
    for key in fields:
        if key == width:
            raise PythonModuleError(
                f"'{key}' of {cls.__name__} is the d_model of the model, not a field"
            )
        near = difflib.get_close_matches(key, known, 1)
        # Constructors with **kwargs accept misspelled names, and ignore them
        if key not in known and (near or not takes_any):
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise PythonModuleError(
                f"{cls.__name__} has no field '{key}'{hint} (its constructor takes "
                f"{', '.join(known)})"
            )
    try:
        module = cls(**{key: value for key, value in place.items() if key in known} | fields)
    except _STOPS as error:
        raise PythonModuleError(describe(error, cls=cls)) from error
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            raise PythonModuleError(
                f"{place_of_class(cls)}: the parameter '{name}' has requires_grad = False, but "
                "all parameters are trained; make it a buffer"
            )
    return module


def keeps_state(cls):
    return "state" in inspect.signature(cls.forward).parameters


def to_tensors(state, where):
    """The names and tensors of a state."""
    if state is None:
        return [], []
    if isinstance(state, torch.Tensor):
        return [_SINGLE], [state]
    if isinstance(state, (tuple, list)):
        state = {str(i): tensor for i, tensor in enumerate(state)}
    if isinstance(state, dict) and all(isinstance(t, torch.Tensor) for t in state.values()):
        return list(state), list(state.values())
    raise PythonModuleError(
        f"{where}: the state must be a dict of tensors, a tensor or a tuple of tensors; "
        f"it is {type(state).__name__}"
    )


def from_tensors(names, tensors, is_tuple):
    if not names:
        return None
    if list(names) == [_SINGLE] and is_tuple is None:
        return tensors[0]
    if is_tuple:
        return tuple(tensor for _, tensor in sorted(zip(names, tensors), key=lambda x: int(x[0])))
    return dict(zip(names, tensors))


def _linear(part, x):
    """The forward of nn.Linear. Under autocast it is that of the mixers in C++."""
    weight, device = part.weight, x.device.type
    if (
        weight.dtype == torch.float32
        and weight.requires_grad
        and device in ("cpu", "cuda")
        and x.dim() > 1
        and torch.is_grad_enabled()
        and torch.is_autocast_enabled(device)
        and torch.get_autocast_dtype(device) == torch.bfloat16
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    ):
        return torch.ops.assay_python.linear_of_master(x.bfloat16(), weight, part.bias)
    return torch.nn.functional.linear(x, weight, part.bias)


class Hosted:
    """A module in a model of the program."""

    def __init__(self, module, files=None):
        # Checks of a module that calls no operator of Assay run without the library
        if hasattr(torch.ops.assay_python, "linear_of_master"):
            for part in module.modules():
                if type(part) is torch.nn.Linear and "forward" not in vars(part):
                    part.forward = functools.partial(_linear, part)
        self.module = module
        self.cls = type(module)
        self.keeps_state = keeps_state(self.cls)
        self.where = place_of_class(self.cls)
        self.files = files
        self.form = None  # of the state: None a tensor, True a tuple, False a dict
        self.placed = None
        self.returned = None  # the dtype of the last output, before its conversion to that of x

    def place_buffers(self, x):
        """Buffers follow the input, as parameters do: they are not known to C++."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.placed == (x.device, wide):
            return
        for buffer in self.module.buffers():
            buffer.data = buffer.data.to(
                x.device, wide if buffer.is_floating_point() else buffer.dtype
            )
        self.placed = (x.device, wide)

    @staticmethod
    def precision(x):
        """Parameters are float32. With bfloat16 inputs, products are computed in bfloat16."""
        if x.dtype in (torch.bfloat16, torch.float16):
            return torch.autocast(x.device.type, x.dtype)
        return contextlib.nullcontext()

    def __call__(self, x, tensors, names):
        self.place_buffers(x)
        try:
            with self.precision(x):
                if self.keeps_state:
                    out = self.module(x, from_tensors(names, tensors, self.form))
                else:
                    out = self.module(x)
        except _STOPS as error:
            text = describe(error, self.files, self.cls)
            if in_triton(error) and x.device.type == "cpu":
                text += " Kernels of Triton need a GPU, and the module was called on the CPU."
            raise PythonModuleError(text) from error
        state = None
        if self.keeps_state:
            if not isinstance(out, tuple) or len(out) != 2:
                raise PythonModuleError(
                    f"{self.where}: forward(x, state) must return (y, state); "
                    f"it returns {type(out).__name__}"
                )
            out, state = out
        elif isinstance(out, tuple) and out:
            out = out[0]  # (y, weights, cache) of other libraries
        if not isinstance(out, torch.Tensor):
            raise PythonModuleError(
                f"{self.where}: forward must return a tensor; it returns {type(out).__name__}"
            )
        if out.shape != x.shape:
            raise PythonModuleError(
                f"{self.where}: forward returns the shape {list(out.shape)}; "
                f"expected that of x, {list(x.shape)}"
            )
        if isinstance(state, torch.Tensor):
            self.form = None
        else:
            self.form = isinstance(state, (tuple, list))
        after_names, after = to_tensors(state, self.where)
        for name, tensor in zip(after_names, after):
            if tensor.device != x.device:
                raise PythonModuleError(
                    f"{self.where}: the tensor '{name}' of the state is on {tensor.device}; "
                    f"expected {x.device}, as x"
                )
        self.returned = out.dtype
        return out.to(x.dtype), after, after_names

    def flops(self, time):
        """Forward FLOPs per token. torch counts products, convolutions and its attention."""
        own = getattr(self.module, "mixing_flops", None)
        if own is not None:
            return float(own(time))
        from torch._subclasses.fake_tensor import FakeTensorMode

        # Without computing, unless a module looks at values
        for mode, tokens in (
            (FakeTensorMode(allow_non_fake_inputs=True), time),
            (contextlib.nullcontext(), min(time, 1024)),
        ):
            try:
                with _no_triton():
                    return _count_flops(self, tokens, mode)
            except Exception as error:
                if in_triton(error):
                    # The products with the parameters; kernels of Triton are not counted
                    return 2.0 * sum(p.numel() for p in self.module.parameters() if p.dim() > 1)
                failure = error
        raise failure


# FLOPs of a recurrence per token and number of its state; the mixers in C++ count them likewise
_RECURRENT_FLOPS = {
    "linear_attention": 4,
    "simple_gla": 5,
    "gla": 5,
    "ssd": 5,
    "delta_rule": 6,
    "gated_delta_rule": 7,
    "rwkv5": 7,
    "rwkv6": 7,
    "rwkv7": 9,
    "selective_scan": 9,
    "longhorn": 8,
    "taylor_exp_attention": 4,
    "causal_conv1d": 2,
}


def _register_flops():
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for name, factor in _RECURRENT_FLOPS.items():
        operator = getattr(torch.ops.assay, name)

        def count(*_, out_shape, factor=factor, **__):
            out, state = out_shape
            return factor * out[1] * math.prod(state)

        if operator not in flop_registry:
            register_flop_formula(operator)(count)


@contextlib.contextmanager
def _no_triton():
    """No kernel of Triton starts: the pointers of fake tensors are 0, and a GPU would read there."""

    def refuse(*_, **__):
        raise RuntimeError("a kernel of Triton needs real tensors on a GPU")

    jit = sys.modules.get("triton.runtime.jit")
    with unittest.mock.patch.object(jit.JITFunction, "run", refuse) if jit else (
        contextlib.nullcontext()
    ):
        yield


@contextlib.contextmanager
def first_configuration():
    """Autotuned kernels of Triton take the first configuration that works.

    A check needs no speed, and compiling all of them takes minutes. Later calls measure them.
    """
    module = sys.modules.get("triton.runtime.autotuner")
    if module is None:
        yield
        return
    measure = module.Autotuner._bench
    works = {}  # configuration, by autotuner

    def first(self, *args, config, **meta):
        times = [math.inf] * 3
        if works.get(self, config) == config:
            times = measure(self, *args, config=config, **meta)
        if times[0] < math.inf:
            works[self] = config
        return times

    def not_on_disk(self, key, configs, measure_all):
        measure_all()
        return False

    with unittest.mock.patch.multiple(
        module.Autotuner, _bench=first, check_disk_cache=not_on_disk
    ):
        yield
    for autotuner in works:
        autotuner.cache.clear()


def _count_flops(hosted, time, mode):
    from torch.utils.flop_counter import FlopCounterMode

    _register_flops()
    parameter = next(hosted.module.parameters(), torch.empty(0))
    placed = hosted.placed
    try:
        with mode, torch.no_grad(), FlopCounterMode(display=False) as counter:
            x = torch.zeros(1, time, hosted.d_model, device=parameter.device, dtype=parameter.dtype)
            hosted.placed = (x.device, x.dtype)
            hosted(x, [], [])
    finally:
        hosted.placed = placed
    return counter.get_total_flops() / time


_hosted = {}


@contextlib.contextmanager
def _seeded(seed):
    """Random numbers of torch, Python and numpy start from this seed, and later go on as before."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), numpy and numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(before[0])
            if numpy:
                numpy.random.set_state(before[1])


def _create(source, name, cls, fields, d_model, layer, num_layers):
    def make():
        module = construct(found, d_model, tomllib.loads(fields), layer, num_layers)
        return module.train()

    found = find_class(load(name, source if name.endswith(".py") else ""), cls, name)
    with _seeded(layer):  # the buffers, whatever the seed of the run is
        hosted = Hosted(make(), {name})
    hosted.make = make
    hosted.d_model = d_model
    handle = max(_hosted, default=0) + 1
    _hosted[handle] = hosted
    return handle


def _release(handle):
    _hosted.pop(handle, None)


def _parameters(handle):
    hosted = _hosted[handle]
    named = dict(hosted.module.named_parameters())
    return (
        list(named),
        list(named.values()),
        [
            p.dim() > 1 and not getattr(p, "_no_weight_decay", False) for p in named.values()
        ],
        [float(getattr(p, "assay_learning_rate", 1.0)) for p in named.values()],
        hosted.keeps_state,
    )


def _initialise(handle, seed):
    """Gives all parameters the values that the module itself starts with, from this seed."""
    hosted = _hosted[handle]

    def start():
        with _seeded(seed):
            return dict(hosted.make().named_parameters())

    values, again = start(), start()
    with torch.no_grad():
        for name, parameter in hosted.module.named_parameters():
            if not torch.equal(values[name].nan_to_num(), again[name].nan_to_num()):
                raise PythonModuleError(
                    f"{hosted.where}: the parameter '{name}' starts with other values each time. "
                    "Draw them with torch, random or numpy.random, which the seed of a run starts"
                )
            parameter.copy_(values[name])


def _check(handle, x):
    """Raises PythonModuleError where training with x would be wrong, as `assay check` does."""
    from . import _check as checks

    with torch.enable_grad(), first_configuration():
        checks.check_forward(_hosted[handle], x)
        checks.check_gradients(_hosted[handle], x)


def _forward(handle, x, tensors, names):
    return _hosted[handle](x, tensors, names)


def _needs_gpu(handle):
    """Whether the module starts kernels of Triton."""
    hosted = _hosted[handle]
    with torch.no_grad(), _no_triton():
        try:
            hosted(torch.zeros(1, 5, hosted.d_model), [], [])
        except PythonModuleError as error:
            return in_triton(error)
    return False


def _where(handle):
    return _hosted[handle].where


def _flops(handle, time):
    return _hosted[handle].flops(time)


def _digest(name):
    """Of the file of a module, or of all Python files of the package that it is in."""
    files = [pathlib.Path(_file_of(name))]
    package = importlib.util.find_spec(name.partition(".")[0])
    if package.submodule_search_locations:
        folders = map(pathlib.Path, package.submodule_search_locations)
        files = [path for folder in sorted(folders) for path in sorted(folder.rglob("*.py"))]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


_SCHEMAS = {
    "create(str source, str name, str cls, str fields, int d_model, int layer, int num_layers)"
    " -> int": _create,
    "release(int handle) -> ()": _release,
    "parameters(int handle) -> (str[], Tensor[], bool[], float[], bool)": _parameters,
    "initialise(int handle, int seed) -> ()": _initialise,
    "check(int handle, Tensor x) -> ()": _check,
    "forward(int handle, Tensor x, Tensor[] tensors, str[] names)"
    " -> (Tensor, Tensor[], str[])": _forward,
    "needs_gpu(int handle) -> bool": _needs_gpu,
    "where(int handle) -> str": _where,
    "flops(int handle, int time) -> float": _flops,
    "digest(str name) -> str": _digest,
}
_library = None


def register():
    """Defines torch.ops.assay_python, once."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("assay_python", "DEF")
    for schema, function in _SCHEMAS.items():
        name = schema.split("(")[0]
        _library.define(schema)
        _library.impl(name, function, "CompositeImplicitAutograd")
