"""The checks of layering.py find what they forbid and nothing else."""

import unittest

import layering

ALLOWED = {
    "base": {"base"},
    "run": {"run"},
    "ops": {"ops", "base", "torch"},
    "cli": {"cli", "ops", "base", "torch"},
}


def found(path, line):
    """The violations of a file of src with one line."""

    class File(type(layering.SOURCE)):
        def read_text(self):
            return line

    return list(layering.violations(File(layering.SOURCE / path), ALLOWED))


class Layering(unittest.TestCase):
    def test_layer_above_is_found(self):
        self.assertTrue(found("base/x.cc", '#include "ops/x.h"'))
        self.assertFalse(found("ops/x.cc", '#include "base/x.h"'))

    def test_torch_in_a_kernel_is_found(self):
        self.assertTrue(found("ops/rowwise/glu/cuda.cu", "#include <torch/torch.h>"))
        self.assertFalse(found("ops/rowwise/glu/op.cc", "#include <torch/torch.h>"))

    def test_private_header_of_a_sibling_is_found(self):
        cuda, op = "ops/rowwise/glu/cuda.cu", "ops/rowwise/glu/op.cc"
        self.assertTrue(found(cuda, '#include "ops/rowwise/norm/cuda_tiles.cuh"'))
        self.assertTrue(found(op, '#include "ops/rowwise/norm/kernel.h"'))
        self.assertFalse(found(op, '#include "ops/rowwise/norm/norm.h"'))
        self.assertFalse(found(op, '#include "ops/rowwise/glu/kernel.h"'))
        self.assertFalse(found(op, '#include "ops/core/tensors.h"'))

    def test_shared_header_of_another_family_is_found(self):
        header = '#include "ops/recurrence/checkpointed_scan.h"'
        self.assertTrue(found("ops/rowwise/glu/op.cc", header))
        self.assertFalse(found("ops/recurrence/ssd/op.cc", header))

    def test_core_and_libraries_are_below_operators(self):
        header = '#include "ops/rowwise/norm/norm.h"'
        for file in ("ops/core/x.cc", "ops/cpu/x.h", "ops/cuda/x.cuh"):
            self.assertTrue(found(file, header))
        self.assertTrue(found("ops/core/x.cc", '#include "ops/cpu/highway.h"'))
        self.assertFalse(found("ops/cpu/x.h", '#include "ops/core/kernel.h"'))

    def test_cuda_library_is_for_cuda_files(self):
        self.assertTrue(found("ops/rowwise/glu/op.cc", '#include "ops/cuda/ptx.cuh"'))
        self.assertFalse(found("ops/rowwise/glu/cuda.cu", '#include "ops/cuda/ptx.cuh"'))

    def test_name_of_a_file_of_the_run_folder_is_found(self):
        self.assertTrue(found("ops/x.cc", 'read(run / "done.json");'))
        self.assertFalse(found("run/x.cc", 'read(run / "done.json");'))
        self.assertFalse(found("ops/x.cc", 'fail("see done.json there");'))

    def test_wrong_row_of_the_table_is_found(self):
        allowed = {"base": {"base"}, "ops": {"ops", "base", "torch"}}
        page = "| `base` | errors | libraries | no |\n| `ops` | operators | `base` | {} |\n"
        self.assertFalse(list(layering.wrong_rows(page.format("yes"), allowed)))
        self.assertTrue(list(layering.wrong_rows(page.format("no"), allowed)))
        self.assertTrue(list(layering.wrong_rows("", allowed)))


if __name__ == "__main__":
    unittest.main()
