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

void KvCache::compact(int sequence, int length, const std::vector<int>& path) {
  const Sequence& s = at(sequence);
  const int count = static_cast<int>(path.size());
  for (int i = 0; i < count; ++i)
    if (path[i] < (i ? path[i - 1] + 1 : 0) || length + path[i] >= s.length)
      throw std::invalid_argument("cannot keep position " + std::to_string(length) + " + " + std::to_string(path[i]) +
                                  " of sequence " + std::to_string(sequence));
  for (int i = 0; i < count; ++i)
    if (path[i] != i) copy(s, length + path[i], length + i);
  truncate(sequence, length + count);
}

// One position of all layers and heads.
void KvCache::copy(const Sequence& s, int from, int to) {
  const int head = static_cast<int>(key_elements_ / kPage), wide = padded(head, 32);
  const uint16_t* source = s.pages[static_cast<size_t>(from / kPage)].get();
  uint16_t* target = s.pages[static_cast<size_t>(to / kPage)].get();
  from %= kPage;
  to %= kPage;
  const int64_t end = page_bytes_ / static_cast<int64_t>(sizeof(uint16_t));
  for (int64_t keys = 0; keys < end; keys += slot_elements_) {
    const int64_t key_from = keys + from / 16 * 16 * head + from % 16 * 2, key_to = keys + to / 16 * 16 * head + to % 16 * 2;
    for (int d = 0; d < head / 2 * 32; d += 32) std::memcpy(target + key_to + d, source + key_from + d, 2 * sizeof(uint16_t));
    const int64_t values = keys + key_elements_;
    for (int d = 0; d < wide; d += 32)
      std::memcpy(target + values + d * kPage + to * 32, source + values + d * kPage + from * 32, 32 * sizeof(uint16_t));
  }
}

}  // namespace quasar
