#include "train/pieces.h"

#include <algorithm>
#include <utility>

namespace assay::train {
namespace {

constexpr int64_t kBucketElements = int64_t{16} << 20;  // at least, in a large model
constexpr int64_t kBuckets = 16;                        // about, in a small model
// A larger parameter has a bucket of its own, so that its gradient is sent without a copy.
constexpr int64_t kOwnBucket = int64_t{4} << 20;
// Every part begins where a vectorized load may: norms of aligned and of other tensors are summed
// in different orders.
constexpr int64_t kAlignment = 64;

int64_t round_up(int64_t elements, int64_t multiple) {
  return (elements + multiple - 1) / multiple * multiple;
}

std::vector<Pieces::Bucket> make_buckets(const std::vector<at::Tensor>& parameters, int64_t pieces,
                                         const std::vector<bool>& rounded) {
  int64_t all = 0;
  for (const at::Tensor& parameter : parameters) all += parameter.numel();
  const int64_t least = pieces == 1 ? INT64_MAX : std::min(kBucketElements, all / kBuckets);
  std::vector<Pieces::Bucket> buckets;
  Pieces::Bucket exact;
  Pieces::Bucket narrow{.rounded = true};
  const auto add = [](Pieces::Bucket& bucket, size_t i, int64_t elements) {
    bucket.parameters.push_back(i);
    bucket.places.push_back(bucket.size);
    bucket.size += round_up(std::max<int64_t>(elements, 1), kAlignment);
  };
  const auto close = [&](Pieces::Bucket& bucket) {
    bucket.size = round_up(bucket.size, pieces * kAlignment);
    if (bucket.size > 0)
      buckets.push_back(std::exchange(bucket, Pieces::Bucket{.rounded = bucket.rounded}));
  };
  for (size_t i = parameters.size(); i-- > 0;) {
    const int64_t elements = parameters[i].numel();
    if (i == 0 && pieces > 1) {  // the gradient of the embedding comes last
      close(narrow);
      close(exact);
    }
    Pieces::Bucket& open = !rounded.empty() && rounded[i] ? narrow : exact;
    Pieces::Bucket alone{.rounded = open.rounded};
    const bool is_large = pieces > 1 && elements >= kOwnBucket;
    add(is_large ? alone : open, i, elements);
    close(alone);
    if (open.size >= least) close(open);
  }
  close(narrow);
  close(exact);
  return buckets;
}

}  // namespace

Pieces::Pieces(const std::vector<at::Tensor>& parameters, int64_t pieces,
               const std::vector<bool>& rounded)
    : count(pieces), buckets(make_buckets(parameters, pieces, rounded)), parts(parameters.size()) {
  for (size_t b = 0; b < buckets.size(); ++b) {
    const int64_t length = buckets[b].size / pieces;
    for (size_t j = 0; j < buckets[b].parameters.size(); ++j) {
      const size_t i = buckets[b].parameters[j];
      const int64_t first = buckets[b].places[j];
      const int64_t end = first + parameters[i].numel();
      for (int64_t place = first; parts[i].empty() || place < end;) {
        const int64_t piece = place / length;
        const int64_t size = std::min(end, (piece + 1) * length) - place;
        parts[i].push_back({i, b, piece, place - first, size, place});
        place += size;
      }
    }
  }
}

}  // namespace assay::train
