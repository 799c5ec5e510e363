// The part of the Python module that samples.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>
#include <stdexcept>

#include "module.h"

namespace kvilt {
namespace {

// Rows that are there, of a vocabulary whose ids fit 32 bits.
void check_rows(const std::vector<int64_t>& rows, int64_t count, int64_t n) {
  if (n < 1 || n > std::numeric_limits<int32_t>::max() - kLanes) throw std::invalid_argument("this is no vocabulary");
  for (int64_t row : rows)
    if (row < 0 || row >= count) throw std::out_of_range("there is no such row of logits");
}

void check_choice(const Choice& one) {
  const bool positive = one.temperature > 0 && std::isfinite(one.temperature);
  if (!positive || one.top_k < 0 || !(one.top_p > 0 && one.top_p <= 1) || !(one.min_p >= 0 && one.min_p <= 1) ||
      !(one.typical_p > 0 && one.typical_p <= 1))
    throw std::invalid_argument("these are not the params of a draw");
}

}  // namespace

void bind_reduce(nb::class_<Engine>& engine) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  engine
      .def("peaks", [](Engine& e, Address x, int64_t count, int64_t n, Address ids, Address values) {
        check_rows({}, count, n);
        e.peaks(at<const float>(x), count, n, at<int64_t>(ids), at<float>(values));
      }, Release())
      .def("draw", [](Engine& e, Address x, int64_t count, int64_t n, const std::vector<int64_t>& rows,
                      const std::vector<int64_t>& keys, const std::vector<double>& temperatures,
                      const std::vector<int64_t>& top_k, const std::vector<double>& top_p,
                      const std::vector<double>& min_p, const std::vector<double>& typical_p, Address out, Address kept) {
        check_rows(rows, count, n);
        for (size_t size : {keys.size(), temperatures.size(), top_k.size(), top_p.size(), min_p.size(), typical_p.size()})
          if (size != rows.size()) throw std::invalid_argument("each row draws by its own params");
        std::vector<Choice> choices;
        for (size_t i = 0; i < rows.size(); ++i) {
          choices.push_back({rows[i], uint64_t(keys[i]), float(temperatures[i]), top_k[i], top_p[i], min_p[i], typical_p[i]});
          check_choice(choices.back());
        }
        e.draw(at<const float>(x), n, choices, at<int64_t>(out), at<uint8_t>(kept));
      }, Release())
      .def("logprobs", [](Engine& e, Address x, int64_t count, int64_t n, const std::vector<int64_t>& rows,
                          const std::vector<int64_t>& tokens, int64_t top, Address logprobs, Address ranks,
                          Address top_ids, Address top_logprobs) {
        check_rows(rows, count, n);
        if (tokens.size() != rows.size() || top < 0 || top > n) throw std::invalid_argument("one token belongs to each row");
        for (int64_t token : tokens)
          if (token < 0 || token >= n) throw std::out_of_range("a token id is outside the vocabulary");
        const LogprobsOut out{at<float>(logprobs), at<int64_t>(ranks), at<int64_t>(top_ids), at<float>(top_logprobs)};
        e.logprobs(at<const float>(x), n, rows, tokens, top, out);
      }, Release());
}

}  // namespace kvilt
