// Who computes which attention in a pass.
#pragma once
#include <cstdint>
#include <vector>

namespace quasar {

// A sequence in a pass: `rows` rows at the positions from `position` on.
struct AttentionPart {
  int rows, position;
};

// Chunks [begin, end) of some queries that share a key/value head of one part: those from `first` on, in order of row and head.
// A task all of whose `chunks` lie with one thread has owner -1; others are joined where the owner, who has the first, keeps them.
struct AttentionPiece {
  int part, kv_head, first, count, chunks, begin, end, owner;
};

// The pieces of each thread (pieces.size() threads), about equally much work for each.
void plan_attention(const std::vector<AttentionPart>& parts, int kv_heads, int group, std::vector<std::vector<AttentionPiece>>& pieces);

}  // namespace quasar
