"""The mixers and channel mixers of Assay as modules of PyTorch.

    mixer = assay.nn.GatedDeltaNet(256, num_heads=4)
    y, state = mixer(x)                  # x and y [B, T, 256], any T
    y, state = mixer(more, state)        # the same sequence goes on: it may be cut anywhere

`dir(assay.nn)` has all of them, and `help(assay.nn.GatedDeltaNet)` has formula, source and fields.
They are the modules that the program trains: same code, same names of parameters, same starting
values. Parameters are float32 or float64; a mixer computes in the dtype of x.
"""

from __future__ import annotations

import difflib
import inspect
import json
import pathlib
import re
from typing import Any

from . import _library

_library.load()

import torch  # noqa: E402

from ._mixers import tomllib  # noqa: E402

_Core = torch.classes.assay.Mixer


def _toml(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value) if isinstance(value, str) else str(value)


class _Part(torch.nn.Module):
    """The holder of the parameters of a part of a mixer, which computes nothing itself."""


class Mixer(torch.nn.Module):
    """A mixer by its name in `assay list mixers`, or a channel mixer, with the fields of its table.

    layer and num_layers: its place in a model, on which starting values of some depend. first: no
    earlier layer has the same mixer. seed: of the starting values; by default from torch's own.

    A parameter with _no_weight_decay is meant to be trained without weight decay, and the learning
    rate of one with assay_learning_rate is multiplied by that number.
    """

    def __init__(
        self,
        kind: str,
        d_model: int,
        *,
        layer: int = 0,
        num_layers: int | None = None,
        first: bool | None = None,
        seed: int | None = None,
        device=None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ):
        super().__init__()
        self.kind = kind
        self.d_model = d_model
        self.fields = fields
        self._place = (
            layer,
            layer + 1 if num_layers is None else num_layers,
            layer == 0 if first is None else first,
        )
        self._make()
        self.reset_parameters(seed)
        self.to(device, dtype)

    @classmethod
    def from_run(cls, run, layer: int, part: str = "mixer") -> Mixer:
        """The mixer of a layer (from 0) of a run, one of its checkpoints or an imported model.

        part: "mixer" or "channel_mixer".
        """
        config, weights = _files_of(pathlib.Path(run))
        model = tomllib.loads(config.read_text())["model"]
        count = model["num_layers"]
        if not 0 <= layer < count:
            raise ValueError(f"{run}: there is no layer {layer}; the model has {count} layers")
        if part not in ("mixer", "channel_mixer"):
            raise ValueError(f"part is '{part}'; expected 'mixer' or 'channel_mixer'")
        names = [model["pattern"][i % len(model["pattern"])] for i in range(layer + 1)]
        kind = names[layer] if part == "mixer" else model["channel_mixer"]
        if kind.startswith("python:") or kind == "none":
            raise ValueError(f"{run}: the {part} of layer {layer} is '{kind}', which is not here")
        module = Mixer(
            kind,
            model["d_model"],
            layer=layer,
            num_layers=count,
            first=layer == 0 if part == "channel_mixer" else names.index(kind) == layer,
            **model.get(kind, {}),
        )
        module.load_state_dict(_read_tensors(weights, f"layers_{layer}.{part}."))
        return module

    def forward(
        self,
        x: torch.Tensor,
        state: dict[str, torch.Tensor] | None = None,
        handed: dict[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(y, state) for x [B, T, d_model]. state: what the piece before returned.

        handed: one dict for all layers of a model, empty before the first one; later layers of
        RWKV-7 read there what the first one writes.
        """
        if not isinstance(x, torch.Tensor):
            raise _library.wrong_type(f"assay.nn: {self.kind}", "x", x)
        for name, value in (("state", state), ("handed", handed)):
            if not isinstance(value, (dict, type(None))):
                raise _library.wrong_type(f"assay.nn: {self.kind}", name, value, "a dict or None")
        for tensors, key, tensor in self._shared:
            if tensors.get(key) is not tensor:
                raise RuntimeError(
                    f"assay.nn: the tensor '{key}' of {self.kind} was replaced. The mixer shares "
                    "its memory and needs the tensor itself: copy values into it. Functional "
                    "calls and load_state_dict(assign=True) are not possible."
                )
        y, after, passed = self._core.forward(x, state or {}, handed or {})
        if handed is not None:
            handed.update(passed)
        return y, after

    def reset_parameters(self, seed: int | None = None) -> None:
        """Starting values, a function of the seed and the names of the parameters."""
        if seed is None:
            seed = int(torch.randint(2**62, ()))
        self._core.initialise(seed)

    def extra_repr(self) -> str:
        fields = "".join(f", {key}={value!r}" for key, value in self.fields.items())
        return f"{self.kind!r}, {self.d_model}{fields}"

    def _make(self):
        text = "".join(f"{key} = {_toml(value)}\n" for key, value in self.fields.items())
        self._core = _Core(self.kind, text, self.d_model, *self._place)
        self._shared = []  # (the dict of a module, key, tensor): storage and gradient are C++'s too
        decays, rates = self._core.treatments()
        for name, tensor, decay, rate in zip(*self._core.parameters(), decays, rates):
            tensor._is_param = True  # a Parameter, as isinstance sees it
            if not decay:
                tensor._no_weight_decay = True
            if rate != 1:
                tensor.assay_learning_rate = rate
            owner, key = self._owner(name)
            if key not in owner._parameters:
                owner.register_parameter(key, tensor)
            self._share(owner._parameters, key, tensor)
        for name, tensor in zip(*self._core.buffers()):
            owner, key = self._owner(name)
            if key not in owner._buffers:
                owner.register_buffer(key, tensor, persistent=False)  # as in checkpoints of runs
            self._share(owner._buffers, key, tensor)

    def _owner(self, name):
        *parts, key = name.split(".")
        owner = self
        for part in parts:
            if part not in owner._modules:
                owner.add_module(part, _Part())
            owner = owner._modules[part]
        return owner, key

    def _share(self, tensors, key, tensor):
        """Puts the tensor of C++ where another one may be, and gives it the values of that one."""
        given = tensors[key]
        if given is not tensor:
            tensor.requires_grad_(given.requires_grad)
            tensor.data = given.data
            tensor.grad = given.grad
            tensors[key] = tensor
        self._shared.append((tensors, key, tensor))

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        # torch replaces buffers where it changes the data of parameters
        shared, self._shared = self._shared, []
        for tensors, key, tensor in shared:
            self._share(tensors, key, tensor)
        return self

    def __getstate__(self):
        return {k: v for k, v in self.__dict__.items() if k not in ("_core", "_shared")}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._make()


def _files_of(folder):
    """config.toml and model.safetensors of a run, a checkpoint or an imported model."""
    steps = folder.glob("checkpoints/step-*/model.safetensors")
    newest = max(steps, key=lambda file: int(file.parent.name[5:]), default=None)
    for config, weights in (
        (folder / "config.toml", newest or folder / "model.safetensors"),
        (folder.parent.parent / "config.toml", folder / "model.safetensors"),
    ):
        if config.exists() and weights.exists():
            return config, weights
    raise ValueError(
        f"{folder}: there is no run or imported model here; "
        "expected config.toml, and model.safetensors or checkpoints/step-N/model.safetensors"
    )


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def _read_tensors(file, prefix):
    """The tensors of a safetensors file whose names begin so, without that beginning."""
    found = {}
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        for name, entry in header.items():
            if not name.startswith(prefix):
                continue
            begin, end = entry["data_offsets"]
            stream.seek(8 + length + begin)
            values = torch.frombuffer(
                bytearray(stream.read(end - begin)), dtype=_DTYPES[entry["dtype"]]
            )
            found[name[len(prefix) :]] = values.reshape(entry["shape"])
    return found


def _class_name(kind):
    special = {"swiglu": "SwiGLU", "geglu": "GeGLU"}
    upper = re.compile(r"gla|kda|nsa|gdn2|gelu|rwkv\d")
    return "".join(
        special.get(part) or (part.upper() if upper.fullmatch(part) else part.capitalize())
        for part in kind.split("_")
    )


_KINDS = {_class_name(kind): kind for kind in _Core.kinds()}


def _make_class(name, kind):
    about, names, types, defaults, docs, _ = _Core.describe(kind)

    def __init__(self, d_model: int, **arguments):
        Mixer.__init__(self, kind, d_model, **arguments)

    lines = [f"{about}\n", "Fields:"]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("d_model", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for field, its_type, default, doc in zip(names, types, defaults, docs):
        lines.append(f"    {field} = {default}: {its_type}{'; ' if doc else ''}{doc}")
        value = tomllib.loads(f"value = {default}")["value"]
        parameters.append(inspect.Parameter(field, keyword, default=value))
    common = inspect.signature(Mixer.__init__).parameters.values()
    parameters += [p for p in common if p.kind is keyword]
    lines.append("\nThe other arguments are those of Mixer.")
    return type(
        name,
        (Mixer,),
        {
            "__init__": __init__,
            "__doc__": "\n".join(lines),
            "__module__": __name__,
            "__signature__": inspect.Signature(parameters),
        },
    )


def __getattr__(name: str) -> type[Mixer]:
    if name not in _KINDS:
        near = difflib.get_close_matches(name, [*_KINDS, "Mixer"], 1) if name[0] != "_" else []
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise AttributeError(f"module 'assay.nn' has no attribute '{name}'{hint}")
    globals()[name] = _make_class(name, _KINDS[name])
    return globals()[name]


def __dir__():
    return ["Mixer", *_KINDS]
