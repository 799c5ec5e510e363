// The part of the Python module that samples. Once a step: it takes arrays.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>

#include "module.h"

namespace kvilt {
namespace {

using Logits = Array<const float, 2>;  // [rows][vocabulary]

// Rows that exist, of a vocabulary whose ids fit 32 bits.
void check_rows(const Logits& logits, const std::vector<int64_t>& rows) {
  const int64_t n = extent(logits, 1);
  check(n >= 1 && n <= std::numeric_limits<int32_t>::max() - kLanes, "this is no vocabulary");
  for (int64_t row : rows)
    if (row < 0 || row >= extent(logits, 0)) throw std::out_of_range("there is no such row of logits");
}

void check_params(const DrawParams& one) {
  const bool positive = one.temperature > 0 && std::isfinite(one.temperature);
  const bool shares =
      one.top_p > 0 && one.top_p <= 1 && one.min_p >= 0 && one.min_p <= 1 && one.typical_p > 0 && one.typical_p <= 1;
  check(positive && one.top_k >= 0 && shares, "these are not the params of a draw");
}

void argmax_with_values(KernelRunner& r, const Logits& logits, const Array<int64_t, 1>& ids,
                        const Array<float, 1>& values) {
  check_rows(logits, {});
  const bool fits = ids.shape(0) == logits.shape(0) && values.shape(0) == logits.shape(0);
  check(fits, "one id and one value belong to each row");
  r.argmax_with_values(logits.data(), extent(logits, 0), extent(logits, 1), ids.data(), values.data());
}

void draw(KernelRunner& r, const Logits& logits, const std::vector<int64_t>& rows, const std::vector<int64_t>& keys,
          const std::vector<double>& temperatures, const std::vector<int64_t>& top_k, const std::vector<double>& top_p,
          const std::vector<double>& min_p, const std::vector<double>& typical_p, const Array<int64_t, 1>& out,
          const std::optional<Array<bool, 2>>& kept) {
  check_rows(logits, rows);
  for (size_t size : {keys.size(), temperatures.size(), top_k.size(), top_p.size(), min_p.size(), typical_p.size(),
                      out.shape(0), kept ? kept->shape(0) : rows.size()})
    check(size == rows.size(), "each row draws by its own params");
  check(!kept || kept->shape(1) == logits.shape(1), "what is kept has a place for each token");
  std::vector<DrawParams> draws;
  for (size_t i = 0; i < rows.size(); ++i) {
    draws.push_back({rows[i], uint64_t(keys[i]), float(temperatures[i]), top_k[i], top_p[i], min_p[i], typical_p[i]});
    check_params(draws.back());
  }
  uint8_t* kept_at = kept ? reinterpret_cast<uint8_t*>(kept->data()) : nullptr;
  r.draw(logits.data(), extent(logits, 1), draws, out.data(), kept_at);
}

void logprobs(KernelRunner& r, const Logits& logits, const std::vector<int64_t>& rows,
              const std::vector<int64_t>& tokens, const Array<float, 1>& found, const Array<int64_t, 1>& ranks,
              const Array<int64_t, 2>& top_ids, const Array<float, 2>& top_logprobs) {
  check_rows(logits, rows);
  const int64_t n = extent(logits, 1), top = extent(top_ids, 1);
  check(tokens.size() == rows.size() && top <= n, "one token belongs to each row");
  for (size_t size : {found.shape(0), ranks.shape(0), top_ids.shape(0), top_logprobs.shape(0)})
    check(size == rows.size(), "one result belongs to each row");
  check(top_logprobs.shape(1) == top_ids.shape(1), "one log-probability belongs to each of the likeliest");
  for (int64_t token : tokens)
    if (token < 0 || token >= n) throw std::out_of_range("a token id is outside the vocabulary");
  const LogprobsOut out{found.data(), ranks.data(), top_ids.data(), top_logprobs.data()};
  r.logprobs(logits.data(), n, rows, tokens, top, out);
}

}  // namespace

void bind_reduce(nb::class_<KernelRunner>& runner) {
  const auto kept = nb::arg().none().noconvert();
  runner.def("argmax_with_values", &argmax_with_values, Release(), array(), array(), array())
      .def("draw", &draw, Release(), array(), plain(), plain(), plain(), plain(), plain(), plain(), plain(), array(),
           kept)
      .def("logprobs", &logprobs, Release(), array(), plain(), plain(), array(), array(), array(), array());
}

}  // namespace kvilt
