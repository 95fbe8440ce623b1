#pragma once
// The page for trying prompts: one HTML text without external resources.

namespace assay::serve {

extern const char* const kPage;

}  // namespace assay::serve
