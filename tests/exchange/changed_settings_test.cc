// config.json with random changes: each is read, or refused with an Error.
#include <gtest/gtest.h>

#include "base/files.h"
#include "data/folder.h"
#include "exchange/hugging_face.h"
#include "exchange/hybrids.h"
#include "fuzz/mutation.h"

namespace assay::exchange {
namespace {

TEST(HuggingFaceSettings, ChangedOnesAreReadOrRefusedWithAnError) {
  const data::Folder folder;
  Random random(1, "changed settings");
  for (const auto& [name, text] : kHybrids) {
    int refused = 0;
    for (int i = 0; i < 250; ++i) {
      const std::string changed = fuzz::mutated_json(text, random);
      SCOPED_TRACE(changed);
      write_file(folder / "config.json", changed);
      try {
        hugging_face_spec(folder.path());
      } catch (const Error&) {
        ++refused;
      }
    }
    EXPECT_GT(refused, 0) << name;
  }
}

}  // namespace
}  // namespace assay::exchange
