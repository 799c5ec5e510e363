// The part of the Python module that packs weights. Outside of steps: it takes arrays.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "weight.h"

namespace kvilt {
namespace {

int64_t packed_bytes(WeightKind kind, int64_t outputs, int64_t inputs) {
  return (outputs + kTile - 1) / kTile * tile_bytes(kind, inputs);
}

std::optional<std::pair<WeightKind, int64_t>> packed_size(const std::string& format, int64_t outputs, int64_t inputs) {
  const Packing* packing = find_packing(format);
  if (!packing) return std::nullopt;
  return std::pair{packing->kind, packed_bytes(packing->kind, outputs, inputs)};
}

void pack(KernelRunner& r, const std::string& format, const Array<const uint8_t, 2>& source, int64_t inputs,
          const Array<uint8_t, 1>& out) {
  const Packing* packing = find_packing(format);
  const int64_t outputs = extent(source, 0), row_bytes = extent(source, 1);
  if (!packing || inputs % packing->elements || row_bytes != inputs / packing->elements * packing->bytes ||
      extent(out, 0) != packed_bytes(packing->kind, outputs, inputs))
    throw std::invalid_argument("these are not the bytes of a weight in " + format);
  r.pack(*packing, source.data(), row_bytes, outputs, inputs, out.data());
}

}  // namespace

void bind_weights(nb::module_& m, nb::class_<KernelRunner>& runner) {
  m.def("packed_size", &packed_size);
  nb::class_<Weight>(m, "Weight")
      .def(nb::init<WeightKind, int64_t, int64_t, const Array<const uint8_t, 1>&>(), plain(), plain(), plain(),
           array());
  runner.def("pack", &pack, Release(), plain(), array(), plain(), array());
}

}  // namespace kvilt
