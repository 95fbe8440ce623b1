"""Assay: does this architecture keep the base capabilities of a Transformer?

- `assay.ops`: the operators, with gradients, states and kernels for CPU and CUDA.
- `assay.nn`: the mixers as modules of PyTorch.
- `assay.data.Store`: the documents of a token store.
- `assay.losses(model, tokenizer, store)`: the losses of any causal language model.
- `assay.check(CLASS)`: whether a PyTorch module can be a mixer in a plan.
- `assay.Study(plan)`: a study with its verdicts and figures.

The command `assay` of this package is the program of the documentation.
"""

import importlib
import typing

from ._library import version as _version

__version__ = _version()
__all__ = ["Study", "check", "data", "losses", "nn", "ops"]

if typing.TYPE_CHECKING:
    from . import data, nn, ops
    from ._check import check
    from ._losses import losses
    from ._study import Study


# torch takes seconds to import, so parts are imported when they are first used.
def __getattr__(name):
    if name in ("data", "nn", "ops"):
        return importlib.import_module("." + name, __name__)
    if name in ("Study", "check", "losses"):
        return getattr(importlib.import_module("._" + name.lower(), __name__), name)
    raise AttributeError(f"module 'assay' has no attribute '{name}'")
