#include "attention_plan.h"

#include <algorithm>

#include "kernels.h"
#include "thread_pool.h"

namespace quasar {
namespace {

constexpr int kFewTasks = 4;  // per thread; of more, one too many does not matter

}  // namespace

void plan_attention(const std::vector<AttentionPart>& parts, int kv_heads, int group, std::vector<std::vector<AttentionPiece>>& pieces) {
  // Tasks in order, tiles of queries innermost: neighbours find the keys and values of their head in the cache.
  const int threads = static_cast<int>(pieces.size()), heads = static_cast<int>(parts.size()) * kv_heads;
  const int even = heads % threads && heads < kFewTasks * threads ? threads : 1;  // tiles, so that threads get equally many tasks
  std::vector<AttentionPiece> tasks;
  int64_t total = 0;  // of chunks of queries
  for (int p = 0; p < static_cast<int>(parts.size()); ++p) {
    const int queries = parts[p].rows * group, tiles = std::max((queries + kMaxQueries - 1) / kMaxQueries, std::min(even, queries));
    for (int kv_head = 0; kv_head < kv_heads; ++kv_head)
      for (int tile = 0; tile < tiles; ++tile) {
        const auto [first, last] = share(queries, tile, tiles);
        const int chunks = (parts[p].position + (last - 1) / group) / kChunk + 1;
        tasks.push_back({p, kv_head, first, last - first, chunks, 0, chunks, -1});
        total += static_cast<int64_t>(chunks) * (last - first);
      }
  }

  for (auto& of_thread : pieces) of_thread.clear();
  int thread = 0;
  int64_t at = 0;  // where the task starts
  for (AttentionPiece piece : tasks) {
    while (true) {
      const int64_t border = total * (thread + 1) / threads - at;  // of the thread, from the start of the task
      piece.end = static_cast<int>(std::min<int64_t>(piece.chunks, (border + piece.count - 1) / piece.count));
      if (piece.begin < piece.end) {
        if (piece.begin == 0 && piece.end < piece.chunks) piece.owner = thread;
        pieces[thread].push_back(piece);
        piece.begin = piece.end;
      }
      if (piece.end == piece.chunks) break;
      ++thread;
    }
    at += static_cast<int64_t>(piece.chunks) * piece.count;
  }
}

}  // namespace quasar
