#include "page_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace quasar {
namespace {

constexpr int64_t kHugePage = 2 << 20, kSlab = 32 << 20;

}  // namespace

void PagePool::Free::operator()(char* p) const { std::free(p); }

std::shared_ptr<uint16_t> PagePool::take() {
  if (free_.empty()) {
    const int64_t pages = std::max<int64_t>(1, kSlab / page_bytes_);
    const size_t bytes = static_cast<size_t>((pages * page_bytes_ + kHugePage - 1) / kHugePage * kHugePage);
    std::unique_ptr<char, Free> slab(static_cast<char*>(std::aligned_alloc(kHugePage, bytes)));
    if (!slab) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    madvise(slab.get(), bytes, MADV_HUGEPAGE);  // where the system has none, small pages serve
#endif
    for (int64_t i = pages; i-- > 0;) free_.push_back(reinterpret_cast<uint16_t*>(slab.get() + i * page_bytes_));
    slabs_.push_back(std::move(slab));
  }
  uint16_t* page = free_.back();
  free_.pop_back();
  ++in_use_;
  std::shared_ptr<uint16_t> owner(page, [this](uint16_t* p) { give_back(p); });
  std::memset(page, 0, static_cast<size_t>(page_bytes_));
  return owner;
}

void PagePool::give_back(uint16_t* page) {
  free_.push_back(page);
  if (--in_use_ > 0) return;
  free_.clear();
  slabs_.clear();
}

}  // namespace quasar
