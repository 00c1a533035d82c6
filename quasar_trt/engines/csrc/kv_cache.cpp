#include "kv_cache.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace quasar {

KvCache::KvCache(int layers, int kv_heads, int head)
    : kv_heads_(kv_heads),
      key_elements_(static_cast<int64_t>(kPage) * head),
      slot_elements_(key_elements_ + static_cast<int64_t>(kPage) * padded(head, 32)),
      page_bytes_(slot_elements_ * layers * kv_heads * static_cast<int64_t>(sizeof(uint16_t))),
      pool_(page_bytes_) {}

KvCache::Sequence& KvCache::at(int sequence) {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) throw std::invalid_argument("sequence " + std::to_string(sequence) + " is not open");
  return found->second;
}

const KvCache::Sequence& KvCache::at(int sequence) const { return const_cast<KvCache*>(this)->at(sequence); }

int KvCache::open() {
  sequences_.emplace(next_, Sequence{});
  return next_++;
}

int KvCache::fork(int sequence) {
  sequences_.emplace(next_, Sequence(at(sequence)));
  return next_++;
}

void KvCache::close(int sequence) {
  at(sequence);
  sequences_.erase(sequence);
}

int KvCache::length(int sequence) const { return at(sequence).length; }

void KvCache::truncate(int sequence, int length) {
  Sequence& s = at(sequence);
  if (length < 0 || length > s.length)
    throw std::invalid_argument("cannot truncate sequence " + std::to_string(sequence) + " of " + std::to_string(s.length) +
                                " cached tokens to " + std::to_string(length));
  s.length = length;
  s.pages.resize(static_cast<size_t>(pages_of(length)));
}

void KvCache::reserve(int sequence, int count) {
  Sequence& s = at(sequence);
  const int last = (s.length + count - 1) / kPage;
  for (int page = s.length / kPage; page <= last; ++page) {
    if (page == static_cast<int>(s.pages.size())) {
      s.pages.push_back(pool_.take());
    } else if (s.pages[page].use_count() > 1) {
      Page copy = pool_.take();
      std::memcpy(copy.get(), s.pages[page].get(), static_cast<size_t>(page_bytes_));
      s.pages[page] = std::move(copy);
    }
  }
}

int64_t KvCache::growth(int sequence, int count) const {
  const Sequence& s = at(sequence);
  int64_t pages = pages_of(s.length + count) - static_cast<int64_t>(s.pages.size());
  if (count > 0 && s.length % kPage != 0 && s.pages[static_cast<size_t>(s.length / kPage)].use_count() > 1) ++pages;
  return std::max<int64_t>(pages, 0) * pool_.page_bytes();
}

void KvCache::advance(int sequence, int count) { at(sequence).length += count; }

}  // namespace quasar
