// How fast the machine reads memory: the roof over every kernel that reads weights once.
#pragma once
#include <cstdint>

namespace quasar {

// The sum modulo 2^64 of words [begin, end), which proves that all of them were read.
uint64_t sum_words(const uint64_t* words, int64_t begin, int64_t end);

}  // namespace quasar
