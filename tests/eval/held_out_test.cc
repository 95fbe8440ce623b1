// Held-out losses against direct cross-entropy, and slices counted by hand.
#include "eval/held_out.h"

#include <torch/torch.h>

#include "data/folder.h"
#include "data/store_writer.h"
#include "nn/testing.h"

namespace assay::eval {
namespace {

using data::Folder, data::message_of;

constexpr int64_t kVocabulary = 16;
constexpr int64_t kLength = 5;
using Document = std::vector<int32_t>;

// Documents without their separator (0).
void write_store(const fs::path& folder, const std::vector<Document>& train,
                 const std::vector<Document>& test) {
  data::StoreWriter writer(folder, {"none", "", kVocabulary, 0});
  for (const Document& document : train)
    writer.add("a", "train", document, int64_t(document.size()));
  for (const Document& document : test)
    writer.add("a", "test", document, 3 * int64_t(document.size()));
  writer.commit();
}
const std::vector<Document> kTrain = {{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3}};
const std::vector<Document> kTest = {
    {1, 2, 1, 2, 1, 2, 3}, {4, 4, 4, 4, 4, 4}, {5}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}};

std::shared_ptr<nn::LanguageModel> model() {
  return nn::random_model(
      "[model]\nvocab_size = 16\nd_model = 16\nnum_layers = 2\npattern = ['attention', "
      "'mamba1']\n[model.attention]\nnum_heads = 2\n");
}
HeldOut::Options options(int64_t max_tokens = 0, int64_t at_once = 1 << 14) {
  return {{"a.test"}, {"a"}, kLength, max_tokens, at_once};
}

// −ln p of each token of `document` but none of what is before `begin`, read in pieces of kLength.
std::vector<double> direct(nn::LanguageModel& model, Document document) {
  document.push_back(0);
  std::vector<double> losses;
  for (size_t begin = 0; begin < document.size(); begin += kLength) {
    std::vector<int64_t> piece = {begin ? document[begin - 1] : 0};
    for (size_t i = begin; i < std::min(document.size(), begin + kLength); ++i)
      piece.push_back(document[i]);
    const at::Tensor tokens = at::tensor(piece, at::kLong).unsqueeze(0);
    nn::ModelState state;
    const at::NoGradGuard no_grad;
    const at::Tensor logs = at::log_softmax(model.logits(tokens.slice(1, 0, -1), state), -1)[0];
    for (size_t i = 1; i < piece.size(); ++i)
      losses.push_back(-logs[int64_t(i) - 1][piece[i]].item<double>());
  }
  return losses;
}

TEST(HeldOut, LossesAreTheDirectCrossEntropy) {
  const Folder folder;
  write_store(folder / "s", kTrain, kTest);
  const data::TokenStore store(folder / "s");
  const auto m = model();
  const HeldOut held_out(store, options());
  const SetLosses losses = held_out.run(*m).at("a.test");
  ASSERT_EQ(losses.nll.size(), kTest.size());
  int64_t all = 0;
  for (size_t d = 0; d < kTest.size(); ++d) {
    const std::vector<double> expected = direct(*m, kTest[d]);
    EXPECT_NEAR(losses.nll[d], std::accumulate(expected.begin(), expected.end(), 0.0), 1e-5)
        << "document " << d;
    EXPECT_EQ(losses.tokens[d], int64_t(expected.size()));
    EXPECT_EQ(losses.bytes[d], 3 * int64_t(kTest[d].size()));
    all += losses.tokens[d];
  }
  EXPECT_EQ(held_out.tokens(), all);
  EXPECT_NEAR(losses.bits_per_byte(), losses.total().nll / std::log(2.0) / (3 * 25), 1e-12);
}

TEST(HeldOut, TrainingIdOutsideTheVocabularyIsRejected) {
  const Folder folder;
  write_store(folder / "s", kTrain, kTest);
  const fs::path file = folder / "s" / "a.train.bin";
  std::string bytes = read_file(file);
  bytes.replace(4, 2, "\xff\xff");
  write_file(file, bytes);
  const data::TokenStore store(folder / "s");
  EXPECT_MESSAGE(HeldOut(store, options()),
                 "a.train.bin: token 2 has id 65535, but the vocabulary has 16 ids");
}

TEST(HeldOut, BatchesChangeNothing) {
  const Folder folder;
  write_store(folder / "s", kTrain, kTest);
  const data::TokenStore store(folder / "s");
  const auto m = model();
  const SetLosses all = HeldOut(store, options()).run(*m).at("a.test");
  const SetLosses one = HeldOut(store, options(0, 1)).run(*m).at("a.test");
  for (size_t d = 0; d < all.nll.size(); ++d)
    EXPECT_NEAR(all.nll[d], one.nll[d], 1e-6) << "document " << d;
}

TEST(HeldOut, SlicesSumToTheTotal) {
  const Folder folder;
  write_store(folder / "s", kTrain, kTest);
  const auto m = model();
  const SetLosses losses = HeldOut(data::TokenStore(folder / "s"), options()).run(*m).at("a.test");
  const Sum total = losses.total();
  const auto sum = [&](std::initializer_list<const char*> names) {
    Sum out;
    for (const char* name : names) {
      const Sum& slice =
          losses.slices[size_t(std::ranges::find(kSlices, std::string(name)) - kSlices.begin())];
      out.nll += slice.nll;
      out.tokens += slice.tokens;
    }
    return out;
  };
  for (const Sum& part :
       {sum({"frequent", "rare", "unseen"}), sum({"repeated_bigram", "other"}),
        sum({"position_0_64", "position_64_256", "position_256_1024", "position_1024_up"})}) {
    EXPECT_EQ(part.tokens, total.tokens);
    EXPECT_NEAR(part.nll, total.nll, 1e-9);
  }
}

// Train: id 1 ten times, 2 nine times, 3 and the separator once: 21 tokens, 90 % = 18.9. Commonest
// first, 1 (0 before it) and 2 (10 before it) are frequent; 19 ≥ 18.9, so 0 and 3 are rare; all
// else is unseen.
TEST(HeldOut, SlicesCountedByHand) {
  const Folder folder;
  write_store(folder / "s", kTrain, kTest);
  const SetLosses losses =
      HeldOut(data::TokenStore(folder / "s"), options()).run(*model()).at("a.test");
  const auto tokens = [&](const std::string& name) {
    return losses.slices[size_t(std::ranges::find(kSlices, name) - kSlices.begin())].tokens;
  };
  EXPECT_EQ(tokens("frequent"), 6 + 0 + 0 + 2);
  EXPECT_EQ(tokens("rare"), 2 + 1 + 1 + 2);  // 3 and the separator of each document
  EXPECT_EQ(tokens("unseen"), 0 + 6 + 1 + 8);
  // 0 | 1 2 1 2 1 repeats (1,2), (2,1);  1 | 2 3 0 nothing;
  //     0 | 4 4 4 4 4 repeats (4,4) three times;  4 | 4 0 nothing;
  // the rest nothing
  EXPECT_EQ(tokens("repeated_bigram"), 2 + 3);
  EXPECT_EQ(tokens("position_0_64"), losses.total().tokens);
}

TEST(HeldOut, ABudgetCoversTheFirstPieceOfEveryDocumentFirst) {
  const Folder folder;
  write_store(folder / "s", kTrain, kTest);
  const data::TokenStore store(folder / "s");
  const HeldOut held_out(store, options(5 + 5 + 2 + 5));
  const SetLosses losses = held_out.run(*model()).at("a.test");
  EXPECT_EQ(losses.tokens, (std::vector<int64_t>{5, 5, 2, 5}));
  EXPECT_EQ(losses.bytes[3], std::llround(33.0 * 5 / 12));  // in proportion to what was predicted
  EXPECT_EQ(held_out.tokens(), 17);
}

TEST(HeldOut, UnknownSetsAreRefused) {
  const Folder folder;
  write_store(folder / "s", kTrain, kTest);
  const data::TokenStore store(folder / "s");
  EXPECT_MESSAGE(HeldOut(store, {{"a"}, {"a"}, kLength, 0, 64}), "DOMAIN.SPLIT");
  EXPECT_MESSAGE(HeldOut(store, {{"a.tset"}, {"a"}, kLength, 0, 64}), "did you mean 'test'?");
  EXPECT_EQ(default_sets(store, {"a"}), std::vector<std::string>{"a.test"});
}

}  // namespace
}  // namespace assay::eval
