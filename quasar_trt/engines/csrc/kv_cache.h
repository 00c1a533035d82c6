// Keys and values of all sequences, in pages of kPage positions that forked sequences share until one of them writes.
#pragma once
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "kernels.h"
#include "page_pool.h"

namespace quasar {

// Throws std::invalid_argument for a handle that is not open and for lengths a sequence does not have.
class KvCache {
 public:
  KvCache(int layers, int kv_heads, int head);

  int open();
  int fork(int sequence);
  void close(int sequence);
  int length(int sequence) const;
  void truncate(int sequence, int length);
  // Makes positions [length, length + count) writable; `advance` then counts them as cached.
  void reserve(int sequence, int count);
  void advance(int sequence, int count);
  // Keeps, behind the first `length` positions, those at length + path[i] (ascending), which move together to length + i; the
  // sequence must not share the pages that they lie in.
  void compact(int sequence, int length, const std::vector<int>& path);
  // Bytes that `reserve` would add: new pages, and the copy of a last page that is shared.
  int64_t growth(int sequence, int count) const;
  // Bytes of a sequence of so many positions that shares nothing.
  int64_t bytes_of(int64_t positions) const { return pages_of(positions) * pool_.page_bytes(); }
  int64_t bytes() const { return pool_.bytes_in_use(); }

  // A page holds, for every layer and key/value head, keys at `keys_at` and values at `values_at` elements from its start,
  // laid out as kernels.h says.
  uint16_t* page(int sequence, int index) const { return at(sequence).pages[static_cast<size_t>(index)].get(); }
  int64_t keys_at(int layer, int kv_head) const { return (static_cast<int64_t>(layer) * kv_heads_ + kv_head) * slot_elements_; }
  int64_t values_at(int layer, int kv_head) const { return keys_at(layer, kv_head) + key_elements_; }

 private:
  using Page = std::shared_ptr<uint16_t>;
  struct Sequence {
    std::vector<Page> pages;
    int length = 0;
  };

  static int64_t pages_of(int64_t positions) { return (positions + kPage - 1) / kPage; }
  void copy(const Sequence& s, int from, int to);
  Sequence& at(int sequence);
  const Sequence& at(int sequence) const;

  const int kv_heads_;
  const int64_t key_elements_, slot_elements_, page_bytes_;  // of a page: keys of a slot, a slot (layer, head), all
  PagePool pool_;
  std::unordered_map<int, Sequence> sequences_;
  int next_ = 0;
};

}  // namespace quasar
