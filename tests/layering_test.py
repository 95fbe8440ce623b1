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
        self.assertTrue(found("ops/glu/cuda.cu", "#include <torch/torch.h>"))
        self.assertFalse(found("ops/glu/op.cc", "#include <torch/torch.h>"))

    def test_private_header_of_a_sibling_is_found(self):
        self.assertTrue(found("ops/glu/cuda.cu", '#include "ops/norm/cuda_tiles.cuh"'))
        self.assertTrue(found("ops/glu/op.cc", '#include "ops/norm/kernel.h"'))
        self.assertFalse(found("ops/glu/op.cc", '#include "ops/norm/norm.h"'))
        self.assertFalse(found("ops/glu/op.cc", '#include "ops/glu/kernel.h"'))
        self.assertFalse(found("ops/glu/op.cc", '#include "ops/tensors.h"'))

    def test_cuda_library_is_for_cuda_files(self):
        self.assertTrue(found("ops/glu/op.cc", '#include "ops/cuda/ptx.cuh"'))
        self.assertFalse(found("ops/glu/cuda.cu", '#include "ops/cuda/ptx.cuh"'))

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
