#pragma once
// Records of one study differ in few values, and most of these are lists of numbers. So a record is
// written as its difference to a shared value, in four steps that lose nothing:
//
//   columns      lists of objects with equal keys, objects of such objects and lists of lists of
//                equal length become one list per key: {"": names or length, key: values, …}
//   differences  what is equal to the shared value is left out; null: a key that it alone has
//   numbers      a list of numbers with d <= 9 decimals becomes the text MdV: integers in units of
//                10^-d. M "=": their mean difference to the shared numbers, then the differences
//                less this mean. M "~": the first number, then differences of neighbours. M "+":
//                the first number, the difference of all neighbours and the length
//   lines        a list of texts becomes its new lines and [first, count] of the shared ones
//
// V is base64 VLQ, as in source maps: 5 bits per digit, the lowest ones first, bit 6 says that more
// follow, and the lowest bit of a number is its sign. {"=": x} is x itself, and {"*": […]} a list
// whose elements are written as differences.
#include <nlohmann/json.hpp>

namespace assay::study {

nlohmann::json compact(const nlohmann::json& value, const nlohmann::json& shared);
// BadInput when `text` was not made with this shared value.
nlohmann::json expand(const nlohmann::json& text, const nlohmann::json& shared);

}  // namespace assay::study
