// fusegen 0.1.0   chain 7856e0743087   signature forward+backward: bias float64, d_bias float64, d_out float64, d_weight float64, d_x float64, out float64, saved_mean float64, saved_variance float64, weight float64, x float64; 32-bit offsets
//   layernorm(weight, bias) | gelu
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

// Accumulators merged along a block's y, in a fixed tree, for the threads where it is 0.
template <typename... Accumulators>
__device__ __forceinline__ void merge_trees(unsigned char* memory, Accumulators&... mine) {
  const int cell = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  const auto each = [&](auto visit) {
    unsigned char* at = memory;
    ((visit(reinterpret_cast<Accumulators*>(at), mine), at += threads * sizeof(Accumulators)), ...);
  };
  each([&](auto* cells, auto& sum) { cells[cell] = sum; });
  __syncthreads();
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    if (threadIdx.y < half) each([&](auto* cells,
        auto&) { cells[cell].merge(cells[cell + half * blockDim.x]); });
    __syncthreads();
  }
  each([&](auto* cells, auto& sum) { sum = cells[cell]; });
}

// What a block's threads have of columns, N neighbours each: merged over its rows in a fixed tree, and left for as many columns
// as there are, as they lie. Of a thread's N cells each is in a part of its own, for threads beside each other to use other
// banks; all are free again afterwards.
template <typename Accumulator, int N>
__device__ __forceinline__ void leave_columns(const Accumulator (&mine)[N], void* memory,
    Accumulator* partials,
    int64_t columns) {
  Accumulator* const cells = static_cast<Accumulator*>(memory);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  const int part = threads + (N < 32 ? 32 / N : 1);
#pragma unroll
  for (int n = 0; n < N; ++n) cells[n * part + thread] = mine[n];
  __syncthreads();
  for (int rows = blockDim.y; rows > 1;) {
    const int half = (rows + 1) / 2;
    if (threadIdx.y < rows - half) {
#pragma unroll
      for (int n = 0; n < N; ++n) cells[n * part + thread].merge(cells[n * part + thread + half * blockDim.x]);
    }
    rows = half;
    __syncthreads();
  }
  for (int n = thread; n < min(columns, static_cast<int64_t>(blockDim.x * N)); n += threads) {
    partials[n] = cells[n % N * part + n / N];
  }
  __syncthreads();
}

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

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct ForwardSizes {
  Size outer, inner;
};

__device__ __forceinline__ void forward_row_stage_1(const double x, double& mean_term) {
  mean_term = x;
}

__device__ __forceinline__ void forward_row_values_once(const double variance, double& inverse_root) {
  inverse_root = rsqrt(variance + 1e-05);
}

__device__ __forceinline__ void forward_row_values(const double x, const double mean,
    const double inverse_root, const double weight, const double bias, double& out) {
  // layernorm(weight, bias)
  const double after_layernorm = fma((x - mean) * inverse_root, weight, bias);
  // gelu
  out = after_layernorm * 0.5 * (1.0 + erf(after_layernorm * 0.7071067811865476));
}

__device__ __forceinline__ void forward_row_row_values(const double mean, const double variance,
    double& saved_mean, double& saved_variance) {
  saved_mean = mean;
  saved_variance = variance;
}

// Reads x, weight by (inner), bias by (inner); writes out, saved_mean, saved_variance.
__global__ void __launch_bounds__(512, 1)
forward_row(const double* __restrict__ x, const double* __restrict__ weight, const double* __restrict__ bias,
    double* __restrict__ out, double* __restrict__ saved_mean, double* __restrict__ saved_variance,
    ForwardSizes sizes, uint64_t* meetings, Index blocks) {
  constexpr int kLanes = 1, kPacks = 4, kCells = 4;
  __shared__ double cells[2][48];
  __shared__ unsigned int words[160 * kCells];
  int turn = 0;
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  // This block's share of every row of its team.
  const Index rank = blockIdx.x % blocks, team = blockIdx.x / blocks;
  const Index share = (length + blocks * kLanes - 1) / (blocks * kLanes) * kLanes, begin = rank * share;
  const Index reach = begin < length ? min(share, length - begin) : 0;
  uint64_t* const meeting = meetings + team * blocks * 16;
  const Index stride = gridDim.x / blocks;
  const double elements = elements_of<kPacks, kLanes>(threadIdx.x * kLanes, blockDim.x * kLanes, reach);
  const Counts<double> counts = counted<true>(elements);
  const Shares<double> shares(blocks, share, length, length);
  extern __shared__ uint4 room[];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  auto* const x_next = reinterpret_cast<Pack<double, kLanes>*>(room + 0) + thread;
  Pack<double, kLanes> weight_in[kPacks];
  Pack<double, kLanes> bias_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
    if (i < reach) weight_in[p] = load<kLanes>(weight + i + begin);
    if (i < reach) bias_in[p] = load<kLanes>(bias + i + begin);
  }
  const auto send_row = [&](Index row, int slot) {
    const Index end = row < rows ? reach : 0, base = row * length + begin;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
      if (is_here) send(&x_next[slot * 2048 + p * 512], x + (base + i));
    }
    send_off();
  };
  send_row(team, 0);
  send_row(team + stride, 1);
  int number = 0, slot = 0;
  for (Index first = team; first < rows + stride; first += stride) {
    // The other blocks' numbers for the row before are asked for now, and needed only after this row's are known.
    const volatile uint64_t* const theirs = meeting + (number & 3) * blocks * kCells + threadIdx.x;
    const bool is_asking = number > 0 && threadIdx.x < blocks * kCells;
    uint64_t word = is_asking ? *theirs : 0;
    ++number;
    {
      const Index end = first < rows ? reach : 0;
      wait_for_sent<1>();
      Pack<double, kLanes> x_in[kPacks];
      Spread<double> spreads_1[1];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
        const bool is_here = i < end;
        if (!is_here) continue;
        x_in[p] = x_next[slot * 2048 + p * 512];
        double mean_term_lanes[kLanes];
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const double x_value = widen(x_in[p], lane);
          double mean_term_value;
          forward_row_stage_1(x_value, mean_term_value);
          mean_term_lanes[lane] = mean_term_value;
        }
        if (is_here) spreads_1[0].add_if(true, p == 0, mean_term_lanes);
      }
      combine<16, true, false>(spreads_1, counts, static_cast<double>(reach), cells[turn++ & 1]);
      if (threadIdx.x == 0) {
        uint64_t* const mine = meeting + ((number & 3) * blocks + rank) * kCells;
        leave(mine + 0, number, spreads_1[0].centre);
        leave(mine + 2, number, spreads_1[0].squares);
      }
    }
    const int slot_before = slot == 0 ? 2 : slot - 1;
    if (number > 1) {
      // The row before.
      const Index row = first - stride, base = row * length + begin, end = reach;
      const Index outer = row;
      if (is_asking) words[threadIdx.x] = await_word(theirs, number - 1, word);
      for (int i = threadIdx.x + blockDim.x; i < blocks * kCells; i += blockDim.x) {
        words[i] = await_word(theirs + (i - threadIdx.x), number - 1, 0);
      }
      __syncthreads();
      double found[2];
      merge_moments<kCells>(words + 0, shares, found[0], found[1]);
      const double mean_value = found[0];
      const double variance_value = found[1];
      if (threadIdx.x == 0 && rank == 0) {
        double saved_mean_value;
        double saved_variance_value;
        forward_row_row_values(mean_value, variance_value, saved_mean_value, saved_variance_value);
        saved_mean[outer] = narrow<double>(saved_mean_value);
        saved_variance[outer] = narrow<double>(saved_variance_value);
      }
      Pack<double, kLanes> x_in[kPacks];
      const int slot = slot_before;
      double inverse_root_value;
      forward_row_values_once(variance_value, inverse_root_value);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
        const bool is_here = i < end;
        if (!is_here) continue;
        x_in[p] = x_next[slot * 2048 + p * 512];
        Pack<double, kLanes> out_out;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const double x_value = widen(x_in[p], lane);
          const double weight_value = widen(weight_in[p], lane);
          const double bias_value = widen(bias_in[p], lane);
          double out_value;
          forward_row_values(x_value, mean_value, inverse_root_value, weight_value, bias_value, out_value);
          out_out.at[lane] = narrow<double>(out_value);
        }
        if (is_here) store(out + (base + i), out_out);
      }
    }
    send_row(first + 2 * stride, slot_before);
    slot = slot == 2 ? 0 : slot + 1;
  }
}

struct BackwardSizes {
  Size outer, inner;
};

__device__ __forceinline__ void backward_row_stage_1_once(const double saved_variance, double& inverse_root) {
  inverse_root = rsqrt(saved_variance + 1e-05);
}

__device__ __forceinline__ void backward_row_stage_1(const double d_out, const double x,
    const double saved_mean, const double inverse_root, const double weight, const double bias,
    double& total_3_term, double& total_3_term_by, double& total_4_term, double& total_4_term_by,
    double& carried, double& total_term, double& total_term_by, double& total_2_term) {
  // layernorm(weight, bias)
  const double after_layernorm = fma((x - saved_mean) * inverse_root, weight, bias);
  // backward, down to layernorm(weight, bias)
  const double product = after_layernorm * 0.7071067811865476;
  const double product_2 = d_out * (after_layernorm * 0.5) * (1.1283791670955126 * exp(-(product * product)));
  const double d_after_layernorm = fma(product_2, 0.7071067811865476, d_out * (1.0 + erf(product)) * 0.5);
  total_3_term = d_after_layernorm * weight;
  total_3_term_by = x - saved_mean;
  total_4_term = d_after_layernorm;
  total_4_term_by = weight;
  carried = total_3_term * inverse_root;
  total_term = d_after_layernorm;
  total_term_by = total_3_term_by * inverse_root;
  total_2_term = d_after_layernorm;
}

__device__ __forceinline__ void backward_row_values_once(const double total_3, const double saved_variance,
    const double count_of_inner, const double total_4, double& product, double& product_2) {
  const double inverse_root = rsqrt(saved_variance + 1e-05);
  const double product_3 = 2.0 * (-0.5 * (total_3 * inverse_root) * (inverse_root * inverse_root));
  const double quotient = 1.0 / count_of_inner;
  product = product_3 * quotient;
  product_2 = total_4 * inverse_root * quotient;
}

__device__ __forceinline__ void backward_row_values(const double x, const double saved_mean,
    const double product, const double carried, const double product_2, double& d_x) {
  d_x = fma(x - saved_mean, product, carried) - product_2;
}

// Reads d_out, x, saved_mean by (outer), saved_variance by (outer), weight by (inner), bias by (inner); leaves partials of total, total_2; writes d_x.
__global__ void __launch_bounds__(512, 1)
backward_row(const double* __restrict__ d_out, const double* __restrict__ x,
    const double* __restrict__ saved_mean, const double* __restrict__ saved_variance,
    const double* __restrict__ weight, const double* __restrict__ bias, double* __restrict__ d_x,
    Sum<double>* __restrict__ total_partials, Sum<double>* __restrict__ total_2_partials,
    BackwardSizes sizes, uint64_t* meetings, Index blocks) {
  const double count_of_inner_value = static_cast<double>(sizes.inner.value);
  constexpr int kLanes = 1, kPacks = 4, kCells = 4;
  __shared__ double cells[2][32];
  __shared__ unsigned int words[160 * kCells];
  int turn = 0;
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  // This block's share of every row of its team.
  const Index rank = blockIdx.x % blocks, team = blockIdx.x / blocks;
  const Index share = (length + blocks * kLanes - 1) / (blocks * kLanes) * kLanes, begin = rank * share;
  const Index reach = begin < length ? min(share, length - begin) : 0;
  uint64_t* const meeting = meetings + team * blocks * 16;
  const Index stride = gridDim.x / blocks;
  extern __shared__ uint4 room[];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  Sum<double> total_sum[kPacks][kLanes];
  Sum<double> total_2_sum[kPacks][kLanes];
  auto* const d_out_next = reinterpret_cast<Pack<double, kLanes>*>(room + 0) + thread;
  auto* const x_next = reinterpret_cast<Pack<double, kLanes>*>(room + 1024) + thread;
  Pack<double, kLanes> weight_in[kPacks];
  Pack<double, kLanes> bias_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
    if (i < reach) weight_in[p] = load<kLanes>(weight + i + begin);
    if (i < reach) bias_in[p] = load<kLanes>(bias + i + begin);
  }
  double saved_mean_ahead[3] = {};
  double saved_variance_ahead[3] = {};
  const auto send_row = [&](Index row, int slot) {
    const Index end = row < rows ? reach : 0, base = row * length + begin;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
      if (is_here) send(&d_out_next[slot * 4096 + p * 512], d_out + (base + i));
      if (is_here) send(&x_next[slot * 4096 + p * 512], x + (base + i));
    }
    send_off();
  };
  if (team < rows) {
    const Index outer = team;
    saved_mean_ahead[1] = widen(saved_mean[outer]);
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
    ++number;
    {
      const Index end = first < rows ? reach : 0;
      wait_for_sent<1>();
      Pack<double, kLanes> d_out_in[kPacks];
      Pack<double, kLanes> x_in[kPacks];
      const double saved_mean_value = saved_mean_ahead[1];
      const double saved_variance_value = saved_variance_ahead[1];
      Sum<double> sums_1[2];
      double inverse_root_value;
      backward_row_stage_1_once(saved_variance_value, inverse_root_value);
      if (first < rows) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
          const bool is_here = i < end;
          if (!is_here) continue;
          d_out_in[p] = d_out_next[slot * 4096 + p * 512];
          x_in[p] = x_next[slot * 4096 + p * 512];
          Sum<double> sums_1_here[2];
#pragma unroll
          for (int lane = 0; lane < kLanes; ++lane) {
            const double d_out_value = widen(d_out_in[p], lane);
            const double x_value = widen(x_in[p], lane);
            const double weight_value = widen(weight_in[p], lane);
            const double bias_value = widen(bias_in[p], lane);
            double total_3_term_value;
            double total_3_term_by_value;
            double total_4_term_value;
            double total_4_term_by_value;
            double carried_value;
            double total_term_value;
            double total_term_by_value;
            double total_2_term_value;
            backward_row_stage_1(d_out_value, x_value, saved_mean_value, inverse_root_value, weight_value,
                bias_value, total_3_term_value, total_3_term_by_value, total_4_term_value,
                total_4_term_by_value, carried_value, total_term_value, total_term_by_value,
                total_2_term_value);
            sums_1_here[0].add(total_3_term_value, total_3_term_by_value);
            sums_1_here[1].add(total_4_term_value, total_4_term_by_value);
            d_out_in[p].at[lane] = carried_value;
            total_sum[p][lane].add(total_term_value, total_term_by_value);
            total_2_sum[p][lane].add(total_2_term_value);
          }
          if (is_here) sums_1[0].merge(sums_1_here[0]);
          if (is_here) sums_1[1].merge(sums_1_here[1]);
          d_out_next[slot * 4096 + p * 512] = d_out_in[p];
        }
      }
      combine<16, true, false>(sums_1, cells[turn++ & 1]);
      if (threadIdx.x == 0) {
        uint64_t* const mine = meeting + ((number & 3) * blocks + rank) * kCells;
        leave(mine + 0, number, sums_1[0].total);
        leave(mine + 2, number, sums_1[1].total);
      }
    }
    const int slot_before = slot == 0 ? 2 : slot - 1;
    if (number > 1) {
      // The row before.
      const Index row = first - stride, base = row * length + begin, end = reach;
      if (is_asking) words[threadIdx.x] = await_word(theirs, number - 1, word);
      for (int i = threadIdx.x + blockDim.x; i < blocks * kCells; i += blockDim.x) {
        words[i] = await_word(theirs + (i - threadIdx.x), number - 1, 0);
      }
      __syncthreads();
      double found[2];
      merge_numbers<Sum<double>, kCells>(words + 0, blocks, found[0]);
      merge_numbers<Sum<double>, kCells>(words + 2, blocks, found[1]);
      const double total_3_value = found[0];
      const double total_4_value = found[1];
      const double saved_mean_value = saved_mean_ahead[0];
      const double saved_variance_value = saved_variance_ahead[0];
      Pack<double, kLanes> d_out_in[kPacks];
      Pack<double, kLanes> x_in[kPacks];
      const int slot = slot_before;
      double product_value;
      double product_2_value;
      backward_row_values_once(total_3_value, saved_variance_value, count_of_inner_value, total_4_value,
          product_value, product_2_value);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
        const bool is_here = i < end;
        if (!is_here) continue;
        d_out_in[p] = d_out_next[slot * 4096 + p * 512];
        x_in[p] = x_next[slot * 4096 + p * 512];
        Pack<double, kLanes> d_x_out;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const double x_value = widen(x_in[p], lane);
          const double carried_value = widen(d_out_in[p], lane);
          double d_x_value;
          backward_row_values(x_value, saved_mean_value, product_value, carried_value, product_2_value,
              d_x_value);
          d_x_out.at[lane] = narrow<double>(d_x_value);
        }
        if (is_here) store(d_x + (base + i), d_x_out);
      }
    }
    if (first + stride < rows) {
      const Index outer = first + stride;
      saved_mean_ahead[2] = widen(saved_mean[outer]);
      saved_variance_ahead[2] = widen(saved_variance[outer]);
    }
    send_row(first + 2 * stride, slot_before);
    saved_mean_ahead[0] = saved_mean_ahead[1], saved_mean_ahead[1] = saved_mean_ahead[2];
    saved_variance_ahead[0] = saved_variance_ahead[1], saved_variance_ahead[1] = saved_variance_ahead[2];
    slot = slot == 2 ? 0 : slot + 1;
  }
  // One partial for each column and team: what threads have of it meets where packs were sent.
  auto* const cells_of_sums = room + 0;
  wait_for_sent<0>();
  __syncthreads();
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = p * blockDim.x * kLanes;
    leave_columns(total_sum[p], cells_of_sums, total_partials + (team * length + i + begin),
        static_cast<int64_t>(reach) - i);
    leave_columns(total_2_sum[p], cells_of_sums, total_2_partials + (team * length + i + begin),
        static_cast<int64_t>(reach) - i);
  }
}

__device__ __forceinline__ void backward_finalise_values(const double total, const double total_2,
    double& d_weight, double& d_bias) {
  d_weight = total;
  d_bias = total_2;
}

// Merges partials into total, total_2; writes d_weight, d_bias.
__global__ void __launch_bounds__(512, 2)
backward_finalise(double* __restrict__ d_weight, double* __restrict__ d_bias,
    const Sum<double>* total_partials, const Sum<double>* total_2_partials, BackwardSizes sizes,
    Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 16];
  const Index columns = sizes.inner.value, strips = (columns + blockDim.x - 1) / blockDim.x;
  const Index above = blockIdx.x / strips, column = blockIdx.x % strips * blockDim.x + threadIdx.x;
  const Index result = above * columns + column;
  const bool is_live = column < columns;
  Sum<double> total_sum;
  Sum<double> total_2_sum;
  constexpr int kAtOnce = 8;
  if (is_live) {
    for (Index first = threadIdx.y; first < slots; first += kAtOnce * blockDim.y) {
      Sum<double> total_next[kAtOnce];
      Sum<double> total_2_next[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const Index slot = first + n * blockDim.y;
        if (slot >= slots) break;
        total_next[n] = total_partials[(above * slots + slot) * columns + column];
        total_2_next[n] = total_2_partials[(above * slots + slot) * columns + column];
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n * blockDim.y >= slots) break;
        total_sum.merge(total_next[n]);
        total_2_sum.merge(total_2_next[n]);
      }
    }
  }
  merge_trees(shared, total_sum, total_2_sum);
  if (threadIdx.y != 0 || !is_live) return;
  const double total_value = static_cast<double>(total_sum.sum());
  const double total_2_value = static_cast<double>(total_2_sum.sum());
  const Index inner = result;
  double d_weight_value;
  double d_bias_value;
  backward_finalise_values(total_value, total_2_value, d_weight_value, d_bias_value);
  d_weight[inner] = narrow<double>(d_weight_value);
  d_bias[inner] = narrow<double>(d_bias_value);
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

// Sets a kernel up while the one before it in the stream ends, where devices can: it waits for that itself.
template <typename... Parameters, typename... Arguments>
static void follow(void (*kernel)(Parameters...), dim3 blocks, dim3 block, int64_t shared_bytes,
    cudaStream_t stream,
    Arguments... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = blocks;
  launch.blockDim = block;
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = stream;
  launch.attrs = &early;
  launch.numAttrs = __CUDA_ARCH_LIST__ >= 900;
  cudaLaunchKernelEx(&launch, kernel, static_cast<Parameters>(arguments)...);
}

// a: x, weight, bias, out, saved_mean, saved_variance, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const double*>(a[0]);
  auto* const weight = reinterpret_cast<const double*>(a[1]);
  auto* const bias = reinterpret_cast<const double*>(a[2]);
  auto* const out = reinterpret_cast<double*>(a[3]);
  auto* const saved_mean = reinterpret_cast<double*>(a[4]);
  auto* const saved_variance = reinterpret_cast<double*>(a[5]);
  const bool is_measuring = a[6] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2] | a[3]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const ForwardSizes sizes{ size_of(a[7]), size_of(a[8]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[10]);
  const int device = static_cast<int>(a[9]);
  const DeviceGuard guard(device);
  const int64_t forward_row_rows = static_cast<int64_t>(sizes.outer.value),
      forward_row_length = static_cast<int64_t>(sizes.inner.value);
  // So many blocks share a row; there are as many such teams as the device works on at once.
  const int64_t forward_row_blocks = ceil_divide(forward_row_length, 2048);
  const dim3 forward_row_block = row_block(ceil_divide(forward_row_length, forward_row_blocks * 4), 256);
  const int64_t forward_row_resident = resident_blocks(forward_row, forward_row_block, 49152, 49152,
      device) / forward_row_blocks;
  const int64_t forward_row_slots = forward_row_rows < forward_row_resident ? forward_row_rows : forward_row_resident;
  if (forward_row_slots == 0) return -static_cast<int64_t>(cudaErrorCooperativeLaunchTooLarge);
  const int64_t forward_row_meeting_cells = forward_row_slots * forward_row_blocks * 16;
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
    cudaLaunchKernelEx(&launch, forward_row, x, weight, bias, out, saved_mean, saved_variance, sizes,
        forward_row_meetings, static_cast<Index>(forward_row_blocks));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, weight, bias, saved_mean, saved_variance, d_out, d_x, d_weight, d_bias, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const double*>(a[0]);
  auto* const weight = reinterpret_cast<const double*>(a[1]);
  auto* const bias = reinterpret_cast<const double*>(a[2]);
  auto* const saved_mean = reinterpret_cast<const double*>(a[3]);
  auto* const saved_variance = reinterpret_cast<const double*>(a[4]);
  auto* const d_out = reinterpret_cast<const double*>(a[5]);
  auto* const d_x = reinterpret_cast<double*>(a[6]);
  auto* const d_weight = reinterpret_cast<double*>(a[7]);
  auto* const d_bias = reinterpret_cast<double*>(a[8]);
  const bool is_measuring = a[9] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2] | a[5] | a[6]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[9])};
  const BackwardSizes sizes{ size_of(a[10]), size_of(a[11]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[13]);
  const int device = static_cast<int>(a[12]);
  const DeviceGuard guard(device);
  const int64_t backward_row_rows = static_cast<int64_t>(sizes.outer.value),
      backward_row_length = static_cast<int64_t>(sizes.inner.value);
  // So many blocks share a row; there are as many such teams as the device works on at once.
  const int64_t backward_row_blocks = ceil_divide(backward_row_length, 2048);
  const dim3 backward_row_block = row_block(ceil_divide(backward_row_length, backward_row_blocks * 4), 256);
  const int64_t backward_row_resident = resident_blocks(backward_row, backward_row_block, 98304, 98304,
      device) / backward_row_blocks;
  const int64_t backward_row_slots = backward_row_rows < backward_row_resident ? backward_row_rows : backward_row_resident;
  if (backward_row_slots == 0) return -static_cast<int64_t>(cudaErrorCooperativeLaunchTooLarge);
  const int64_t backward_row_meeting_cells = backward_row_slots * backward_row_blocks * 16;
  const int64_t total_partials_slots = backward_row_slots;
  const int64_t total_2_partials_slots = backward_row_slots;
  auto* const total_partials = scratch.take<Sum<double>>(static_cast<int64_t>(sizes.inner.value) * total_partials_slots);
  auto* const total_2_partials = scratch.take<Sum<double>>(static_cast<int64_t>(sizes.inner.value) * total_2_partials_slots);
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
    launch.dynamicSmemBytes = 98304;
    launch.stream = stream;
    launch.attrs = &together;
    launch.numAttrs = 1;
    cudaLaunchKernelEx(&launch, backward_row, d_out, x, saved_mean, saved_variance, weight, bias, d_x,
        total_partials, total_2_partials, sizes, backward_row_meetings,
        static_cast<Index>(backward_row_blocks));
  }
  {
    const int64_t columns = static_cast<int64_t>(sizes.inner.value),
        results = static_cast<int64_t>(sizes.inner.value);
    // Threads for all slots of a column, but no more than keep the device at work, and columns beside each other.
    const int64_t slots = total_partials_slots, most_along = power_of_two(ceil_divide(1 << 17, results), 1,
        64);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1, 512 / power_of_two(slots, 1,
        most_along)));
    const dim3 block(width, static_cast<unsigned>(power_of_two(slots, width < 32 ? 32 / width : 1,
        512 / width)));
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    follow(backward_finalise, blocks, block, 0, stream, d_weight, d_bias, total_partials, total_2_partials,
        sizes, static_cast<Index>(slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
