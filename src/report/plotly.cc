#include "report/plotly.h"

// ASSAY_PLOTLY_JS: path of plotly.min.js at build time.
asm(R"(
  .section .rodata
  .balign 16
  .hidden assay_plotly_begin
  .hidden assay_plotly_end
  .globl assay_plotly_begin
  .globl assay_plotly_end
assay_plotly_begin:
  .incbin ")" ASSAY_PLOTLY_JS R"("
assay_plotly_end:
  .byte 0
  .text
)");

extern "C" __attribute__((visibility("hidden"))) const char assay_plotly_begin[], assay_plotly_end[];

namespace assay::report {

std::string_view plotly_js() { return {assay_plotly_begin, size_t(assay_plotly_end - assay_plotly_begin)}; }

}  // namespace assay::report
