#include "tasks/encoder.h"

#include "base/error.h"
#include "tasks/text.h"

namespace assay::tasks {

Encoder::Encoder(const data::Tokenizer& tokenizer, bool bos, Prefix prefix)
    : tokenizer_(tokenizer), words_(tokenizer), bos_(bos), separator_(tokenizer.separator()) {
  if (bos && tokenizer.bos() < 0)
    fail("the tokenizer has no token for the beginning of a text (--bos)");
  prefix_ = prefix == Prefix::bos && tokenizer.bos() >= 0 ? tokenizer.bos() : separator_;
}

std::vector<int64_t> Encoder::plain(const std::string& text) {
  std::vector<int32_t> ids;
  if (!words_.encode(text, ids)) ids = tokenizer_.encode(text);
  return {ids.begin(), ids.end()};
}

std::vector<int64_t> Encoder::encode(const std::string& text) {
  std::vector<int64_t> ids = plain(text);
  if (bos_) ids.insert(ids.begin(), tokenizer_.bos());
  return ids;
}

Row Encoder::pair(std::string context, std::string continuation) {
  const std::string kept = strip(context, /*left=*/false);
  continuation = context.substr(kept.size()) + continuation;
  Row row;
  int64_t before = 1;
  if (kept.empty()) {
    row.tokens = plain(continuation);
    row.tokens.insert(row.tokens.begin(), prefix_);
  } else {
    if (kept != last_context_) {
      last_ids_ = encode(kept);
      last_context_ = kept;
    }
    before = int64_t(last_ids_.size());
    row.tokens = encode(kept + continuation);
  }
  row.scored = int64_t(row.tokens.size()) - before;
  // Tokens of the context count where the whole is encoded otherwise, so the row is
  // context + continuation.
  if (row.scored < 1)
    fail("the answer '{}' has no tokens of its own after its context", continuation);
  if (!kept.empty()) std::copy(last_ids_.begin(), last_ids_.end(), row.tokens.begin());
  return row;
}

std::vector<Row> Encoder::windows(const std::string& text, int64_t longest) {
  const std::vector<int64_t> ids = encode(text);
  const auto size = int64_t(ids.size());
  std::vector<Row> rows;
  for (int64_t predicted = 0; predicted < size;) {
    const int64_t count = std::min(longest, size - predicted);
    const int64_t end = predicted + count;
    Row row;
    row.scored = count;
    if (predicted == 0) row.tokens.push_back(prefix_);
    row.tokens.insert(row.tokens.end(), ids.begin() + std::max<int64_t>(0, end - longest - 1),
                      ids.begin() + end);
    rows.push_back(std::move(row));
    predicted = end;
  }
  return rows;
}

std::string Encoder::decode(const std::vector<int64_t>& tokens) const {
  std::vector<int32_t> ids;
  for (const int64_t token : tokens) {
    const bool is_text = token != separator_ && token != tokenizer_.bos();
    if (is_text && token < tokenizer_.vocab_size()) ids.push_back(int32_t(token));
  }
  return tokenizer_.decode(ids);
}

int64_t truncate(Row& row, int64_t longest) {
  if (row.scored > longest)
    fail("{} tokens are to be predicted, and the model reads {} at most", row.scored, longest);
  const int64_t dropped = std::max<int64_t>(0, int64_t(row.tokens.size()) - longest - 1);
  row.tokens.erase(row.tokens.begin(), row.tokens.begin() + dropped);
  return dropped;
}

}  // namespace assay::tasks
