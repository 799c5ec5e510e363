// Pages of keys and values, and what the kernels of an instruction set do with them. No Python and no torch here.
#pragma once
#include <cstdint>

namespace kvilt {

// How keys and values are stored. int8 and k8v4 have a float32 scale per token and head, for keys and for values; k8v4
// has keys like int8 and values of 4 bits.
enum class KVDtype : int { kFloat32, kFloat16, kBfloat16, kInt8, kK8V4 };

inline bool is_scaled(KVDtype dtype) { return dtype == KVDtype::kInt8 || dtype == KVDtype::kK8V4; }
inline bool has_nibbles(KVDtype dtype) { return dtype == KVDtype::kK8V4; }
// Of a key, and of a value that is not a nibble.
inline int64_t number_bytes(KVDtype dtype) { return dtype == KVDtype::kFloat32 ? 4 : is_scaled(dtype) ? 1 : 2; }
inline int64_t in_lanes(int64_t count) { return (count + 15) / 16 * 16; }

// One layer of one layer group of pages. A page holds all layers of the group one after the other, a layer its KV
// heads, and a head its keys [dim][lanes], its values [page_tokens][value_lanes] and, for bytes, a scale per token of
// each ([lanes], [lanes]): what is read together stands together, and a page is copied in one piece. Of 32 values of 4
// bits the first 16 stand in the low halves of 16 bytes, and the others in their high halves.
struct Pages {
  KVDtype dtype;
  int64_t pages;
  int64_t page_tokens;
  int64_t kv_heads;
  int64_t dim;
  int64_t value_dim;
  char* data;           // this layer in the first page
  int64_t page_bytes;   // from a page to the next
  int64_t lanes;        // page_tokens rounded up to sixteen
  int64_t value_lanes;  // value_dim rounded up to sixteen
  int64_t row_bytes;    // of the values of one token
  int64_t key_bytes, value_bytes, head_bytes;
  bool latent = false;  // latent attention: a key goes on in its value

  Pages(KVDtype dtype, int64_t pages, int64_t page_tokens, int64_t kv_heads, int64_t dim, int64_t value_dim, char* data,
        int64_t page_bytes)
      : dtype(dtype), pages(pages), page_tokens(page_tokens), kv_heads(kv_heads), dim(dim), value_dim(value_dim),
        data(data), page_bytes(page_bytes), lanes(in_lanes(page_tokens)), value_lanes(in_lanes(value_dim)),
        row_bytes(has_nibbles(dtype) ? (value_dim + 31) / 32 * 16 : value_lanes * number_bytes(dtype)),
        key_bytes(dim * lanes * number_bytes(dtype)), value_bytes(page_tokens * row_bytes) {
    const int64_t scales = is_scaled(dtype) ? 2 * lanes * 4 : 0;
    head_bytes = (key_bytes + value_bytes + scales + 63) / 64 * 64;
  }

  // Numbers of a query: those for the key, and with latent KV those for the value behind them.
  int64_t query_dim() const { return latent ? dim + value_dim : dim; }

  char* keys(int64_t page, int64_t head) const { return data + page * page_bytes + head * head_bytes; }
  char* values(int64_t page, int64_t head) const { return keys(page, head) + key_bytes; }
  // Bytes of a token's values in canonical order.
  int64_t canonical_bytes() const { return has_nibbles(dtype) ? value_dim / 2 : value_dim * number_bytes(dtype); }
  float* key_scales(int64_t page, int64_t head) const {
    return reinterpret_cast<float*>(keys(page, head) + key_bytes + value_bytes);
  }
  float* value_scales(int64_t page, int64_t head) const { return key_scales(page, head) + lanes; }
};

// Keys that are weighed together. Tiles begin at position 0 and have a fixed number of pages; each is softmaxed by
// itself and then merged into what came before, in ascending order, so that it does not matter which thread computes
// it.
constexpr int64_t kTileLanes = 128;
inline int64_t tile_pages(const Pages& pages) { return kTileLanes / pages.lanes; }
inline int64_t tile_tokens(const Pages& pages) { return tile_pages(pages) * pages.page_tokens; }

struct Mask {
  float scale;
  int64_t window;  // 0: all
  float soft_cap;  // 0: none
  bool chunked;    // a query sees keys from the last multiple of the window on

  int64_t first_seen(int64_t position) const {
    if (chunked) return position / window * window;
    return window && position >= window ? position - window + 1 : 0;
  }
};

// Queries of one row and one KV head.
struct Queries {
  const float* query;  // of the first token's first head
  int64_t stride;      // floats from a token to the next
  int64_t tokens;
  int64_t group;             // query heads
  const int64_t* positions;  // [tokens]
  const int64_t* table;
  int64_t kv_head;
  const float* sinks;  // [group]: a logit of each head that joins its softmax and has no value; null: none

  int64_t rows() const { return tokens * group; }
};

// The partial attention of rows of queries over some tiles: sums of values [rows][value_lanes], then the largest score
// [rows], then the sum of the weights [rows], both relative to that score. A row that saw nothing has a largest score
// of -inf.
inline int64_t partial_floats(int64_t rows, const Pages& pages) { return rows * (pages.value_lanes + 2); }

// Cosines and sines of tokens, [tokens][pairs].
struct Rotation {
  const float* cos;
  const float* sin;
  int64_t pairs;
  bool interleaved;
};

struct PageKernels {
  // One token's heads; dims past the pairs are copied.
  void (*rotate)(const float* x, const Rotation& rotation, int64_t token, int64_t heads, int64_t dim, float* out);
  // One token's keys and values into a slot. `rotation` rotates the keys on their way, unless it is null.
  void (*write_token)(const Pages& pages, int64_t slot, const float* keys, const float* values,
                      const Rotation* rotation, int64_t token, float* scratch);
  // One token's numbers plus a weighted sum of changes: out[i] = kept[i] + sum of weights[r] * changes[r][i].
  void (*interpolate)(KVDtype dtype, const void* kept, int64_t count, const float* changes, const float* weights,
                      int64_t rows, float* out);
  // Tiles [first, last) for a block of queries: merged into one record, or each into a record of its own.
  void (*attention_tiles)(const Pages& pages, const Queries& queries, const Mask& mask, int64_t first, int64_t last,
                          bool apart, float* records, float* scratch);
  int64_t (*scratch_floats)(const Pages& pages, int64_t rows);
  // Adds a record of later tiles to one of earlier tiles.
  void (*merge)(const Pages& pages, int64_t rows, const float* later, float* record);
  // The weighted means, to out [token][stride] with the heads of the group side by side.
  void (*write_means)(const Pages& pages, const Queries& queries, const float* record, float* out, int64_t stride);
};

// What AVX-512 BF16 replaces of another instruction set's kernels.
struct AttentionKernels {
  decltype(PageKernels::attention_tiles) attention_tiles;
  decltype(PageKernels::scratch_floats) scratch_floats;
};

}  // namespace kvilt
