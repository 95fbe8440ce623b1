#!/usr/bin/env python3
"""Prints python/assay/ops.pyi: types from torch's schemas, defaults and texts from assay.ops.

    PYTHONPATH=build/package tools/stubs.py > python/assay/ops.pyi
"""

import inspect
import textwrap

import torch

import assay.ops

TYPES = {"Tensor": "Tensor", "int": "int", "float": "float", "bool": "bool", "str": "str"}


def type_of(schema_type, default=inspect.Parameter.empty):
    text = str(schema_type)
    optional = text.startswith("Optional[") or default is None
    text = text.removeprefix("Optional[").removesuffix("]")
    return TYPES[text] + (" | None" if optional else "")


def stub(name):
    function = getattr(assay.ops, name)
    schema = getattr(torch.ops.assay, name).default._schema
    signature = inspect.signature(function)
    given = list(signature.parameters)
    named = [argument.name for argument in schema.arguments]
    if given != named:
        raise SystemExit(f"assay.ops.{name} takes {given}, and the operator takes {named}")
    lines = []
    for argument in schema.arguments:
        default = signature.parameters[argument.name].default
        text = f"{argument.name}: {type_of(argument.type, default)}"
        if default is not inspect.Parameter.empty:
            text += f" = {default!r}"
        lines.append(f"    {text},\n")
    results = [type_of(result.type) for result in schema.returns]
    result = results[0] if len(results) == 1 else f"tuple[{', '.join(results)}]"
    text = textwrap.indent(inspect.getdoc(function), "    ").replace('"""', "'''")
    quoted = f'    """{text.strip()}\n    """'
    return f"def {name}(\n{''.join(lines)}) -> {result}:\n{quoted}\n    ...\n"


def main():
    operators = {
        name.removeprefix("assay::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("assay::") and not name.startswith("assay::_")
    }
    functions = set(assay.ops.__all__)
    if operators != functions:
        raise SystemExit(f"only in one of assay.ops and torch: {sorted(operators ^ functions)}")
    print('"""Made by tools/stubs.py."""\n\nfrom torch import Tensor\n')
    print("\n".join(stub(name) for name in sorted(functions)), end="")


if __name__ == "__main__":
    main()
