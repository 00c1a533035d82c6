// Memory for the pages of the KV cache.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace quasar {

// Pages of one size, cut from slabs of memory for which the system may use huge pages: a step reads a few kilobytes here and
// there in each page, and looking up their addresses would cost as much as reading them.
class PagePool {
 public:
  explicit PagePool(int64_t page_bytes) : page_bytes_((page_bytes + 63) / 64 * 64) {}

  // A zeroed, 64-byte aligned page that comes back with its last owner, who must not outlive the pool. Slabs go back to the
  // system when no page is in use.
  std::shared_ptr<uint16_t> take();
  int64_t page_bytes() const { return page_bytes_; }
  int64_t bytes_in_use() const { return in_use_ * page_bytes_; }

 private:
  void give_back(uint16_t* page);

  struct Free { void operator()(char* p) const; };
  const int64_t page_bytes_;
  std::vector<std::unique_ptr<char, Free>> slabs_;
  std::vector<uint16_t*> free_;
  int64_t in_use_ = 0;
};

}  // namespace quasar
