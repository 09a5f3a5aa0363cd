// fusegen 0.1.0   chain d3d0f8643367   signature forward+backward: bias bfloat16, d_bias bfloat16, d_out bfloat16, d_residual bfloat16, d_weight bfloat16, d_x bfloat16, new_running_mean bfloat16, new_running_var bfloat16, out bfloat16, residual bfloat16, running_mean bfloat16, running_var bfloat16, saved_mean float32, saved_variance float32, weight bfloat16, x bfloat16; 32-bit offsets
//   batch_norm(running_mean, running_var, weight, bias, training=True) | add(residual) | relu
#include <cstdint>
#include <cuda_runtime.h>

using Index = uint32_t;

// A size with what it takes to divide by it: two instructions instead of twenty, for dividends below 2^31.
struct Size {
  uint32_t value, multiplier, shift;
};

static Size size_of(int64_t value) {
  uint32_t shift = 0;
  while ((uint64_t{1} << shift) < static_cast<uint64_t>(value)) ++shift;
  const uint64_t excess = (uint64_t{1} << 32) * ((uint64_t{1} << shift) - value);
  return {static_cast<uint32_t>(value), static_cast<uint32_t>(excess / value + 1), shift};
}

namespace {

[[maybe_unused]] __device__ __forceinline__ Index divide(Index n, Size d) { return (__umulhi(n,
    d.multiplier) + n) >> d.shift; }

template <typename Stored>
__device__ __forceinline__ Stored widen(Stored x) {
  return x;
}

template <typename Stored, typename Value>
__device__ __forceinline__ Stored narrow(Value x) {
  return static_cast<Stored>(x);
}

// The upper half of a float.
struct bfloat16 {
  uint16_t bits;
};

[[maybe_unused]] __device__ __forceinline__ float widen(bfloat16 x) {
#if __CUDA_ARCH__ >= 900
  float wide;
  asm("cvt.f32.bf16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#else
  return __uint_as_float(uint32_t{x.bits} << 16);
#endif
}

template <>
[[maybe_unused]] __device__ __forceinline__ bfloat16 narrow<bfloat16, float>(float x) {
#if __CUDA_ARCH__ >= 800
  bfloat16 stored;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(stored.bits) : "f"(x));
  return stored;
#else
  // To nearest, ties to even; NaN is all ones but for the sign.
  const uint32_t bits = __float_as_uint(x);
  return {static_cast<uint16_t>(x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
#endif
}

// NaN in either argument is the result, as in torch.
template <typename Value>
__device__ __forceinline__ Value maximum(Value a, Value b) {
  return a != a || a > b ? a : b;
}
#if __CUDA_ARCH__ >= 800
template <>
[[maybe_unused]] __device__ __forceinline__ float maximum<float>(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
#endif

// Within 2 ulp, for all operands.
__device__ __forceinline__ float narrow_div(float a, float b) {
  float result;
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// A quotient of what is small beside the mean.
[[maybe_unused]] __device__ __forceinline__ float ratio(float a, float b) { return b > 0 ? __fdividef(a,
    b) : 0.0f; }
[[maybe_unused]] __device__ __forceinline__ double ratio(double a, double b) { return b > 0 ? a / b : 0.0; }

// N neighbours, moved by one access.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

template <typename T, int N>
__device__ __forceinline__ auto widen(const Pack<T, N>& pack, int lane) {
  return widen(pack.at[lane]);
}
// Out of pairs, by one instruction each; to take the upper half alone first would be another.
template <int N>
__device__ __forceinline__ float widen(const Pack<bfloat16, N>& pack, int lane) {
  if constexpr (N == 1) {
    return widen(pack.at[lane]);
  } else {
    const unsigned int pair = reinterpret_cast<const unsigned int*>(pack.at)[lane / 2];
    return __uint_as_float(lane % 2 ? pair & 0xffff0000u : pair << 16);
  }
}

template <int Bytes>
struct Bits;
template <>
struct Bits<16> {
  using type = uint4;
};
template <>
struct Bits<8> {
  using type = uint2;
};
template <>
struct Bits<4> {
  using type = unsigned int;
};
template <>
struct Bits<2> {
  using type = unsigned short;
};
template <>
struct Bits<1> {
  using type = unsigned char;
};

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
  using Whole = typename Bits<sizeof(T) * N>::type;
  Pack<T, N> pack;
  *reinterpret_cast<Whole*>(&pack) = *reinterpret_cast<const Whole*>(from);
  return pack;
}

// A pack on its way into shared memory, where the thread that sent it will read it.
template <int N, typename T>
__device__ __forceinline__ void send(Pack<T, N>* to, const T* from) {
  const auto target = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (sizeof(T) * N == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(from), "n"(sizeof(T) * N) : "memory");
  }
}

__device__ __forceinline__ void send_off() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until no more than so many of the latest are on their way.
template <int N>
__device__ __forceinline__ void wait_for_sent() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

template <int N, typename T>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
  using Whole = typename Bits<sizeof(T) * N>::type;
  *reinterpret_cast<Whole*>(to) = *reinterpret_cast<const Whole*>(&pack);
}

// Where a row's elements lie: so many one after the other, a run, and how far behind its end the row's next one begins; between
// them lie runs of all other rows.
struct Deal {
  Size run;
  Index gap;
};

// Where a pack of such a row lies, in the guise of an offset: from its place if rows lay together, which says how many runs come
// before it, and how much further its row begins. No pack that begins at a multiple of its size crosses the end of a run. From
// its place within the row it could be found as well, but a compiler would keep that for all turns, in a register for each pack.
struct Place {
  Deal deal;
  Index further, at;
  __device__ __forceinline__ Place operator+(Index offset) const { return {deal, further, at + offset}; }
  __device__ __forceinline__ operator Index() const { return further + at + divide(at, deal.run) * deal.gap; }
};

template <typename T>
struct Sum {
  T total = 0;
  __device__ void add(T term) { total += term; }
  __device__ void add_if(bool is_here, T term) { total += is_here ? term : T(0); }
  __device__ void add(T factor, T by) { total = fma(factor, by, total); }
  __device__ void add_if(bool is_here, T factor, T by) { total = is_here ? fma(factor, by, total) : total; }
  template <typename U>
  __device__ void merge(const Sum<U>& other) {
    total += other.total;
  }
  __device__ T sum() const { return total; }
  __device__ T number() const { return total; }
};

// The accumulator of the thread whose number in the warp differs in one bit.
template <template <typename> class Kind, typename T>
__device__ __forceinline__ Kind<T> exchange(Kind<T> mine, int bit) {
  return {__shfl_xor_sync(0xffffffffu, mine.number(), bit)};
}

// Merges a row's accumulators over its threads, in a fixed tree: within each warp, then over the warps, kWarps at most.
// A row has a power of two of threads, or whole warps; kIsWide, more than one. The cells are free again two calls later.
// Not for all, only the first warp knows.
template <int kWarps, bool kIsWide, bool kForAll = true, template <typename> class Kind, typename T, int N>
__device__ __forceinline__ void combine(Kind<T> (&mine)[N], T* cells) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    if (!kIsWide && bit >= blockDim.x) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) mine[n].merge(exchange(mine[n], bit));
  }
  if (!kIsWide && blockDim.x <= 32) return;
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, place = threadIdx.x % 32;
  T* const row_cells = cells + threadIdx.y * warps * N;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (place == 0) row_cells[warp * N + n] = mine[n].number();
  }
  __syncthreads();
  if (!kForAll && warp > 0) return;
  const int other = place % kWarps;
#pragma unroll
  for (int n = 0; n < N; ++n) mine[n] = other < warps ? Kind<T>{row_cells[other * N + n]} : Kind<T>();
#pragma unroll
  for (int bit = kWarps / 2; bit > 0; bit /= 2) {
#pragma unroll
    for (int n = 0; n < N; ++n) mine[n].merge(exchange(mine[n], bit));
  }
}

// A number for the blocks of a team, with the turn it belongs to in the same word: whoever sees the turn has the number.
[[maybe_unused]] __device__ __forceinline__ void leave(volatile uint64_t* cell, int turn, float number) {
  *cell = static_cast<uint64_t>(turn) << 32 | __float_as_uint(number);
}

[[maybe_unused]] __device__ __forceinline__ void leave(volatile uint64_t* cell, int turn, double number) {
  const uint64_t bits = __double_as_longlong(number);
  cell[0] = static_cast<uint64_t>(turn) << 32 | (bits & 0xffffffff);
  cell[1] = static_cast<uint64_t>(turn) << 32 | bits >> 32;
}

// A word as it was seen, or as it comes.
__device__ __forceinline__ unsigned int await_word(const volatile uint64_t* cell, int turn, uint64_t word) {
  while (word >> 32 != turn) {
    word = *cell;
    if (word >> 32 != turn) __nanosleep(20);
  }
  return static_cast<unsigned int>(word);
}

[[maybe_unused]] __device__ __forceinline__ void assemble(const unsigned int* words, float& number) {
  number = __uint_as_float(words[0]);
}

[[maybe_unused]] __device__ __forceinline__ void assemble(const unsigned int* words, double& number) {
  number = __longlong_as_double(static_cast<uint64_t>(words[1]) << 32 | words[0]);
}

// A power of two of lanes, enough for so many blocks, or a whole warp.
[[maybe_unused]] __device__ __forceinline__ int lanes_for(int blocks) { return min(32,
    1 << (32 - __clz(blocks - 1))); }

// What the blocks of a team left, merged by each warp in a fixed order.
template <typename Accumulator, int kCells, typename T>
__device__ __forceinline__ void merge_numbers(const unsigned int* words, int blocks, T& found) {
  const int width = lanes_for(blocks);
  Accumulator all;
#pragma unroll 1
  for (int other = threadIdx.x % width; other < blocks; other += 32) {
    T theirs;
    assemble(words + other * kCells, theirs);
    all.merge(Accumulator{theirs});
  }
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    if (bit < width) all.merge(exchange(all, bit));
  }
  found = all.number();
}

// How many elements the blocks of a team have, that one whose numbers this thread merges first, and all of them.
template <typename T>
struct Shares {
  int blocks, width;
  Index share, whole, length;
  T count, inverse_length;
  __device__ Shares(int blocks, Index share, Index whole, Index length)
      : blocks(blocks), width(lanes_for(blocks)), share(share), whole(whole), length(length),
        count(threadIdx.x % width < blocks ? count_of(threadIdx.x % width) : T(0)),
            inverse_length(1 / static_cast<T>(length)) {}
  // The first share has all that is in no whole pack.
  __device__ T count_of(Index other) const {
    const Index begin = other * share;
    return static_cast<T>((begin < whole ? min(share,
        whole - begin) : 0) + (other == 0 ? length - whole : 0));
  }
};

// Means of shares and squared distances from them: the mean and the variance of the row, by Chan's formula.
template <int kCells, typename T>
__device__ __forceinline__ void merge_moments(const unsigned int* words, const Shares<T>& shares, T& centre,
    T& variance) {
  constexpr int kWords = sizeof(T) / 4;
  const int first = threadIdx.x % shares.width;
  T base, mine, distances;
  assemble(words, base);
  assemble(words + first * kCells, mine);
  assemble(words + first * kCells + kWords, distances);
  Sum<T> beyond, squares;
  if (shares.count > 0) beyond.add(shares.count * (mine - base));
#pragma unroll 1
  for (int other = first + 32; other < shares.blocks; other += 32) {
    T theirs;
    assemble(words + other * kCells, theirs);
    if (shares.count_of(other) > 0) beyond.add(shares.count_of(other) * (theirs - base));
  }
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    if (bit < shares.width) beyond.merge(exchange(beyond, bit));
  }
  const T mean = fma(beyond.total, shares.inverse_length, base), gap = mine - mean;
  if (shares.count > 0) squares.add(fma(shares.count * gap, gap, distances));
#pragma unroll 1
  for (int other = first + 32; other < shares.blocks; other += 32) {
    assemble(words + other * kCells, mine);
    assemble(words + other * kCells + kWords, distances);
    const T gap = mine - mean;
    if (shares.count_of(other) > 0) squares.add(fma(shares.count_of(other) * gap, gap, distances));
  }
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    if (bit < shares.width) squares.merge(exchange(squares, bit));
  }
  centre = mean, variance = squares.total * shares.inverse_length;
}

// Merges a row's accumulators over the blocks of its team, in a fixed order. All blocks of a launch are resident, so that
// each will come; the cells of a turn are free again when everybody has left its numbers for the next.
template <int kCells, template <typename> class Kind, typename T, int N>
__device__ __forceinline__ void combine_team(Kind<T> (&mine)[N], uint64_t* meeting, int rank, int blocks,
    int turn,
    T* totals) {
  constexpr int kWords = sizeof(T) / 4;
  if (blocks == 1) return;
  volatile uint64_t* const cells = meeting + (turn & 1) * blocks * kCells;
  if (threadIdx.x < 32) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (threadIdx.x == n) leave(cells + rank * kCells + n * kWords, turn, mine[n].number());
    }
    Kind<T> all[N];
    for (int other = threadIdx.x; other < blocks; other += 32) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        T theirs;
        unsigned int words[kWords];
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[w] = await_word(cells + other * kCells + n * kWords + w, turn,
            0);
        assemble(words, theirs);
        all[n].merge(Kind<T>{theirs});
      }
    }
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) {
#pragma unroll
      for (int n = 0; n < N; ++n) all[n].merge(exchange(all[n], bit));
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (threadIdx.x == n) totals[n] = all[n].number();
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) mine[n] = {totals[n]};
}

// A thread's elements around the mean of the first of them: what they are off by, and squared. Merged, around their mean.
template <typename T>
struct Spread {
  T centre = 0, off = 0, squares = 0;
  template <int kLanes>
  __device__ void add_if(bool is_here, bool is_first, const T (&values)[kLanes]) {
#pragma unroll
    for (int lane = 0; lane < kLanes && is_first; ++lane) centre += is_here ? values[lane] / kLanes : T(0);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const T distance = is_here ? values[lane] - centre : T(0);
      off += distance;
      squares = fma(distance, distance, squares);
    }
  }
  // The same elements around another centre.
  __device__ void move(T to, T count) {
    const T gap = centre - to;
    squares = fma(gap, fma(count, gap, 2 * off), squares);
    off = fma(count, gap, off);
    centre = to;
  }
};

// How many of a row's elements this thread has, which come in packs of neighbours, so many apart.
template <int kPacks, int kLanes>
__device__ __forceinline__ int elements_of(Index first, Index apart, Index length) {
  int packs = 0;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) packs += first + p * apart < length;
  return packs * kLanes;
}

// How many of a row's elements a thread has, and how many those of its warp that share the row.
template <typename T>
struct Counts {
  T mine, of_warp;
};

template <bool kIsWide, typename T>
__device__ __forceinline__ Counts<T> counted(T mine) {
  T all = mine;
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    if (kIsWide || bit < blockDim.x) all += __shfl_xor_sync(0xffffffffu, all, bit);
  }
  return {mine, all};
}

// The same for means and squared distances from them: a warp finds its own mean before it adds up the distances from it,
// and what warps have is merged by Chan's formula, so that there is one barrier.
template <int kWarps, bool kIsWide, bool kForAll = true, typename T, int N>
__device__ __forceinline__ void combine(Spread<T> (&mine)[N], const Counts<T>& counts, T length, T* cells) {
  T beyond[N], base[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    base[n] = __shfl_sync(0xffffffffu, mine[n].centre, 0, kIsWide ? 32 : min(32, blockDim.x));
    beyond[n] = fma(counts.mine, mine[n].centre - base[n], mine[n].off);
  }
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    if (!kIsWide && bit >= blockDim.x) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) beyond[n] += __shfl_xor_sync(0xffffffffu, beyond[n], bit);
  }
#pragma unroll
  for (int n = 0; n < N; ++n) mine[n].move(base[n] + ratio(beyond[n], counts.of_warp), counts.mine);
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    if (!kIsWide && bit >= blockDim.x) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) mine[n].squares += __shfl_xor_sync(0xffffffffu, mine[n].squares, bit);
  }
  if (!kIsWide && blockDim.x <= 32) return;
  constexpr int kCells = 2 * N + 1;
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, place = threadIdx.x % 32;
  T* const row_cells = cells + threadIdx.y * warps * kCells;
  if (place == 0) {
    row_cells[warp * kCells] = counts.of_warp;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      row_cells[warp * kCells + 2 * n + 1] = mine[n].centre;
      row_cells[warp * kCells + 2 * n + 2] = mine[n].squares;
    }
  }
  __syncthreads();
  if (!kForAll && warp > 0) return;
  const int other = place % kWarps;
  const T count = other < warps ? row_cells[other * kCells] : T(0);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    base[n] = row_cells[2 * n + 1];
    mine[n].centre = other < warps ? row_cells[other * kCells + 2 * n + 1] : T(0);
    mine[n].squares = other < warps ? row_cells[other * kCells + 2 * n + 2] : T(0);
    beyond[n] = count * (mine[n].centre - base[n]);
  }
#pragma unroll
  for (int bit = kWarps / 2; bit > 0; bit /= 2) {
#pragma unroll
    for (int n = 0; n < N; ++n) beyond[n] += __shfl_xor_sync(0xffffffffu, beyond[n], bit);
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const T mean = base[n] + ratio(beyond[n], length), gap = mine[n].centre - mean;
    mine[n].squares = fma(count * gap, gap, mine[n].squares);
    mine[n].centre = mean;
  }
#pragma unroll
  for (int bit = kWarps / 2; bit > 0; bit /= 2) {
#pragma unroll
    for (int n = 0; n < N; ++n) mine[n].squares += __shfl_xor_sync(0xffffffffu, mine[n].squares, bit);
  }
}

// The same for means and squared distances from them: a block's, of so many elements, then the row's. It takes two turns.
template <int kCells, typename T, int N>
__device__ __forceinline__ void combine_team(Spread<T> (&mine)[N], T count, T length, uint64_t* meeting,
    int rank,
    int blocks, int& turn, T* totals) {
  Sum<T> sums[N], distances[2 * N];
#pragma unroll
  for (int n = 0; n < N; ++n) sums[n].add(count * mine[n].centre);
  combine_team<kCells>(sums, meeting, rank, blocks, turn++, totals);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const T mean = sums[n].total / length, gap = mine[n].centre - mean;
    distances[n].add(fma(count * gap, gap, mine[n].squares));
    distances[n + N].add(count * gap);
    mine[n].centre = mean;
  }
  // Others may still read the first totals.
  combine_team<kCells>(distances, meeting, rank, blocks, turn, totals + N);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    // A mean is mended by what the distances from it add up to.
    const T drift = distances[n + N].total / length;
    mine[n].centre += drift;
    mine[n].squares = distances[n].total - drift * distances[n + N].total;
  }
}

struct ForwardSizes {
  Size outer, inner;
  Deal deal;
};

__device__ __forceinline__ void forward_row_stage_1(const float x, float& mean_term) {
  mean_term = x;
}

__device__ __forceinline__ void forward_row_values_once(const float variance, float& inverse_root) {
  inverse_root = rsqrtf(variance + 1e-05f);
}

__device__ __forceinline__ void forward_row_values(const float x, const float mean, const float inverse_root,
    const float weight, const float bias, const float residual, float& out) {
  // batch_norm(running_mean, running_var, weight, bias, training=True)
  const float after_batch_norm = fmaf((x - mean) * inverse_root, weight, bias);
  // add(residual)
  const float after_add = after_batch_norm + residual;
  // relu
  out = maximum(after_add, 0.0f);
}

__device__ __forceinline__ void forward_row_row_values(const float mean, const float variance,
    const float running_mean, const float count_of_inner, const float running_var, float& saved_mean,
    float& saved_variance, float& new_running_mean, float& new_running_var) {
  saved_mean = mean;
  saved_variance = variance;
  new_running_mean = mean * 0.1f + running_mean * 0.9f;
  const float product = variance * narrow_div(count_of_inner, count_of_inner - 1.0f) * 0.1f;
  new_running_var = product + running_var * 0.9f;
}

// Reads x, residual, weight by (outer), bias by (outer), running_mean by (outer), running_var by (outer); writes out, saved_mean, saved_variance, new_running_mean, new_running_var.
__global__ void __launch_bounds__(512, 2)
forward_row(const bfloat16* __restrict__ x, const bfloat16* __restrict__ weight,
    const bfloat16* __restrict__ bias, const bfloat16* __restrict__ residual, const bfloat16* running_mean,
    const bfloat16* running_var, bfloat16* __restrict__ out, float* __restrict__ saved_mean,
    float* __restrict__ saved_variance, bfloat16* new_running_mean, bfloat16* new_running_var,
    ForwardSizes sizes, uint64_t* meetings, Index blocks) {
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  constexpr int kLanes = 8, kPacks = 2, kCells = 2;
  __shared__ float cells[2][48];
  __shared__ unsigned int words[160 * kCells];
  int turn = 0;
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  // This block's share of every row of its team.
  const Index rank = blockIdx.x % blocks, team = blockIdx.x / blocks;
  const Index share = (length + blocks * kLanes - 1) / (blocks * kLanes) * kLanes, begin = rank * share;
  const Index reach = begin < length ? min(share, length - begin) : 0;
  uint64_t* const meeting = meetings + team * blocks * 8;
  const Index stride = gridDim.x / blocks;
  const float elements = elements_of<kPacks, kLanes>(threadIdx.x * kLanes, blockDim.x * kLanes, reach);
  const Counts<float> counts = counted<true>(elements);
  const Shares<float> shares(blocks, share, length, length);
  extern __shared__ uint4 room[];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  auto* const x_next = reinterpret_cast<Pack<bfloat16, kLanes>*>(room + 0) + thread;
  float weight_ahead[3] = {};
  float bias_ahead[3] = {};
  float running_mean_ahead[3] = {};
  float running_var_ahead[3] = {};
  const auto send_row = [&](Index row, int slot) {
    const Index end = row < rows ? reach : 0;
    const Place base{sizes.deal, row * (sizes.deal.run.value - rows * length), row * length + begin};
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (is_here) send(&x_next[slot * 1024 + p * 512], x + (base + i));
    }
    send_off();
  };
  if (team < rows) {
    const Index outer = team;
    weight_ahead[1] = widen(weight[outer]);
    bias_ahead[1] = widen(bias[outer]);
    running_mean_ahead[1] = widen(running_mean[outer]);
    running_var_ahead[1] = widen(running_var[outer]);
  }
  send_row(team, 0);
  send_row(team + stride, 1);
  int number = 0, slot = 0;
  for (Index first = team; first < rows + stride; first += stride) {
    // The other blocks' numbers for the row before are asked for now, and needed only after this row's are known.
    const volatile uint64_t* const theirs = meeting + (number & 3) * blocks * kCells + threadIdx.x;
    const bool is_asking = number > 0 && threadIdx.x < blocks * kCells;
    uint64_t word = is_asking ? *theirs : 0;
    if (first + stride < rows) {
      const Index outer = first + stride;
      weight_ahead[2] = widen(weight[outer]);
      bias_ahead[2] = widen(bias[outer]);
      running_mean_ahead[2] = widen(running_mean[outer]);
      running_var_ahead[2] = widen(running_var[outer]);
    }
    ++number;
    {
      const Index end = first < rows ? reach : 0;
      wait_for_sent<1>();
      Pack<bfloat16, kLanes> x_in[kPacks];
      Spread<float> spreads_1[1];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
        const bool is_here = i < end;
        x_in[p] = x_next[slot * 1024 + p * 512];
        float mean_term_lanes[kLanes];
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[p], lane);
          float mean_term_value;
          forward_row_stage_1(x_value, mean_term_value);
          mean_term_lanes[lane] = mean_term_value;
        }
        if (is_here) spreads_1[0].add_if(true, p == 0, mean_term_lanes);
      }
      combine<16, true, false>(spreads_1, counts, static_cast<float>(reach), cells[turn++ & 1]);
      if (threadIdx.x == 0) {
        uint64_t* const mine = meeting + ((number & 3) * blocks + rank) * kCells;
        leave(mine + 0, number, spreads_1[0].centre);
        leave(mine + 1, number, spreads_1[0].squares);
      }
    }
    const int slot_before = slot == 0 ? 2 : slot - 1;
    if (number > 1) {
      // The row before.
      const Index row = first - stride, end = reach;
      const Place base{sizes.deal, row * (sizes.deal.run.value - rows * length), row * length + begin};
      const Index outer = row;
      Pack<bfloat16, kLanes> residual_in[kPacks];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
        const bool is_here = i < end;
        if (is_here) residual_in[p] = load<kLanes>(residual + (base + i));
      }
      if (is_asking) words[threadIdx.x] = await_word(theirs, number - 1, word);
      for (int i = threadIdx.x + blockDim.x; i < blocks * kCells; i += blockDim.x) {
        words[i] = await_word(theirs + (i - threadIdx.x), number - 1, 0);
      }
      __syncthreads();
      float found[2];
      merge_moments<kCells>(words + 0, shares, found[0], found[1]);
      const float mean_value = found[0];
      const float variance_value = found[1];
      const float weight_value = weight_ahead[0];
      const float bias_value = bias_ahead[0];
      const float running_mean_value = running_mean_ahead[0];
      const float running_var_value = running_var_ahead[0];
      if (threadIdx.x == 0 && rank == 0) {
        float saved_mean_value;
        float saved_variance_value;
        float new_running_mean_value;
        float new_running_var_value;
        forward_row_row_values(mean_value, variance_value, running_mean_value, count_of_inner_value,
            running_var_value, saved_mean_value, saved_variance_value, new_running_mean_value,
            new_running_var_value);
        saved_mean[outer] = narrow<float>(saved_mean_value);
        saved_variance[outer] = narrow<float>(saved_variance_value);
        new_running_mean[outer] = narrow<bfloat16>(new_running_mean_value);
        new_running_var[outer] = narrow<bfloat16>(new_running_var_value);
      }
      Pack<bfloat16, kLanes> x_in[kPacks];
      const int slot = slot_before;
      float inverse_root_value;
      forward_row_values_once(variance_value, inverse_root_value);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
        const bool is_here = i < end;
        x_in[p] = x_next[slot * 1024 + p * 512];
        Pack<bfloat16, kLanes> out_out;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[p], lane);
          const float residual_value = widen(residual_in[p], lane);
          float out_value;
          forward_row_values(x_value, mean_value, inverse_root_value, weight_value, bias_value,
              residual_value, out_value);
          out_out.at[lane] = narrow<bfloat16>(out_value);
        }
        if (is_here) store(out + (base + i), out_out);
      }
    }
    send_row(first + 2 * stride, slot_before);
    weight_ahead[0] = weight_ahead[1], weight_ahead[1] = weight_ahead[2];
    bias_ahead[0] = bias_ahead[1], bias_ahead[1] = bias_ahead[2];
    running_mean_ahead[0] = running_mean_ahead[1], running_mean_ahead[1] = running_mean_ahead[2];
    running_var_ahead[0] = running_var_ahead[1], running_var_ahead[1] = running_var_ahead[2];
    slot = slot == 2 ? 0 : slot + 1;
  }
}

struct BackwardSizes {
  Size outer, inner;
  Deal deal;
};

__device__ __forceinline__ void backward_row_stage_1(const float out, const float d_out, const float x,
    const float saved_mean, float& total_term, float& total_term_by, float& total_2_term) {
  // backward, down to add(residual)
  // backward, down to batch_norm(running_mean, running_var, weight, bias, training=True)
  total_term = out <= 0.0f ? 0.0f : d_out;
  total_term_by = x - saved_mean;
  total_2_term = total_term;
}

__device__ __forceinline__ void backward_row_values_once(const float saved_variance, const float total,
    const float weight, const float count_of_inner, const float total_2, float& inverse_root, float& negated,
    float& product) {
  inverse_root = rsqrtf(saved_variance + 1e-05f);
  const float quotient = narrow_div(1.0f, count_of_inner);
  const float product_2 = total * weight * inverse_root * inverse_root * inverse_root * quotient;
  negated = -product_2;
  product = total_2 * weight * inverse_root * quotient;
}

__device__ __forceinline__ void backward_row_values(const float x, const float saved_mean,
    const float negated, const float out, const float d_out, const float weight, const float inverse_root,
    const float product, float& d_x, float& d_residual) {
  // backward, down to add(residual)
  const float d_after_add = out <= 0.0f ? 0.0f : d_out;
  const float sum = fmaf(x - saved_mean, negated, d_after_add * weight * inverse_root);
  d_x = sum - product;
  d_residual = d_after_add;
}

__device__ __forceinline__ void backward_row_row_values(const float total, const float saved_variance,
    const float total_2, float& d_weight, float& d_bias) {
  d_weight = total * (rsqrtf(saved_variance + 1e-05f));
  d_bias = total_2;
}

// Reads out, d_out, x, saved_mean by (outer), weight by (outer), saved_variance by (outer); writes d_x, d_weight, d_bias, d_residual.
__global__ void __launch_bounds__(128, 3)
backward_row(const bfloat16* __restrict__ out, const bfloat16* __restrict__ d_out,
    const bfloat16* __restrict__ x, const float* __restrict__ saved_mean,
    const bfloat16* __restrict__ weight, const float* __restrict__ saved_variance,
    bfloat16* __restrict__ d_x, bfloat16* __restrict__ d_weight, bfloat16* __restrict__ d_bias,
    bfloat16* __restrict__ d_residual, BackwardSizes sizes, uint64_t* meetings, Index blocks) {
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  constexpr int kLanes = 8, kPacks = 4, kCells = 2;
  __shared__ float cells[2][8];
  __shared__ unsigned int words[160 * kCells];
  int turn = 0;
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  // This block's share of every row of its team.
  const Index rank = blockIdx.x % blocks, team = blockIdx.x / blocks;
  const Index share = (length + blocks * kLanes - 1) / (blocks * kLanes) * kLanes, begin = rank * share;
  const Index reach = begin < length ? min(share, length - begin) : 0;
  uint64_t* const meeting = meetings + team * blocks * 8;
  const Index stride = gridDim.x / blocks;
  extern __shared__ uint4 room[];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  auto* const out_next = reinterpret_cast<Pack<bfloat16, kLanes>*>(room + 0) + thread;
  auto* const d_out_next = reinterpret_cast<Pack<bfloat16, kLanes>*>(room + 512) + thread;
  auto* const x_next = reinterpret_cast<Pack<bfloat16, kLanes>*>(room + 1024) + thread;
  float saved_mean_ahead[3] = {};
  float weight_ahead[3] = {};
  float saved_variance_ahead[3] = {};
  const auto send_row = [&](Index row, int slot) {
    const Index end = row < rows ? reach : 0;
    const Place base{sizes.deal, row * (sizes.deal.run.value - rows * length), row * length + begin};
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
      if (is_here) send(&out_next[slot * 1536 + p * 128], out + (base + i));
      if (is_here) send(&d_out_next[slot * 1536 + p * 128], d_out + (base + i));
      if (is_here) send(&x_next[slot * 1536 + p * 128], x + (base + i));
    }
    send_off();
  };
  if (team < rows) {
    const Index outer = team;
    saved_mean_ahead[1] = widen(saved_mean[outer]);
    weight_ahead[1] = widen(weight[outer]);
    saved_variance_ahead[1] = widen(saved_variance[outer]);
  }
  send_row(team, 0);
  send_row(team + stride, 1);
  int number = 0, slot = 0;
  for (Index first = team; first < rows + stride; first += stride) {
    // The other blocks' numbers for the row before are asked for now, and needed only after this row's are known.
    const volatile uint64_t* const theirs = meeting + (number & 3) * blocks * kCells + threadIdx.x;
    const bool is_asking = number > 0 && threadIdx.x < blocks * kCells;
    uint64_t word = is_asking ? *theirs : 0;
    if (first + stride < rows) {
      const Index outer = first + stride;
      saved_mean_ahead[2] = widen(saved_mean[outer]);
      weight_ahead[2] = widen(weight[outer]);
      saved_variance_ahead[2] = widen(saved_variance[outer]);
    }
    ++number;
    {
      const Index end = first < rows ? reach : 0;
      wait_for_sent<1>();
      Pack<bfloat16, kLanes> out_in[kPacks];
      Pack<bfloat16, kLanes> d_out_in[kPacks];
      Pack<bfloat16, kLanes> x_in[kPacks];
      const float saved_mean_value = saved_mean_ahead[1];
      Sum<float> sums_1[2];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
        const bool is_here = i < end;
        if (!is_here) continue;
        out_in[p] = out_next[slot * 1536 + p * 128];
        d_out_in[p] = d_out_next[slot * 1536 + p * 128];
        x_in[p] = x_next[slot * 1536 + p * 128];
        Sum<float> sums_1_here[2];
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float out_value = widen(out_in[p], lane);
          const float d_out_value = widen(d_out_in[p], lane);
          const float x_value = widen(x_in[p], lane);
          float total_term_value;
          float total_term_by_value;
          float total_2_term_value;
          backward_row_stage_1(out_value, d_out_value, x_value, saved_mean_value, total_term_value,
              total_term_by_value, total_2_term_value);
          sums_1_here[0].add(total_term_value, total_term_by_value);
          sums_1_here[1].add(total_2_term_value);
        }
        if (is_here) sums_1[0].merge(sums_1_here[0]);
        if (is_here) sums_1[1].merge(sums_1_here[1]);
      }
      combine<4, true, false>(sums_1, cells[turn++ & 1]);
      if (threadIdx.x == 0) {
        uint64_t* const mine = meeting + ((number & 3) * blocks + rank) * kCells;
        leave(mine + 0, number, sums_1[0].total);
        leave(mine + 1, number, sums_1[1].total);
      }
    }
    const int slot_before = slot == 0 ? 2 : slot - 1;
    if (number > 1) {
      // The row before.
      const Index row = first - stride, end = reach;
      const Place base{sizes.deal, row * (sizes.deal.run.value - rows * length), row * length + begin};
      const Index outer = row;
      if (is_asking) words[threadIdx.x] = await_word(theirs, number - 1, word);
      for (int i = threadIdx.x + blockDim.x; i < blocks * kCells; i += blockDim.x) {
        words[i] = await_word(theirs + (i - threadIdx.x), number - 1, 0);
      }
      __syncthreads();
      float found[2];
      merge_numbers<Sum<float>, kCells>(words + 0, blocks, found[0]);
      merge_numbers<Sum<float>, kCells>(words + 1, blocks, found[1]);
      const float total_value = found[0];
      const float total_2_value = found[1];
      const float saved_mean_value = saved_mean_ahead[0];
      const float weight_value = weight_ahead[0];
      const float saved_variance_value = saved_variance_ahead[0];
      if (threadIdx.x == 0 && rank == 0) {
        float d_weight_value;
        float d_bias_value;
        backward_row_row_values(total_value, saved_variance_value, total_2_value, d_weight_value,
            d_bias_value);
        d_weight[outer] = narrow<bfloat16>(d_weight_value);
        d_bias[outer] = narrow<bfloat16>(d_bias_value);
      }
      Pack<bfloat16, kLanes> out_in[kPacks];
      Pack<bfloat16, kLanes> d_out_in[kPacks];
      Pack<bfloat16, kLanes> x_in[kPacks];
      const int slot = slot_before;
      float inverse_root_value;
      float negated_value;
      float product_value;
      backward_row_values_once(saved_variance_value, total_value, weight_value, count_of_inner_value,
          total_2_value, inverse_root_value, negated_value, product_value);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
        const bool is_here = i < end;
        if (!is_here) continue;
        out_in[p] = out_next[slot * 1536 + p * 128];
        d_out_in[p] = d_out_next[slot * 1536 + p * 128];
        x_in[p] = x_next[slot * 1536 + p * 128];
        Pack<bfloat16, kLanes> d_x_out;
        Pack<bfloat16, kLanes> d_residual_out;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float out_value = widen(out_in[p], lane);
          const float d_out_value = widen(d_out_in[p], lane);
          const float x_value = widen(x_in[p], lane);
          float d_x_value;
          float d_residual_value;
          backward_row_values(x_value, saved_mean_value, negated_value, out_value, d_out_value, weight_value,
              inverse_root_value, product_value, d_x_value, d_residual_value);
          d_x_out.at[lane] = narrow<bfloat16>(d_x_value);
          d_residual_out.at[lane] = narrow<bfloat16>(d_residual_value);
        }
        if (is_here) store(d_x + (base + i), d_x_out);
        if (is_here) store(d_residual + (base + i), d_residual_out);
      }
    }
    send_row(first + 2 * stride, slot_before);
    saved_mean_ahead[0] = saved_mean_ahead[1], saved_mean_ahead[1] = saved_mean_ahead[2];
    weight_ahead[0] = weight_ahead[1], weight_ahead[1] = weight_ahead[2];
    saved_variance_ahead[0] = saved_variance_ahead[1], saved_variance_ahead[1] = saved_variance_ahead[2];
    slot = slot == 2 ? 0 : slot + 1;
  }
}

}  // namespace

// Scratch memory, handed out piece by piece; with no base it only counts.
struct Scratch {
  char* base;
  int64_t used = 0;
  template <typename T>
  T* take(int64_t count) {
    T* const piece = reinterpret_cast<T*>(base + used);
    used += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return piece;
  }
};

// The caller's device stays current.
struct DeviceGuard {
  int previous = 0;
  explicit DeviceGuard(int device) {
    cudaGetDevice(&previous);
    if (previous != device) cudaSetDevice(device);
    else previous = -1;
  }
  ~DeviceGuard() {
    if (previous >= 0) cudaSetDevice(previous);
  }
};

static int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The smallest power of two that is at least n, between two others.
static int64_t power_of_two(int64_t n, int64_t least, int64_t most) {
  int64_t power = least;
  while (power < n && power < most) power *= 2;
  return power;
}

// How many blocks of a kernel the device works on at once, each with so much shared memory of its own, and at most so much
// in any launch. Asked once for each kernel, device and size of block: the runtime takes microseconds to answer.
template <typename Kernel>
static int64_t resident_blocks(Kernel* kernel, dim3 block, int64_t shared_bytes, int64_t most_bytes,
    int device) {
  struct Answer {
    Kernel* kernel;
    int64_t shared_bytes;
    int threads, device;
    int64_t blocks;
  };
  thread_local Answer answers[16] = {};
  thread_local int next = 0;
  const int threads = static_cast<int>(block.x * block.y);
  for (const Answer& known : answers) {
    if (known.kernel == kernel && known.shared_bytes == shared_bytes && known.threads == threads && known.device == device) {
      return known.blocks;
    }
  }
  int on_each = 0, processors = 0;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most_bytes));
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&on_each, kernel, threads, shared_bytes);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (on_each == 0) return 1;  // the launch will say why
  Answer& oldest = answers[next];
  next = (next + 1) % 16;
  oldest = {kernel, shared_bytes, threads, device, static_cast<int64_t>(on_each) * processors};
  return oldest.blocks;
}

// A row's threads along x: a power of two within a warp, or whole warps; along y, rows beside each other for so many threads.
static dim3 row_block(int64_t wanted, int64_t threads, int64_t least = 1) {
  const int64_t along = wanted <= 32 ? power_of_two(wanted, least, 32) : ceil_divide(wanted, 32) * 32;
  return dim3(static_cast<unsigned>(along), static_cast<unsigned>(along < threads ? threads / along : 1));
}

// a: x, running_mean, running_var, weight, bias, residual, out, saved_mean, saved_variance, new_running_mean, new_running_var, scratch (-1: return the bytes it needs), outer, inner, run and gap of rows, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const running_mean = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const running_var = reinterpret_cast<const bfloat16*>(a[2]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[3]);
  auto* const bias = reinterpret_cast<const bfloat16*>(a[4]);
  auto* const residual = reinterpret_cast<const bfloat16*>(a[5]);
  auto* const out = reinterpret_cast<bfloat16*>(a[6]);
  auto* const saved_mean = reinterpret_cast<float*>(a[7]);
  auto* const saved_variance = reinterpret_cast<float*>(a[8]);
  auto* const new_running_mean = reinterpret_cast<bfloat16*>(a[9]);
  auto* const new_running_var = reinterpret_cast<bfloat16*>(a[10]);
  const bool is_measuring = a[11] == -1;
  if (!is_measuring && ((a[0] | a[5] | a[6]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[11])};
  const ForwardSizes sizes{ size_of(a[12]), size_of(a[13]), { size_of(a[14]), static_cast<Index>(a[15])} };
  const auto stream = reinterpret_cast<cudaStream_t>(a[17]);
  const int device = static_cast<int>(a[16]);
  const DeviceGuard guard(device);
  const int64_t forward_row_rows = static_cast<int64_t>(sizes.outer.value),
      forward_row_length = static_cast<int64_t>(sizes.inner.value);
  // So many blocks share a row; there are as many such teams as the device works on at once.
  const int64_t forward_row_blocks = ceil_divide(forward_row_length, 8192);
  const dim3 forward_row_block = row_block(ceil_divide(forward_row_length, forward_row_blocks * 16), 256);
  const int64_t forward_row_resident = resident_blocks(forward_row, forward_row_block, 49152, 49152,
      device) / forward_row_blocks;
  const int64_t forward_row_slots = forward_row_rows < forward_row_resident ? forward_row_rows : forward_row_resident;
  if (forward_row_slots == 0) return -static_cast<int64_t>(cudaErrorCooperativeLaunchTooLarge);
  const int64_t forward_row_meeting_cells = forward_row_slots * forward_row_blocks * 8;
  auto* const forward_row_meetings = scratch.take<uint64_t>(forward_row_meeting_cells);
  if (is_measuring) return scratch.used;
  {
    cudaMemsetAsync(forward_row_meetings, 0, forward_row_meeting_cells * sizeof(uint64_t), stream);
    cudaLaunchAttribute together{};
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t launch{};
    launch.gridDim = dim3(static_cast<unsigned>(forward_row_slots * forward_row_blocks));
    launch.blockDim = forward_row_block;
    launch.dynamicSmemBytes = 49152;
    launch.stream = stream;
    launch.attrs = &together;
    launch.numAttrs = 1;
    cudaLaunchKernelEx(&launch, forward_row, x, weight, bias, residual, running_mean, running_var, out,
        saved_mean, saved_variance, new_running_mean, new_running_var, sizes, forward_row_meetings,
        static_cast<Index>(forward_row_blocks));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, weight, out, saved_mean, saved_variance, d_out, d_x, d_weight, d_bias, d_residual, scratch (-1: return the bytes it needs), outer, inner, run and gap of rows, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const out = reinterpret_cast<const bfloat16*>(a[2]);
  auto* const saved_mean = reinterpret_cast<const float*>(a[3]);
  auto* const saved_variance = reinterpret_cast<const float*>(a[4]);
  auto* const d_out = reinterpret_cast<const bfloat16*>(a[5]);
  auto* const d_x = reinterpret_cast<bfloat16*>(a[6]);
  auto* const d_weight = reinterpret_cast<bfloat16*>(a[7]);
  auto* const d_bias = reinterpret_cast<bfloat16*>(a[8]);
  auto* const d_residual = reinterpret_cast<bfloat16*>(a[9]);
  const bool is_measuring = a[10] == -1;
  if (!is_measuring && ((a[0] | a[2] | a[5] | a[6] | a[9]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[10])};
  const BackwardSizes sizes{ size_of(a[11]), size_of(a[12]), { size_of(a[13]), static_cast<Index>(a[14])} };
  const auto stream = reinterpret_cast<cudaStream_t>(a[16]);
  const int device = static_cast<int>(a[15]);
  const DeviceGuard guard(device);
  const int64_t backward_row_rows = static_cast<int64_t>(sizes.outer.value),
      backward_row_length = static_cast<int64_t>(sizes.inner.value);
  // So many blocks share a row; there are as many such teams as the device works on at once.
  const int64_t backward_row_blocks = ceil_divide(backward_row_length, 4096);
  const dim3 backward_row_block = row_block(ceil_divide(backward_row_length, backward_row_blocks * 32), 128);
  const int64_t backward_row_resident = resident_blocks(backward_row, backward_row_block, 73728, 73728,
      device) / backward_row_blocks;
  const int64_t backward_row_slots = backward_row_rows < backward_row_resident ? backward_row_rows : backward_row_resident;
  if (backward_row_slots == 0) return -static_cast<int64_t>(cudaErrorCooperativeLaunchTooLarge);
  const int64_t backward_row_meeting_cells = backward_row_slots * backward_row_blocks * 8;
  auto* const backward_row_meetings = scratch.take<uint64_t>(backward_row_meeting_cells);
  if (is_measuring) return scratch.used;
  {
    cudaMemsetAsync(backward_row_meetings, 0, backward_row_meeting_cells * sizeof(uint64_t), stream);
    cudaLaunchAttribute together{};
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t launch{};
    launch.gridDim = dim3(static_cast<unsigned>(backward_row_slots * backward_row_blocks));
    launch.blockDim = backward_row_block;
    launch.dynamicSmemBytes = 73728;
    launch.stream = stream;
    launch.attrs = &together;
    launch.numAttrs = 1;
    cudaLaunchKernelEx(&launch, backward_row, out, d_out, x, saved_mean, weight, saved_variance, d_x,
        d_weight, d_bias, d_residual, sizes, backward_row_meetings, static_cast<Index>(backward_row_blocks));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
