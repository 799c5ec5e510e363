// A packed weight as Python holds it: the bytes, kept alive, and what they mean.
#pragma once
#include "module.h"
#include "packed.h"

namespace kvilt {

struct Weight {
  Array<const uint8_t, 1> data;
  PackedWeight packed;

  Weight(WeightKind kind, int64_t outputs, int64_t inputs, const Array<const uint8_t, 1>& bytes)
      : data(bytes), packed{kind, outputs, inputs, bytes.data()} {
    const bool fits = outputs > 0 && inputs > 0 && extent(bytes, 0) == packed.tiles() * tile_bytes(kind, inputs);
    check(fits, "these are not the bytes of a packed weight");
  }
};

}  // namespace kvilt
