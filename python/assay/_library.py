"""Loads libassay.so, once, into a process with the right torch."""

import ctypes
import functools
import importlib.metadata
import os
import pathlib
import pwd

TORCH = "2.11"  # the minor version that libassay.so was linked with
FOLDER = pathlib.Path(__file__).resolve().parent


def version():
    try:
        return importlib.metadata.version("assay")
    except importlib.metadata.PackageNotFoundError:
        return None  # it was not installed: a folder of the repository


def check_torch():
    """ImportError with what to do unless torch fits. Does not import it."""
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is not None and found.startswith(TORCH + "."):
        return
    has = "torch is not installed" if found is None else f"torch {found} is installed"
    raise ImportError(
        f"assay needs torch {TORCH}.*, and {has}: run pip install 'torch=={TORCH}.*'"
    ) from None


def name_the_user():
    """Sets LOGNAME for a user without a name, as in a container, because torch asks for it."""
    if any(os.environ.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME")):
        return
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ["LOGNAME"] = str(os.getuid())


def wrong_type(function, argument, value, expected="a torch.Tensor"):
    return TypeError(f"{function}: {argument} must be {expected}, not {type(value).__name__}")


@functools.cache
def load():
    """libassay.so, as ctypes sees it. Its operators are in torch.ops.assay afterwards."""
    check_torch()
    name_the_user()
    import torch  # noqa: F401  its libraries must be in the process first

    file = FOLDER / "libassay.so"
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise ImportError(f"{file} cannot be loaded: {error}") from None
