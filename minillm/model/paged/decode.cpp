// Paged attention of single queries on a CPU: each key and value is read once, where it lies in its block.
//
//     for each item (a query and the keys that it sees)         shared among the threads
//         slots    of its keys, by its block table
//         scores   for each key, for each head: q . k           a key of all heads is one piece of memory
//         softmax  for each head, over its row of scores
//         y        for each value, for each head: y + weight v
//
// A query has equally many keys whatever else is in the batch, so its result does not depend on the others.
// Most of the time is waiting for keys. Blocks lie anywhere, which the processor cannot foresee: rows are asked for
// PREFETCHED_BYTES before they are needed.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t PREFETCHED_BYTES = 8192, CACHE_LINE_BYTES = 64;

struct Step {                    // as `_Step` in cpp.py
  const int64_t* tables;         // [rows, table_width], block ids
  const int64_t* work;           // [3, items]: the place of each query, its row of the tables, its keys
  int64_t items, kv_heads, group, head_dim, block_size, table_width;
  int64_t window;                // keys that a query sees at most
  int64_t threads;
};

inline float exponential(float x) {  // of x <= 0, without a branch, so that a loop over it becomes vector instructions
  x = x < -87.0f ? -87.0f : x;
  const float turns = x * 1.44269504f, whole = std::nearbyint(turns), rest = (turns - whole) * 0.693147181f;
  float power = 1.38888889e-3f;  // e^rest by its Taylor series, |rest| <= ln 2 / 2: off by 2e-7 at most
  for (const float factor : {8.33333333e-3f, 4.16666667e-2f, 1.66666667e-1f, 0.5f, 1.0f, 1.0f})
    power = factor + rest * power;
  const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;  // 2^whole
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return power * scale;
}

inline void prefetch(const float* row, int64_t count) {
  for (int64_t i = 0; i < count; i += CACHE_LINE_BYTES / sizeof(float)) __builtin_prefetch(row + i);
}

// q, y: [kv_heads, group, head_dim] of one query; k, v: the pools, from the first of these kv heads on.
// HEAD_DIM: known to the compiler, which unrolls the innermost loops; 0 = it is not.
template <int HEAD_DIM>
void attend(const float* __restrict q, const float* __restrict k, const float* __restrict v, float* __restrict y,
            const Step& step, int64_t kv_heads, const std::vector<int64_t>& slots, std::vector<float>& scores) {
  const int64_t dim = HEAD_DIM ? HEAD_DIM : step.head_dim, group = step.group, stride = step.kv_heads * dim;
  const int64_t keys = slots.size(), last = keys - 1;
  const int64_t ahead = std::max<int64_t>(1, PREFETCHED_BYTES / (stride * sizeof(float)));
  const float scale = 1 / std::sqrt(float(dim));
  scores.resize(kv_heads * group * keys);
  float* __restrict weights = scores.data();

  for (int64_t i = 0; i < keys; i++) {
    prefetch(k + slots[std::min(i + ahead, last)] * stride, kv_heads * dim);
    const float* key = k + slots[i] * stride;
    for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++, key += dim)
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        float score = 0;
        for (int64_t d = 0; d < dim; d++) score += q[head * dim + d] * key[d];
        weights[head * keys + i] = score * scale;
      }
  }

  for (int64_t head = 0; head < kv_heads * group; head++) {
    float* row = weights + head * keys;
    float largest = row[0], sum = 0;
    for (int64_t i = 1; i < keys; i++) largest = row[i] > largest ? row[i] : largest;
    for (int64_t i = 0; i < keys; i++) row[i] = exponential(row[i] - largest);
    for (int64_t i = 0; i < keys; i++) sum += row[i];
    for (int64_t i = 0; i < keys; i++) row[i] /= sum;
  }

  std::fill(y, y + kv_heads * group * dim, 0.0f);
  for (int64_t i = 0; i < keys; i++) {
    prefetch(v + slots[std::min(i + ahead, last)] * stride, kv_heads * dim);
    const float* value = v + slots[i] * stride;
    for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++, value += dim)
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const float weight = weights[head * keys + i];
        for (int64_t d = 0; d < dim; d++) y[head * dim + d] += weight * value[d];
      }
  }
}

}  // namespace

// q, y: [tokens, heads, head_dim]; k, v: [num_blocks, block_size, kv_heads, head_dim]; all contiguous.
extern "C" void paged_decode(const float* q, const float* k, const float* v, float* y, const Step& step) {
  const auto kernel = step.head_dim == 32    ? attend<32>
                      : step.head_dim == 64  ? attend<64>
                      : step.head_dim == 128 ? attend<128>
                                             : attend<0>;
  const int64_t parts = step.items < step.threads ? step.kv_heads : 1, kv_heads = step.kv_heads / parts;
#pragma omp parallel num_threads(step.threads) if (step.threads > 1)
  {
    std::vector<float> scores;
    std::vector<int64_t> slots;
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t item = 0; item < step.items; item++)
      for (int64_t part = 0; part < parts; part++) {
        const int64_t token = step.work[item], end = step.work[2 * step.items + item];
        const int64_t* table = step.tables + step.work[step.items + item] * step.table_width;
        slots.clear();
        for (int64_t place = std::max<int64_t>(0, end - step.window); place < end; place++)
          slots.push_back(table[place / step.block_size] * step.block_size + place % step.block_size);
        const int64_t first = part * kv_heads * step.head_dim;  // of the pools' numbers of one slot
        const int64_t mine = (token * step.kv_heads * step.head_dim + first) * step.group;
        kernel(q + mine, k + first, v + first, y + mine, step, kv_heads, slots, scores);
      }
  }
}
