#include "eval/held_out.h"

#include <torch/torch.h>

#include <bit>
#include <numeric>
#include <unordered_set>

#include "base/interrupt.h"
#include "base/safetensors.h"

namespace assay::eval {
namespace {

enum Frequency : uint8_t { kFrequent, kRare, kUnseen };
enum Slice { kRepeated = 3, kOther, kPosition, kAbove = 9 };

std::vector<uint8_t> frequency_classes(const data::TokenStore& store,
                                       const std::vector<std::string>& domains) {
  std::vector<int64_t> counts(size_t(store.vocab_size()), 0);
  for (const std::string& domain : domains) {
    const data::Documents& documents = store.documents(domain, "train");
    std::vector<int64_t> block(1 << 16);
    for (int64_t begin = 0; begin < documents.tokens(); begin += int64_t(block.size())) {
      const int64_t size = std::min<int64_t>(int64_t(block.size()), documents.tokens() - begin);
      documents.read(begin, size, block.data());  // rejects ids outside the vocabulary
      for (int64_t i = 0; i < size; ++i) ++counts[size_t(block[size_t(i)])];
    }
  }
  std::vector<size_t> order(counts.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater{}, [&](size_t id) { return counts[id]; });
  const double enough = 0.9 * double(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  std::vector<uint8_t> classes(counts.size(), kUnseen);
  double seen = 0;
  for (const size_t id : order) {
    if (counts[id] > 0) classes[id] = seen < enough ? kFrequent : kRare;
    seen += double(counts[id]);
  }
  return classes;
}

int position_slice(int64_t index) {
  return kPosition + (index >= 64) + (index >= 256) + (index >= 1024);
}

}  // namespace

std::pair<std::string, std::string> domain_and_split(const std::string& set) {
  const size_t dot = set.rfind('.');
  if (dot == std::string::npos)
    fail("'{}' names no evaluation set; expected DOMAIN.SPLIT, for example arxiv.test", set);
  return {set.substr(0, dot), set.substr(dot + 1)};
}

Sum SetLosses::total() const {
  return {std::accumulate(nll.begin(), nll.end(), 0.0),
          std::accumulate(tokens.begin(), tokens.end(), int64_t{0})};
}

double SetLosses::bits_per_byte() const {
  const double bytes_total = double(std::accumulate(bytes.begin(), bytes.end(), int64_t{0}));
  return bytes_total > 0 ? total().nll / std::log(2.0) / bytes_total : 0;
}

HeldOut::HeldOut(const data::TokenStore& store, const Options& options)
    : tokens_at_once_(options.tokens_at_once),
      largest_loss_(std::log(double(store.vocab_size())) + kBound) {
  const auto classes = frequency_classes(store, options.train_domains);
  for (const std::string& name : options.sets) {
    const auto [domain, split] = domain_and_split(name);
    const data::Documents& documents = store.documents(domain, split);
    Set set{name, {}, {}, {}, {}, {}, {}};
    int64_t last = -1;
    std::vector<int64_t> predicted;
    for (const data::Segment& segment :
         held_out_segments(documents, options.max_tokens, options.sequence_length)) {
      if (segment.document != last) {
        last = segment.document;
        predicted.push_back(0);
        set.documents.push_back(segment.document);
        set.document_bytes.push_back(documents.has_bytes() ? documents.bytes(segment.document) : 0);
      }
      const int64_t begin = int64_t(set.tokens.size());
      const int64_t document = int64_t(predicted.size()) - 1;
      set.rows.push_back({begin, segment.length, document});
      set.tokens.resize(size_t(begin + segment.length + 1));
      read_segment(documents, store.separator(), segment, set.tokens.data() + begin);
      predicted.back() += segment.length;
      const int64_t whole = documents.document(segment.document).size();
      if (documents.has_bytes())
        set.document_bytes.back() = std::llround(double(documents.bytes(segment.document)) *
                                                 double(predicted.back()) / double(whole));
    }
    set.frequency.resize(set.tokens.size());
    set.repeated.resize(set.tokens.size());
    for (const Row& row : set.rows) {
      std::unordered_set<uint64_t> seen;
      for (int64_t i = row.begin + 1; i <= row.begin + row.length; ++i) {
        const uint64_t bigram =
            uint64_t(set.tokens[size_t(i - 1)]) << 32 | uint64_t(set.tokens[size_t(i)]);
        set.repeated[size_t(i)] = !seen.insert(bigram).second;
        set.frequency[size_t(i)] = classes.at(size_t(set.tokens[size_t(i)]));
      }
    }
    std::ranges::stable_sort(set.rows, std::greater{}, &Row::length);
    sets_.push_back(std::move(set));
  }
}

int64_t HeldOut::tokens() const {
  int64_t total = 0;
  for (const Set& set : sets_)
    for (const Row& row : set.rows) total += row.length;
  return total;
}

Losses HeldOut::run(nn::LanguageModel& model) const {
  Losses losses;
  for (const Set& set : sets_) losses[set.name] = run(model, set);
  return losses;
}

SetLosses HeldOut::run(nn::LanguageModel& model, const Set& set) const {
  const size_t documents = set.documents.size();
  SetLosses out{.nll = std::vector<double>(documents),
                .tokens = std::vector<int64_t>(documents),
                .bytes = set.document_bytes,
                .documents = set.documents,
                .recall_nll = std::vector<double>(documents),
                .recall_tokens = std::vector<int64_t>(documents),
                .bounded_nll = std::vector<double>(documents)};
  for (size_t first = 0; first < set.rows.size();) {
    const int64_t length = set.rows[first].length;
    // A power of two, because modules of Triton or torch.compile are compiled for each batch size
    const size_t count = std::bit_floor(
        std::min(set.rows.size() - first, size_t(std::max<int64_t>(1, tokens_at_once_ / length))));
    at::Tensor batch = at::zeros({int64_t(count), length + 1}, at::kLong);
    // Shorter rows end in id 0; what a causal model says there is not read
    for (size_t r = 0; r < count; ++r)
      std::copy_n(set.tokens.data() + set.rows[first + r].begin, set.rows[first + r].length + 1,
                  batch[int64_t(r)].data_ptr<int64_t>());
    const at::Tensor losses = model.token_losses(batch.to(model.embedding.device()))
                                  .to(at::kCPU, at::kDouble)
                                  .contiguous();
    for (size_t r = 0; r < count; ++r) {
      const Row& row = set.rows[first + r];
      const double* loss = losses[int64_t(r)].data_ptr<double>();
      for (int64_t i = 0; i < row.length; ++i) {
        const size_t target = size_t(row.begin + 1 + i);
        out.nll[size_t(row.document)] += loss[i];
        out.bounded_nll[size_t(row.document)] += std::min(loss[i], largest_loss_);
        ++out.tokens[size_t(row.document)];
        const auto add = [&](int slice) {
          out.slices[size_t(slice)].nll += loss[i];
          ++out.slices[size_t(slice)].tokens;
        };
        add(set.frequency[target]);
        add(set.repeated[target] ? kRepeated : kOther);
        add(position_slice(i));
        if (set.repeated[target]) {
          out.recall_nll[size_t(row.document)] += loss[i];
          ++out.recall_tokens[size_t(row.document)];
        }
        if (loss[i] > 12) add(kAbove);
      }
    }
    first += count;
  }
  return out;
}

run::EvaluatedSets summary(const Losses& losses) {
  run::EvaluatedSets out;
  for (const auto& [name, set] : losses) {
    const Sum total = set.total();
    std::map<std::string, run::Slice> slices;
    for (size_t s = 0; s < kSlices.size(); ++s)
      if (const Sum& slice = set.slices[s]; slice.tokens > 0)
        slices[kSlices[s]] = {.loss = slice.loss(),
                              .tokens = slice.tokens,
                              .share = double(slice.tokens) / double(total.tokens)};
    out[name] = {.loss = total.loss(),
                 .bits_per_byte = set.bits_per_byte(),
                 .tokens = total.tokens,
                 .documents = int64_t(set.nll.size()),
                 .slices = slices};
  }
  return out;
}

void write_losses(const fs::path& file, const Losses& losses) {
  std::vector<TensorEntry> entries;
  for (const auto& [name, set] : losses) {
    const std::vector<int64_t> shape = {int64_t(set.nll.size())};
    entries.push_back({name + ".nll", "F64", shape, std::as_bytes(std::span(set.nll))});
    entries.push_back({name + ".tokens", "I64", shape, std::as_bytes(std::span(set.tokens))});
    entries.push_back({name + ".bytes", "I64", shape, std::as_bytes(std::span(set.bytes))});
  }
  write_safetensors(file, entries);
}

std::vector<std::string> default_sets(const data::TokenStore& store,
                                      const std::vector<std::string>& train_domains) {
  std::vector<std::string> sets;
  for (const std::string& domain : train_domains)
    if (store.has(domain, "valid")) sets.push_back(domain + ".valid");
  for (const std::string& domain : store.domains())
    if (store.has(domain, "test")) sets.push_back(domain + ".test");
  return sets;
}

}  // namespace assay::eval
