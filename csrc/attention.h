// Operations on pages over whole tensors: checks, scratch memory and threads. Kernels see one token or one block.
#pragma once
#include <cstdint>
#include <vector>

#include "pages.h"
#include "thread_pool.h"

namespace kvilt {

struct RotateArgs {
  const float* x;  // [tokens][heads][dim]
  Rotation rotation;
  int64_t tokens, heads, dim;
  float* out;  // may be x
};

struct WriteArgs {
  Pages pages;
  const int64_t* slots;  // [tokens]
  int64_t tokens;
  const float* keys;    // [tokens][kv_heads][dim]
  const float* values;  // [tokens][kv_heads][value_dim]
  Rotation rotation;    // rotates the keys on their way; no cosines: they stay as they are
};

// Tokens of a document that take over a share of the change of its anchors, which were recomputed.
struct InterpolateArgs {
  Pages pages;
  const int64_t* slots;  // [tokens]
  int64_t tokens;
  KVDtype dtype;                // of the document's KV: floats of some width
  int64_t document;             // tokens
  const void* keys;             // [document][kv_heads][dim]
  const void* values;           // [document][kv_heads][value_dim]
  const int64_t* interpolated;  // [tokens]: their places in the document
  const int64_t* anchors;       // [count], likewise
  int64_t count;
  const float* weights;     // [tokens][count]
  const float* new_keys;    // [count][kv_heads][dim]
  const float* new_values;  // [count][kv_heads][value_dim]
  Rotation rotation;
};

struct AttentionArgs {
  const float* query;  // [tokens][heads][query_dim]
  int64_t heads;
  Pages pages;
  const int64_t* tables;  // [rows][width]
  int64_t width;
  std::vector<int64_t> starts;  // rows + 1: the tokens of row r are [starts[r], starts[r + 1])
  const int64_t* positions;     // [tokens]
  Mask mask;
  const float* sinks;  // [heads], null: none
  float* out;          // [tokens][heads][value_dim]

  int64_t rows() const { return int64_t(starts.size()) - 1; }
  int64_t group() const { return heads / pages.kv_heads; }
};

// Canonical bytes of some slots of one layer, in or out of the pages: [tokens][kv_heads][dim].
struct SlotsArgs {
  Pages pages;
  const int64_t* slots;
  int64_t tokens;
  void* keys;
  void* values;
  float* key_scales;    // [tokens][kv_heads]
  float* value_scales;  // [tokens][kv_heads]
};

// Lets the system back memory with large frames, where it has them: a step reads from all over the pool.
void use_huge_pages(void* data, int64_t bytes);

// Throws unless every slot is in a page.
void check_slots(const Pages& pages, const int64_t* slots, int64_t tokens);

class Attention {
 public:
  Attention(ThreadPool& pool, const PageKernels& kernels);

  void rotate(const RotateArgs& args);
  void write(const WriteArgs& args);
  void interpolate(const InterpolateArgs& args);
  void attention(const AttentionArgs& args);
  // All layers of the slots at once.
  void read_slots(const std::vector<SlotsArgs>& layers);
  void write_slots(const std::vector<SlotsArgs>& layers);

 private:
  // A block of one row's queries and one KV head.
  struct Unit {
    int64_t row, first, tokens, head;
    int64_t tile, tiles;  // [tile, tile + tiles)
    int64_t records;      // where the records of its tiles are, if it is cut into several items
    int64_t items, left;  // how many items it is cut into, and how many of them are not done
  };
  // Some tiles of a unit: what a thread does at a time.
  struct Item {
    int64_t unit, tile, tiles;
  };

  // Calls write(token, scratch) for all tokens, those of a page by one thread.
  template <typename Write>
  void write_pages(const Pages& pages, const int64_t* slots, int64_t tokens, Write write);

  void check(const AttentionArgs& args) const;
  void plan(const AttentionArgs& args);
  void cut(const AttentionArgs& args, int64_t piece);
  void deal();
  void attention_item(const AttentionArgs& args, const Item& item, int worker);

  ThreadPool& pool_;
  const PageKernels& kernels_;
  // Kept from call to call and never made smaller, so that a step like the one before allocates nothing.
  std::vector<std::vector<float>> scratch_;  // one per thread
  std::vector<float> records_, changes_;
  std::vector<Unit> units_;
  std::vector<Item> items_, dealt_;
  std::vector<int64_t> page_starts_;
};

}  // namespace kvilt
