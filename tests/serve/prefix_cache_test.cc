// States put together from pages, for every mixer, and what a budget keeps.
#include "serve/prefix_cache.h"

#include <torch/torch.h>

#include "nn/testing.h"

namespace assay::serve {
namespace {

std::vector<int64_t> list_of(const at::Tensor& tokens) {
  const at::Tensor flat = tokens.contiguous();
  return {flat.data_ptr<int64_t>(), flat.data_ptr<int64_t>() + flat.numel()};
}

struct Example {
  std::string name;
  std::string toml;
};
std::vector<Example> examples() {
  std::vector<Example> out;
  for (const std::string& mixer : nn::mixers().names()) {
    int number = 0;
    for (const std::string& table : nn::mixers().at(mixer).examples)
      out.push_back(
          {fmt::format("{}_{}", mixer, number++),
           fmt::format(
               "[model]\nvocab_size = 40\nd_model = 48\npattern = [\"{0}\"]\n[model.{0}]\n{1}",
               mixer, table)});
  }
  return out;
}

struct PageForms : testing::TestWithParam<Example> {};

TEST_P(PageForms, SequencesContinueFromPagesBitForBit) {
  const at::NoGradGuard no_grad;
  const auto model = nn::random_model(GetParam().toml);
  model->to(at::kFloat);
  const at::Tensor tokens = nn::random_tokens(1, 80, 40, "tokens");
  PrefixCache cache(64 << 20);
  nn::ModelState state;
  PagePointer page;
  at::Tensor computed;
  for (int64_t begin = 0; begin < 64; begin += 16) {
    const at::Tensor piece = tokens.slice(1, begin, begin + 16);
    computed = model->hidden(piece, state);
    page = cache.add(page, list_of(piece), state, computed);
    ASSERT_TRUE(page);
    EXPECT_TRUE(at::equal(page->hidden, computed));
  }
  for (int64_t pages = 1; pages <= 4; ++pages) {
    PagePointer found;
    for (int64_t i = 0; i < pages; ++i) {
      found = cache.find(found, list_of(tokens.slice(1, 16 * i, 16 * i + 16)));
      ASSERT_TRUE(found);
    }
    nn::ModelState again = state_after(found);
    EXPECT_EQ(again.position, 16 * pages);
    nn::ModelState read;
    for (int64_t i = 0; i < pages; ++i) model->hidden(tokens.slice(1, 16 * i, 16 * i + 16), read);
    for (const auto& [begin, end] :
         {std::pair(16 * pages, 16 * pages + 9), {16 * pages + 9, 16 * pages + 10}}) {
      const at::Tensor piece = tokens.slice(1, begin, end);
      EXPECT_TRUE(at::equal(model->hidden(piece, again), model->hidden(piece, read)))
          << pages << " pages";
    }
    nn::ModelState third = state_after(found);  // the pages did not change
    const at::Tensor piece = tokens.slice(1, 16 * pages, 16 * pages + 9);
    nn::ModelState fourth = state_after(found);
    EXPECT_TRUE(at::equal(model->hidden(piece, third), model->hidden(piece, fourth)));
  }
}

INSTANTIATE_TEST_SUITE_P(Mixers, PageForms, testing::ValuesIn(examples()),
                         [](const auto& example) { return example.param.name; });

struct PrefixCacheBudget : testing::Test {
  PrefixCacheBudget() {
    at::Tensor hidden = at::zeros({1, 4, 8});
    nn::ModelState state;
    state.layers.resize(1);
    state.layers[0]["S"] = at::zeros({1, 100});
    page_bytes = PrefixCache(1 << 20).add(nullptr, {0}, state, hidden)->bytes;
    add = [=](PrefixCache& cache, const PagePointer& before, int64_t token) {
      return cache.add(before, {token}, state, hidden);
    };
  }
  int64_t page_bytes;
  std::function<PagePointer(PrefixCache&, const PagePointer&, int64_t)> add;
};

TEST_F(PrefixCacheBudget, BytesStayWithinTheBudget) {
  PrefixCache cache(3 * page_bytes + 1);
  for (int64_t token = 0; token < 50; ++token) {
    ASSERT_TRUE(add(cache, nullptr, token));
    EXPECT_LE(cache.bytes(), 3 * page_bytes + 1);
    EXPECT_EQ(cache.bytes(), cache.pages() * page_bytes);
  }
  EXPECT_EQ(cache.pages(), 3);
  EXPECT_FALSE(cache.find(nullptr, {46}));
  EXPECT_TRUE(cache.find(nullptr, {47}));
}

TEST_F(PrefixCacheBudget, PagesWithoutSuccessorsAreDroppedFirst) {
  PrefixCache cache(4 * page_bytes);
  const PagePointer first = add(cache, nullptr, 1);
  const PagePointer second = add(cache, first, 2);
  const PagePointer third = add(cache, second, 3);
  add(cache, nullptr, 9);
  EXPECT_TRUE(cache.find(second, {3}));  // touches all three
  EXPECT_TRUE(add(cache, nullptr, 10));
  EXPECT_FALSE(cache.find(nullptr, {9}));
  EXPECT_TRUE(cache.find(second, {3}));
  EXPECT_TRUE(add(cache, nullptr, 11));
  EXPECT_FALSE(cache.find(nullptr, {10}));
  EXPECT_TRUE(add(cache, add(cache, nullptr, 12), 13));
  EXPECT_FALSE(cache.find(second, {3}));
  EXPECT_TRUE(cache.find(nullptr, {1}));
}

TEST_F(PrefixCacheBudget, APromptLargerThanTheBudgetKeepsItsBeginning) {
  PrefixCache cache(2 * page_bytes);
  PagePointer page = add(cache, nullptr, 1);
  page = add(cache, page, 2);
  ASSERT_TRUE(page);
  EXPECT_FALSE(add(cache, page, 3));
  EXPECT_TRUE(cache.find(cache.find(nullptr, {1}), {2}));
}

TEST_F(PrefixCacheBudget, NoBudgetKeepsNothing) {
  PrefixCache cache(0);
  EXPECT_FALSE(add(cache, nullptr, 1));
  EXPECT_EQ(cache.bytes(), 0);
}

}  // namespace
}  // namespace assay::serve
