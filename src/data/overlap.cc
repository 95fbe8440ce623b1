#include "data/overlap.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <span>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/progress.h"

namespace assay::data {
namespace {

constexpr size_t kAtATime = 16u << 20;  // test hashes held at a time, 16 bytes each

uint64_t mixed(uint64_t x) {  // splitmix64's finaliser
  x = (x + 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

using Text = std::span<const int64_t>;  // the tokens of a document without the separator

// Cyclic polynomials [Cohen 1997].
class CyclicHash {
 public:
  explicit CyclicHash(int64_t n) : n_(int(n)) {}
  void add(int64_t token) { hash_ = std::rotl(hash_, 1) ^ mixed(uint64_t(token)); }
  void remove(int64_t token) { hash_ ^= std::rotl(mixed(uint64_t(token)), n_); }  // after add()
  uint64_t value() const { return mixed(hash_); }

 private:
  int n_;
  uint64_t hash_ = 0;
};

// Polynomials modulo the prime 2^61 − 1 [Karp, Rabin 1987].
class PolynomialHash {
 public:
  explicit PolynomialHash(int64_t n) {
    for (int64_t i = 0; i < n; ++i) power_ = times(power_, kBase);
  }
  void add(int64_t token) { hash_ = (times(hash_, kBase) + term(token)) % kPrime; }
  void remove(int64_t token) {  // after add()
    hash_ = (hash_ + kPrime - times(power_, term(token))) % kPrime;
  }
  uint64_t value() const { return mixed(hash_); }

 private:
  static constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;
  static constexpr uint64_t kBase = 0x15C4DA1B2F0E6A37u;  // any number without a pattern
  static uint64_t times(uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    const uint64_t sum = (uint64_t(product) & kPrime) + uint64_t(product >> 61);
    return sum >= kPrime ? sum - kPrime : sum;
  }
  static uint64_t term(int64_t token) { return mixed(uint64_t(token)) % kPrime; }
  uint64_t power_ = 1;
  uint64_t hash_ = 0;
};

template <class Hash>
void for_each_ngram_by(Text tokens, int64_t n, auto&& use) {
  Hash hash(n);
  for (size_t i = 0; i < tokens.size(); ++i) {
    hash.add(tokens[i]);
    if (int64_t(i) >= n) hash.remove(tokens[i - size_t(n)]);
    if (int64_t(i) + 1 >= n) use(hash.value());
  }
}

// use(hash) for each n-gram of the document. From 64 tokens on, the rotations of a cyclic
// polynomial repeat, and runs of equal tokens cancel out.
void for_each_ngram(Text tokens, int64_t n, auto&& use) {
  if (n < 64) for_each_ngram_by<CyclicHash>(tokens, n, use);
  else if (n <= std::ssize(tokens)) for_each_ngram_by<PolynomialHash>(tokens, n, use);
}

uint64_t document_hash(Text tokens) {
  uint64_t hash = mixed(uint64_t(tokens.size()) + 1);
  for (const int64_t token : tokens) hash = mixed(hash ^ uint64_t(token));
  return hash;
}

// Reads documents one after the other, with a check of every id.
class DocumentReader {
 public:
  Text read(const Documents& documents, int64_t i) {
    const int64_t size = documents.document(i).size();
    tokens_.resize(size_t(size));
    documents.read(documents.begin(i), size, tokens_.data());
    return Text(tokens_).first(size_t(std::max<int64_t>(size - 1, 0)));
  }

 private:
  std::vector<int64_t> tokens_;
};

// A set of hashes that remembers which of them were met.
class Watch {
 public:
  void add(uint64_t hash) { wanted_.push_back(hash); }
  bool full() const { return wanted_.size() >= kAtATime; }
  void seal() {
    std::sort(wanted_.begin(), wanted_.end());
    wanted_.erase(std::unique(wanted_.begin(), wanted_.end()), wanted_.end());
    met_.assign(wanted_.size(), 0);
    maybe_.assign(size_t{1} << 22, 0);
    for (const uint64_t hash : wanted_) maybe_[filter_word(hash)] |= filter_bit(hash);
  }
  void meet(uint64_t hash) {  // most training hashes stop at the filter
    if (!(maybe_[filter_word(hash)] & filter_bit(hash))) return;
    if (const size_t at = find(hash); at < wanted_.size()) met_[at] = 1;
  }
  // After the last meet(): the filter then holds only what was met, so most questions end there.
  void finish() {
    maybe_.assign(maybe_.size(), 0);
    for (size_t i = 0; i < wanted_.size(); ++i)
      if (met_[i]) maybe_[filter_word(wanted_[i])] |= filter_bit(wanted_[i]);
  }
  bool was_met(uint64_t hash) const {
    return (maybe_[filter_word(hash)] & filter_bit(hash)) && met_[find(hash)];
  }

 private:
  static size_t filter_word(uint64_t hash) { return hash >> 42; }
  static uint64_t filter_bit(uint64_t hash) { return uint64_t{1} << (hash & 63); }
  size_t find(uint64_t hash) const {
    const auto at = std::lower_bound(wanted_.begin(), wanted_.end(), hash);
    return at != wanted_.end() && *at == hash ? size_t(at - wanted_.begin()) : wanted_.size();
  }
  std::vector<uint64_t> wanted_;
  std::vector<uint64_t> maybe_;
  std::vector<uint8_t> met_;
};

struct Part {
  size_t domain;  // position in the result
  const Documents* documents;
};
// A run of test documents: documents begin … end − 1 of a part.
struct Range {
  size_t part;
  int64_t begin;
  int64_t end;
};

// The domains that have the split.
std::vector<std::string> domains_with(const TokenStore& store, const std::string& split) {
  std::vector<std::string> domains = store.domains();
  std::erase_if(domains, [&](const std::string& domain) { return !store.has(domain, split); });
  if (domains.empty()) fail("{}: no domain has a split '{}'", store.folder().string(), split);
  return domains;
}

std::vector<Part> parts_of(const TokenStore& store, const std::string& split,
                           const std::vector<std::string>& domains) {
  std::vector<Part> parts;
  for (const std::string& domain : domains)
    parts.push_back({parts.size(), &store.documents(domain, split)});
  return parts;
}

// Test documents whose hashes fit in one Watch, from `part`, `document` on.
std::vector<Range> fill(Watch& watch, const std::vector<Part>& parts, size_t& part,
                        int64_t& document, int64_t n) {
  DocumentReader reader;
  std::vector<Range> ranges;
  for (; part < parts.size(); ++part, document = 0) {
    const int64_t begin = document;
    const int64_t count = parts[part].documents->size();
    for (; document < count && !watch.full(); ++document) {
      const Text tokens = reader.read(*parts[part].documents, document);
      watch.add(document_hash(tokens));
      for_each_ngram(tokens, n, [&](uint64_t hash) { watch.add(hash); });
    }
    ranges.push_back({part, begin, document});
    if (document < count) break;
  }
  watch.seal();
  return ranges;
}

void search(Watch& watch, const std::vector<Part>& training, int64_t n, Progress* progress) {
  DocumentReader reader;
  for (const Part& part : training)
    for (int64_t i = 0; i < part.documents->size(); ++i) {
      check_interrupt();
      if (progress)
        progress->show(fmt::format("overlap: domain {} of {}, document {} of {}", part.domain + 1,
                                   training.size(), i + 1, part.documents->size()));
      const Text tokens = reader.read(*part.documents, i);
      watch.meet(document_hash(tokens));
      for_each_ngram(tokens, n, [&](uint64_t hash) { watch.meet(hash); });
    }
}

void count(const Watch& watch, const std::vector<Part>& parts, const std::vector<Range>& ranges,
           int64_t n, std::vector<DomainOverlap>& out) {
  DocumentReader reader;
  for (const Range& range : ranges)
    for (int64_t i = range.begin; i < range.end; ++i) {
      const Text tokens = reader.read(*parts[range.part].documents, i);
      DomainOverlap& domain = out[parts[range.part].domain];
      ++domain.documents;
      domain.duplicates += watch.was_met(document_hash(tokens));
      for_each_ngram(tokens, n, [&](uint64_t hash) {
        ++domain.ngrams;
        domain.shared += watch.was_met(hash);
      });
    }
}

}  // namespace

std::vector<DomainOverlap> overlap(const TokenStore& train, const TokenStore& test,
                                   const OverlapOptions& options) {
  if (options.n < 1) fail("n-grams of {} tokens; at least 1 was expected", options.n);
  if (train.tokenizer().sha256 != test.tokenizer().sha256 ||
      train.tokenizer().kind != test.tokenizer().kind)
    fail("{} and {} were written with different tokenizers, so their tokens cannot be compared",
         train.folder().string(), test.folder().string());
  const auto test_domains = domains_with(test, options.test_split);
  const auto train_domains = options.train_domains.empty()
                                 ? domains_with(train, options.train_split)
                                 : options.train_domains;
  const auto tests = parts_of(test, options.test_split, test_domains);
  const auto training = parts_of(train, options.train_split, train_domains);
  std::vector<DomainOverlap> result;
  for (const std::string& domain : test_domains) result.push_back({domain});
  std::optional<Progress> progress;
  if (options.show_progress) progress.emplace();
  size_t part = 0;
  int64_t document = 0;
  while (part < tests.size()) {
    Watch watch;
    const auto ranges = fill(watch, tests, part, document, options.n);
    search(watch, training, options.n, progress ? &*progress : nullptr);
    watch.finish();
    count(watch, tests, ranges, options.n, result);
  }
  return result;
}

std::vector<DomainOverlap> overlap(const TokenStore& store, const OverlapOptions& options) {
  return overlap(store, store, options);
}

}  // namespace assay::data
