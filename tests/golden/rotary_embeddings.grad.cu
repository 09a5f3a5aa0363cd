// fusegen 0.1.0   chain 97039486bd88   signature forward+backward: cos_operand float32, d_cos_operand float32, d_out float32, d_sin_operand float32, d_x float32, out float32, sin_operand float32, x float32; 32-bit offsets
//   keep(y) | unflatten(-1, (2, -1)) | keep(y_2) | select(-2, 0) | keep(y_3) | recall(y_2) | select(-2, 1) | neg | stack(y_3, dim=-2) | flatten(-2) | mul(sin) | keep(y_4) | recall(y) | mul(cos) | add(y_4)
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

// Positions along axes, as if they lay in memory.
template <typename T>
struct Positions {
  __device__ T operator[](Index i) const { return static_cast<T>(i); }
};

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

template <int N, typename T>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
  using Whole = typename Bits<sizeof(T) * N>::type;
  *reinterpret_cast<Whole*>(to) = *reinterpret_cast<const Whole*>(&pack);
}

// Elements that lie one after the other, a run, with a gap behind it.
struct Pitch {
  Size run;
  Index gap;
};

// A tensor of such runs in the guise of a pointer to one without gaps. No pack that begins at a multiple of its size crosses
// the end of a run.
template <typename T>
struct Pitched {
  T* from;
  Pitch pitch;
  Index at = 0;
  template <typename Offset>
  __device__ __forceinline__ Pitched operator+(Offset offset) const {
    return {from, pitch, at + static_cast<Index>(offset)};
  }
  __device__ __forceinline__ T* here() const { return from + (at + divide(at, pitch.run) * pitch.gap); }
  template <typename Offset>
  __device__ __forceinline__ T& operator[](Offset offset) const {
    return *(*this + offset).here();
  }
};

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load(Pitched<const T> from) {
  return load<N>(from.here());
}

template <int N, typename T>
__device__ __forceinline__ void store(Pitched<T> to, const Pack<T, N>& pack) {
  store(to.here(), pack);
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

// The accumulator of the thread whose number in the warp differs in one bit.
template <template <typename> class Kind, typename T>
__device__ __forceinline__ Kind<T> exchange(Kind<T> mine, int bit) {
  return {__shfl_xor_sync(0xffffffffu, mine.number(), bit)};
}

// The same number, from which everything is found again: conditions that a compiler keeps from one time through a row to
// the next take more instructions than to find them.
[[maybe_unused]] __device__ __forceinline__ float again(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

[[maybe_unused]] __device__ __forceinline__ double again(double x) {
  asm volatile("" : "+d"(x));
  return x;
}

// Merges the accumulators of the threads with the same x, in a fixed order: within warps, then over them.
template <template <typename> class Kind, typename T, int N, int L>
__device__ __forceinline__ void combine_across(Kind<T> (&mine)[N][L], T* cells, T* totals) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, warp = thread / 32,
      warps = blockDim.x * blockDim.y / 32;
  const int width = blockDim.x * N * L;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int lane = 0; lane < L; ++lane) {
      for (int bit = blockDim.x; bit < 32; bit *= 2) mine[n][lane].merge(exchange(mine[n][lane], bit));
      if (thread % 32 < blockDim.x) cells[warp * width + threadIdx.x * N * L + n * L + lane] = mine[n][lane].number();
    }
  }
  __syncthreads();
  for (int i = thread; i < width; i += blockDim.x * blockDim.y) {
    Kind<T> all;
    for (int other = 0; other < warps; ++other) all.merge(Kind<T>{cells[other * width + i]});
    totals[i] = all.number();
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int lane = 0; lane < L; ++lane) mine[n][lane] = {totals[threadIdx.x * N * L + n * L + lane]};
  }
}

struct ForwardSizes {
  Size outer, axis_1, axis_2, inner;
};

__device__ __forceinline__ void forward_column_stage_1(const float position_along, const float x,
    float& total_term, float& total_2_term) {
  total_term = position_along == 1.0f ? x : 0.0f;
  total_2_term = position_along == 0.0f ? x : 0.0f;
}

__device__ __forceinline__ void forward_column_values_once(const float total, float& after_neg) {
  // neg
  after_neg = -total;
}

__device__ __forceinline__ void forward_column_values(const float x, const float cos_operand,
    const float position_along, const float after_neg, const float total_2, const float sin_operand,
    float& out) {
  // stack(y_3, dim=-2)
  const float after_stack = position_along == 0.0f ? after_neg : total_2;
  // mul(sin)
  const float after_mul = after_stack * sin_operand;
  // mul(cos)
  const float after_mul_2 = x * cos_operand;
  // add(y_4)
  out = after_mul_2 + after_mul;
}

// Reads x, position_along by (axis_2), cos_operand by (axis_1, axis_2, inner), sin_operand by (axis_1, axis_2, inner); writes out.
__global__ void __launch_bounds__(128, 4)
forward_column(const float* __restrict__ x, const float* __restrict__ cos_operand,
    const float* __restrict__ sin_operand, float* __restrict__ out, ForwardSizes sizes, Size across,
    Index tiles) {
  const Positions<float> position_along{};
  constexpr int kLanes = 4, kPacks = 2;
  const Index length = kPacks, behind = sizes.inner.value;
  // Rows lie beside each other in packs, of which across.value have all before the axis in common.
  const Index packs = sizes.outer.value * sizes.axis_1.value * across.value;
  for (Index tile = blockIdx.x * blockDim.y + threadIdx.y; tile < tiles; tile += gridDim.x * blockDim.y) {
    const Index place = tile * blockDim.x + threadIdx.x, pack = min(place, packs - 1);
    const Index above = divide(pack, across), beside = (pack - above * across.value) * kLanes;
    const bool is_beside = place < packs;
    if (!is_beside) continue;
    const Index base = above * length * behind + beside;
    const Index above_axis_1 = divide(above, sizes.axis_1);
    const Index axis_1 = above - above_axis_1 * sizes.axis_1.value;
    Pack<float, kLanes> x_in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
      if (is_here) x_in[p] = load<kLanes>(x + (base + i * behind));
    }
    Sum<float> sums_1[2][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const Index axis_2 = (is_here ? i : 0);
        const float x_value = widen(x_in[p], lane);
        const float position_along_value = widen(position_along[axis_2]);
        float total_term_value;
        float total_2_term_value;
        forward_column_stage_1(position_along_value, x_value, total_term_value, total_2_term_value);
        if (is_here) sums_1[0][lane].add(total_term_value);
        if (is_here) sums_1[1][lane].add(total_2_term_value);
      }
    }
    float after_neg_beside[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const float total_value = sums_1[0][lane].total;
      float after_neg_value;
      forward_column_values_once(total_value, after_neg_value);
      after_neg_beside[lane] = after_neg_value;
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
      Pack<float, kLanes> out_out;
      Pack<float, kLanes> cos_operand_in;
      Pack<float, kLanes> sin_operand_in;
      {
        const Index axis_2 = (is_here ? i : 0);
        const Index inner = beside;
        cos_operand_in = load<kLanes>(cos_operand + (((axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner));
        sin_operand_in = load<kLanes>(sin_operand + (((axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner));
      }
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const Index axis_2 = (is_here ? i : 0);
        const float total_2_value = sums_1[1][lane].total;
        const float x_value = again(widen(x_in[p], lane));
        const float cos_operand_value = widen(cos_operand_in, lane);
        const float sin_operand_value = widen(sin_operand_in, lane);
        const float position_along_value = widen(position_along[axis_2]);
        float out_value;
        const float after_neg_value = after_neg_beside[lane];
        forward_column_values(x_value, cos_operand_value, position_along_value, after_neg_value,
            total_2_value, sin_operand_value, out_value);
        out_out.at[lane] = narrow<float>(out_value);
      }
      if (is_here) store(out + (base + i * behind), out_out);
    }
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
  Pitch pieces_1_pitch;
};

__device__ __forceinline__ void backward_column_stage_1(const float x_at_1, const float d_out_at_0,
    const float d_out_at_1, const float x_at_0, const float cos_operand_at_0, const float sin_operand_at_1,
    const float cos_operand_at_1, const float sin_operand_at_0, float& total_term, float& total_term_by,
    float& total_2_term, float& total_2_term_by, float& total_3_term, float& total_3_term_by,
    float& total_4_term, float& total_4_term_by, float& carried_d_after_unflatten,
    float& carried_d_after_unflatten_2) {
  // backward, down to flatten(-2)
  const float d_after_flatten = d_out_at_0 * sin_operand_at_0;
  // backward, down to flatten(-2)
  const float d_after_flatten_2 = d_out_at_1 * sin_operand_at_1;
  // backward, down to unflatten(-1, (2, -1))
  // backward, down to unflatten(-1, (2, -1))
  total_term = x_at_1;
  total_term_by = d_out_at_0;
  total_2_term = d_out_at_1;
  total_2_term_by = x_at_0;
  total_3_term = d_out_at_0;
  total_3_term_by = x_at_0;
  total_4_term = d_out_at_1;
  total_4_term_by = x_at_1;
  carried_d_after_unflatten = fmaf(d_out_at_0, cos_operand_at_0, d_after_flatten_2);
  carried_d_after_unflatten_2 = fmaf(d_out_at_1, cos_operand_at_1, -d_after_flatten);
}

__device__ __forceinline__ void backward_column_values(const float carried_d_after_unflatten,
    const float carried_d_after_unflatten_2, float& d_x_at_0, float& d_x_at_1) {
  d_x_at_0 = carried_d_after_unflatten;
  d_x_at_1 = carried_d_after_unflatten_2;
}

__device__ __forceinline__ void backward_column_row_values(const float total, const float total_2,
    const float total_3, const float total_4, float& d_sin_operand_at_0, float& d_sin_operand_at_1,
    float& d_cos_operand_at_0, float& d_cos_operand_at_1) {
  d_sin_operand_at_0 = -total;
  d_sin_operand_at_1 = total_2;
  d_cos_operand_at_0 = total_3;
  d_cos_operand_at_1 = total_4;
}

// Reads x_at_1, d_out_at_0, d_out_at_1, x_at_0, sin_operand_at_1 by (middle, inner), cos_operand_at_0 by (middle, inner), cos_operand_at_1 by (middle, inner), sin_operand_at_0 by (middle, inner); writes d_x_at_0, d_x_at_1, d_sin_operand_at_0, d_sin_operand_at_1, d_cos_operand_at_0, d_cos_operand_at_1.
__global__ void __launch_bounds__(256, 2)
backward_column(const float* __restrict__ x_at_1_memory, const float* __restrict__ d_out_at_0_memory,
    const float* __restrict__ d_out_at_1_memory, const float* __restrict__ x_at_0_memory,
    const float* __restrict__ sin_operand_at_1_memory, const float* __restrict__ cos_operand_at_0_memory,
    const float* __restrict__ cos_operand_at_1_memory, const float* __restrict__ sin_operand_at_0_memory,
    float* __restrict__ d_x_at_0_memory, float* __restrict__ d_x_at_1_memory,
    float* __restrict__ d_sin_operand_at_0_memory, float* __restrict__ d_sin_operand_at_1_memory,
    float* __restrict__ d_cos_operand_at_0_memory, float* __restrict__ d_cos_operand_at_1_memory,
    BackwardSizes sizes, Size across, Index tiles) {
  const Pitched<const float> x_at_1{x_at_1_memory, sizes.pieces_1_pitch};
  const Pitched<const float> d_out_at_0{d_out_at_0_memory, sizes.pieces_1_pitch};
  const Pitched<const float> d_out_at_1{d_out_at_1_memory, sizes.pieces_1_pitch};
  const Pitched<const float> x_at_0{x_at_0_memory, sizes.pieces_1_pitch};
  const Pitched<const float> sin_operand_at_1{sin_operand_at_1_memory, sizes.pieces_1_pitch};
  const Pitched<const float> cos_operand_at_0{cos_operand_at_0_memory, sizes.pieces_1_pitch};
  const Pitched<const float> cos_operand_at_1{cos_operand_at_1_memory, sizes.pieces_1_pitch};
  const Pitched<const float> sin_operand_at_0{sin_operand_at_0_memory, sizes.pieces_1_pitch};
  const Pitched<float> d_x_at_0{d_x_at_0_memory, sizes.pieces_1_pitch};
  const Pitched<float> d_x_at_1{d_x_at_1_memory, sizes.pieces_1_pitch};
  const Pitched<float> d_sin_operand_at_0{d_sin_operand_at_0_memory, sizes.pieces_1_pitch};
  const Pitched<float> d_sin_operand_at_1{d_sin_operand_at_1_memory, sizes.pieces_1_pitch};
  const Pitched<float> d_cos_operand_at_0{d_cos_operand_at_0_memory, sizes.pieces_1_pitch};
  const Pitched<float> d_cos_operand_at_1{d_cos_operand_at_1_memory, sizes.pieces_1_pitch};
  constexpr int kLanes = 4, kPacks = 4;
  __shared__ float cells[4096], totals[256];
  const Index length = sizes.outer.value, behind = sizes.middle.value * sizes.inner.value;
  // Rows lie beside each other in packs, of which across.value have all before the axis in common.
  const Index packs = 1 * across.value;
  // So many threads have all of a row, as many packs each.
  const Index along = length / kPacks, y = min(threadIdx.y, along - 1), step = along * behind;
  for (Index tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Index place = tile * blockDim.x + threadIdx.x, pack = min(place, packs - 1);
    const Index above = divide(pack, across), beside = (pack - above * across.value) * kLanes;
    const bool is_beside = place < packs;
    [[maybe_unused]] const bool is_here = is_beside && threadIdx.y < along;
    const Index base = above * length * behind + y * behind + beside;
    Pack<float, kLanes> x_at_1_in[kPacks];
    Pack<float, kLanes> d_out_at_0_in[kPacks];
    Pack<float, kLanes> d_out_at_1_in[kPacks];
    Pack<float, kLanes> x_at_0_in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p * along + y;
      x_at_1_in[p] = load<kLanes>(x_at_1 + (base + p * step));
      d_out_at_0_in[p] = load<kLanes>(d_out_at_0 + (base + p * step));
      d_out_at_1_in[p] = load<kLanes>(d_out_at_1 + (base + p * step));
      x_at_0_in[p] = load<kLanes>(x_at_0 + (base + p * step));
    }
    float sin_operand_at_1_here[kLanes];
    float cos_operand_at_0_here[kLanes];
    float cos_operand_at_1_here[kLanes];
    float sin_operand_at_0_here[kLanes];
    {
      const Index above_inner = divide(beside, sizes.inner);
      const Index inner = beside - above_inner * sizes.inner.value;
      const Index middle = above_inner;
      const auto sin_operand_at_1_in = load<kLanes>(sin_operand_at_1 + ((middle) * sizes.inner.value + inner));
      const auto cos_operand_at_0_in = load<kLanes>(cos_operand_at_0 + ((middle) * sizes.inner.value + inner));
      const auto cos_operand_at_1_in = load<kLanes>(cos_operand_at_1 + ((middle) * sizes.inner.value + inner));
      const auto sin_operand_at_0_in = load<kLanes>(sin_operand_at_0 + ((middle) * sizes.inner.value + inner));
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        sin_operand_at_1_here[lane] = widen(sin_operand_at_1_in, lane);
        cos_operand_at_0_here[lane] = widen(cos_operand_at_0_in, lane);
        cos_operand_at_1_here[lane] = widen(cos_operand_at_1_in, lane);
        sin_operand_at_0_here[lane] = widen(sin_operand_at_0_in, lane);
      }
    }
    Sum<float> sums_1[4][kLanes];
    float carried_d_after_unflatten[kPacks][kLanes];
    float carried_d_after_unflatten_2[kPacks][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p * along + y;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_at_1_value = widen(x_at_1_in[p], lane);
        const float d_out_at_0_value = widen(d_out_at_0_in[p], lane);
        const float d_out_at_1_value = widen(d_out_at_1_in[p], lane);
        const float x_at_0_value = widen(x_at_0_in[p], lane);
        const float sin_operand_at_1_value = sin_operand_at_1_here[lane];
        const float cos_operand_at_0_value = cos_operand_at_0_here[lane];
        const float cos_operand_at_1_value = cos_operand_at_1_here[lane];
        const float sin_operand_at_0_value = sin_operand_at_0_here[lane];
        float total_term_value;
        float total_term_by_value;
        float total_2_term_value;
        float total_2_term_by_value;
        float total_3_term_value;
        float total_3_term_by_value;
        float total_4_term_value;
        float total_4_term_by_value;
        float carried_d_after_unflatten_value;
        float carried_d_after_unflatten_2_value;
        backward_column_stage_1(x_at_1_value, d_out_at_0_value, d_out_at_1_value, x_at_0_value,
            cos_operand_at_0_value, sin_operand_at_1_value, cos_operand_at_1_value, sin_operand_at_0_value,
            total_term_value, total_term_by_value, total_2_term_value, total_2_term_by_value,
            total_3_term_value, total_3_term_by_value, total_4_term_value, total_4_term_by_value,
            carried_d_after_unflatten_value, carried_d_after_unflatten_2_value);
        sums_1[0][lane].add(total_term_value, total_term_by_value);
        sums_1[1][lane].add(total_2_term_value, total_2_term_by_value);
        sums_1[2][lane].add(total_3_term_value, total_3_term_by_value);
        sums_1[3][lane].add(total_4_term_value, total_4_term_by_value);
        carried_d_after_unflatten[p][lane] = carried_d_after_unflatten_value;
        carried_d_after_unflatten_2[p][lane] = carried_d_after_unflatten_2_value;
      }
    }
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!is_here) sums_1[0][lane] = {};
      if (!is_here) sums_1[1][lane] = {};
      if (!is_here) sums_1[2][lane] = {};
      if (!is_here) sums_1[3][lane] = {};
    }
    combine_across(sums_1, cells, totals);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p * along + y;
      Pack<float, kLanes> d_x_at_0_out;
      Pack<float, kLanes> d_x_at_1_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float carried_d_after_unflatten_value = carried_d_after_unflatten[p][lane];
        const float carried_d_after_unflatten_2_value = carried_d_after_unflatten_2[p][lane];
        float d_x_at_0_value;
        float d_x_at_1_value;
        backward_column_values(carried_d_after_unflatten_value, carried_d_after_unflatten_2_value,
            d_x_at_0_value, d_x_at_1_value);
        d_x_at_0_out.at[lane] = narrow<float>(d_x_at_0_value);
        d_x_at_1_out.at[lane] = narrow<float>(d_x_at_1_value);
      }
      if (is_here) store(d_x_at_0 + (base + p * step), d_x_at_0_out);
      if (is_here) store(d_x_at_1 + (base + p * step), d_x_at_1_out);
    }
    if (is_beside && threadIdx.y == 0) {
      Pack<float, kLanes> d_sin_operand_at_0_out;
      Pack<float, kLanes> d_sin_operand_at_1_out;
      Pack<float, kLanes> d_cos_operand_at_0_out;
      Pack<float, kLanes> d_cos_operand_at_1_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float total_value = sums_1[0][lane].total;
        const float total_2_value = sums_1[1][lane].total;
        const float total_3_value = sums_1[2][lane].total;
        const float total_4_value = sums_1[3][lane].total;
        float d_sin_operand_at_0_value;
        float d_sin_operand_at_1_value;
        float d_cos_operand_at_0_value;
        float d_cos_operand_at_1_value;
        backward_column_row_values(total_value, total_2_value, total_3_value, total_4_value,
            d_sin_operand_at_0_value, d_sin_operand_at_1_value, d_cos_operand_at_0_value,
            d_cos_operand_at_1_value);
        d_sin_operand_at_0_out.at[lane] = narrow<float>(d_sin_operand_at_0_value);
        d_sin_operand_at_1_out.at[lane] = narrow<float>(d_sin_operand_at_1_value);
        d_cos_operand_at_0_out.at[lane] = narrow<float>(d_cos_operand_at_0_value);
        d_cos_operand_at_1_out.at[lane] = narrow<float>(d_cos_operand_at_1_value);
      }
      const Index above_inner = divide(beside, sizes.inner);
      const Index inner = beside - above_inner * sizes.inner.value;
      const Index middle = above_inner;
      store(d_sin_operand_at_0 + ((middle) * sizes.inner.value + inner), d_sin_operand_at_0_out);
      store(d_sin_operand_at_1 + ((middle) * sizes.inner.value + inner), d_sin_operand_at_1_out);
      store(d_cos_operand_at_0 + ((middle) * sizes.inner.value + inner), d_cos_operand_at_0_out);
      store(d_cos_operand_at_1 + ((middle) * sizes.inner.value + inner), d_cos_operand_at_1_out);
    }
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

// Threads beside each other along x, in whole warps with those along a strided row.
static dim3 column_block(int64_t beside, int64_t along, int64_t most_beside, int64_t most) {
  int64_t x = power_of_two(beside, 1, most_beside);
  while (x > 1 && x * ceil_divide(along, 32 / x) * (32 / x) > most) x /= 2;
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(ceil_divide(along, 32 / x) * (32 / x)));
}

// a: x, sin_operand, cos_operand, out, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const sin_operand = reinterpret_cast<const float*>(a[1]);
  auto* const cos_operand = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2] | a[3]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ size_of(a[5]), size_of(a[6]), size_of(a[7]), size_of(a[8]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[10]);
  const int device = static_cast<int>(a[9]);
  const DeviceGuard guard(device);
  const int64_t forward_column_across = static_cast<int64_t>(sizes.inner.value) / 4,
      forward_column_packs = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * forward_column_across;
  const auto forward_column_beside = static_cast<unsigned>(power_of_two(forward_column_packs, 1, 32));
  const dim3 forward_column_block(forward_column_beside, 128 / forward_column_beside);
  const int64_t forward_column_tiles = ceil_divide(forward_column_packs, forward_column_block.x),
      forward_column_tasks = ceil_divide(forward_column_tiles, forward_column_block.y);
  const int64_t forward_column_slots = forward_column_tasks;
  if (is_measuring) return scratch.used;
  {
    forward_column<<<static_cast<unsigned>(forward_column_slots), forward_column_block, 0, stream>>>(x,
        cos_operand, sin_operand, out, sizes, size_of(forward_column_across),
        static_cast<Index>(forward_column_tiles));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, sin_operand, cos_operand, d_out, d_x, d_sin_operand, d_cos_operand, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const sin_operand = reinterpret_cast<const float*>(a[1]);
  auto* const cos_operand = reinterpret_cast<const float*>(a[2]);
  auto* const d_out = reinterpret_cast<const float*>(a[3]);
  auto* const d_x = reinterpret_cast<float*>(a[4]);
  auto* const d_sin_operand = reinterpret_cast<float*>(a[5]);
  auto* const d_cos_operand = reinterpret_cast<float*>(a[6]);
  const bool is_measuring = a[7] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2] | a[3] | a[4] | a[5] | a[6]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[7])};
  const BackwardSizes sizes{ size_of(a[8]), size_of(a[9]), size_of(a[10]), { size_of(a[10]),
      static_cast<Index>(1 * a[10])} };
  auto* const x_at_0 = x + 0 * a[10];
  auto* const x_at_1 = x + 1 * a[10];
  auto* const sin_operand_at_0 = sin_operand + 0 * a[10];
  auto* const sin_operand_at_1 = sin_operand + 1 * a[10];
  auto* const cos_operand_at_0 = cos_operand + 0 * a[10];
  auto* const cos_operand_at_1 = cos_operand + 1 * a[10];
  auto* const d_out_at_0 = d_out + 0 * a[10];
  auto* const d_out_at_1 = d_out + 1 * a[10];
  auto* const d_x_at_0 = d_x + 0 * a[10];
  auto* const d_x_at_1 = d_x + 1 * a[10];
  auto* const d_sin_operand_at_0 = d_sin_operand + 0 * a[10];
  auto* const d_sin_operand_at_1 = d_sin_operand + 1 * a[10];
  auto* const d_cos_operand_at_0 = d_cos_operand + 0 * a[10];
  auto* const d_cos_operand_at_1 = d_cos_operand + 1 * a[10];
  const auto stream = reinterpret_cast<cudaStream_t>(a[12]);
  const int device = static_cast<int>(a[11]);
  const DeviceGuard guard(device);
  const int64_t backward_column_across = static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value) / 4, backward_column_packs = 1 * backward_column_across;
  const dim3 backward_column_block = column_block(backward_column_packs,
      ceil_divide(static_cast<int64_t>(sizes.outer.value), 4), 16, 256);
  const int64_t backward_column_tiles = ceil_divide(backward_column_packs, backward_column_block.x),
      backward_column_tasks = backward_column_tiles;
  const int64_t backward_column_slots = backward_column_tasks;
  if (is_measuring) return scratch.used;
  {
    backward_column<<<static_cast<unsigned>(backward_column_slots), backward_column_block, 0,
        stream>>>(x_at_1, d_out_at_0, d_out_at_1, x_at_0, sin_operand_at_1, cos_operand_at_0,
        cos_operand_at_1, sin_operand_at_0, d_x_at_0, d_x_at_1, d_sin_operand_at_0, d_sin_operand_at_1,
        d_cos_operand_at_0, d_cos_operand_at_1, sizes, size_of(backward_column_across),
        static_cast<Index>(backward_column_tiles));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
