// The law of every mixer at the size of its preset, in bf16 on a GPU, where kernels run that the
// small float64 examples do not reach: two layers of each preset, whole and cut, output and
// gradient, against float64.
#include <torch/torch.h>

#include <algorithm>

#include "testing.h"

namespace assay::nn {
namespace {

// 389 is prime
constexpr int64_t kBatch = 2;
constexpr int64_t kTime = 389;
constexpr int64_t kVocabulary = 64;

std::vector<std::string> presets() {
  std::vector<std::string> names;
  for (const auto& entry :
       fs::directory_iterator(fs::path(ASSAY_SOURCE_DIR) / "plans" / "models")) {
    const std::string name = entry.path().stem();
    if (!name.ends_with("_1.3b") && !name.ends_with("_long")) names.push_back(name);
  }
  std::ranges::sort(names);
  return names;
}

struct PresetsOnCuda : testing::TestWithParam<std::string> {
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
    const fs::path file = fs::path(ASSAY_SOURCE_DIR) / "plans" / "models" / (GetParam() + ".toml");
    ModelSpec spec = ModelSpec::read(ConfigNode::read_file(file).child("model"));
    spec.config.vocab_size = kVocabulary;
    spec.config.max_positions = kTime;
    spec.config.num_layers = std::max<int64_t>(2, spec.config.pattern.size());
    model = std::make_shared<LanguageModel>(spec);
    model->initialise(1);
    model->to(at::kCUDA);
    tokens = random_tokens(kBatch, kTime, kVocabulary, GetParam()).to(at::kCUDA);
    cotangent =
        at::randn({kBatch, kTime, spec.config.d_model}, generator("cotangent")).to(at::kCUDA);
  }
  // `steps`: as many tokens at the end go one by one.
  at::Tensor hidden(at::ScalarType dtype, int64_t piece, int64_t steps = 0) {
    model->compute_dtype = dtype;
    ModelState state;
    std::vector<at::Tensor> out;
    for (const at::Tensor& part : tokens.narrow(1, 0, kTime - steps).split(piece, 1))
      out.push_back(model->hidden(part, state));
    for (int64_t t = kTime - steps; t < kTime; ++t)
      out.push_back(model->hidden(tokens.narrow(1, t, 1), state));
    return at::cat(out, 1);
  }
  std::vector<at::Tensor> gradients(at::ScalarType dtype, int64_t piece) {
    const at::Tensor y = hidden(dtype, piece);
    return torch::autograd::grad({(cotangent.to(y.scalar_type()) * y).sum()}, model->parameters(),
                                 {}, {}, false, true);
  }
  void expect_close(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                    double limit, const char* what) {
    const auto named = model->named_parameters();
    for (size_t i = 0; i < expected.size(); ++i)
      if (expected[i].defined())
        EXPECT_LE(relative_error(actual[i], expected[i]), limit) << named[i].key() << ", " << what;
  }
  std::shared_ptr<LanguageModel> model;
  at::Tensor tokens;
  at::Tensor cotangent;
};

// Where a mixer selects, rounding may change a choice: the median position counts. Among hundreds
// of keys bf16 changes most choices of a single one, and what follows: there only the cuts are
// compared (the operator's tests force the choice).
bool selects_one(const std::string& preset) { return preset == "top1_element"; }

// Some queries of Top-1 Chunk and block selection select another chunk in bf16 than in float64, and
// their gradient is that of the other chunk. The largest error of these presets is 0.18 on CUDA.
double gradient_limit(const std::string& preset) {
  const bool selects = preset.starts_with("top1_chunk") || preset.starts_with("block_selection");
  return selects ? 0.2 : 0.1;
}

double median_error(const at::Tensor& y, const at::Tensor& expected) {
  const at::Tensor a = y.to(at::kDouble);
  const at::Tensor b = expected.to(at::kDouble);
  return ((a - b).norm(2, -1) / b.norm(2, -1)).median().item<double>();
}

TEST_P(PresetsOnCuda, AreOneFunctionInBfloat16) {
  const at::NoGradGuard no_grad;
  const at::Tensor whole = hidden(at::kBFloat16, kTime);
  const at::Tensor steps = hidden(at::kBFloat16, 101, 40);
  EXPECT_LE(median_error(hidden(at::kBFloat16, 64), whole), 0.03) << "pieces of 64";
  EXPECT_LE(median_error(steps, whole), 0.03) << "pieces of 101, then steps";
  EXPECT_LE(median_error(steps.slice(1, kTime - 40), whole.slice(1, kTime - 40)), 0.03)
      << "the steps";
  if (selects_one(GetParam())) return;
  model->to(at::kDouble);
  EXPECT_LE(median_error(whole, hidden(at::kDouble, kTime)), 0.03) << "against float64";
}

TEST_P(PresetsOnCuda, HaveOneGradientInBfloat16) {
  const auto whole = gradients(at::kBFloat16, kTime);
  expect_close(gradients(at::kBFloat16, 101), whole, 0.1, "pieces of 101");
  if (selects_one(GetParam())) return;
  model->to(at::kDouble);
  expect_close(whole, gradients(at::kDouble, kTime), gradient_limit(GetParam()), "against float64");
}

INSTANTIATE_TEST_SUITE_P(All, PresetsOnCuda, testing::ValuesIn(presets()), [](const auto& info) {
  std::string name = info.param;
  std::ranges::replace_if(
      name, [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); }, '_');
  return name;
});

}  // namespace
}  // namespace assay::nn
