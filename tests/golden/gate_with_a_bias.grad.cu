// fusegen 0.1.0   chain 2a0ebff5ca2c   signature forward+backward: b_operand float32, d_b_operand float32, d_out float32, d_x float32, out float32, x float32; 32-bit offsets
//   add(b) | unflatten(-1, (2, -1)) | keep(y) | select(-2, 0) | keep(y_2) | recall(y) | select(-2, 1) | sigmoid | mul(y_2)
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

// 1 / (1 + exp(-x)) without a division's branch for what cannot come: an inverse and a step of Newton's, both terms times
// 2^-24, as the inverse of what is above 2^126 would be flushed to zero.
[[maybe_unused]] __device__ __forceinline__ float sigmoid(float x) {
  const float sum = fmaf(expf(-x), 0x1p-24f, 0x1p-24f);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(sum));
  const float better = fmaf(fmaf(-sum, inverse, 1.0f), inverse, inverse);
  return (sum > 0x1p126f ? inverse : better) * 0x1p-24f;
}

[[maybe_unused]] __device__ __forceinline__ double sigmoid(double x) { return 1 / (1 + exp(-x)); }

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
  Size outer, middle, inner;
};

__device__ __forceinline__ void forward_column_stage_1(const float position_along, const float x,
    const float b_operand, float& total_term, float& total_2_term) {
  // add(b)
  const float after_add = x + b_operand;
  total_term = position_along == 1.0f ? after_add : 0.0f;
  total_2_term = position_along == 0.0f ? after_add : 0.0f;
}

__device__ __forceinline__ void forward_column_row_values(const float total, const float total_2,
    float& out) {
  // sigmoid
  const float after_sigmoid = sigmoid(total);
  // mul(y_2)
  out = after_sigmoid * total_2;
}

// Reads x, position_along by (middle), b_operand by (middle, inner); writes out.
__global__ void __launch_bounds__(128, 4)
forward_column(const float* __restrict__ x, const float* __restrict__ b_operand, float* __restrict__ out,
    ForwardSizes sizes, Size across, Index tiles) {
  const Positions<float> position_along{};
  constexpr int kLanes = 4, kPacks = 2;
  const Index length = kPacks, behind = sizes.inner.value;
  // Rows lie beside each other in packs, of which across.value have all before the axis in common.
  const Index packs = sizes.outer.value * across.value;
  for (Index tile = blockIdx.x * blockDim.y + threadIdx.y; tile < tiles; tile += gridDim.x * blockDim.y) {
    const Index place = tile * blockDim.x + threadIdx.x, pack = min(place, packs - 1);
    const Index above = divide(pack, across), beside = (pack - above * across.value) * kLanes;
    const bool is_beside = place < packs;
    if (!is_beside) continue;
    const Index base = above * length * behind + beside;
    const Index outer = above;
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
      Pack<float, kLanes> b_operand_in;
      {
        const Index middle = (is_here ? i : 0);
        const Index inner = beside;
        b_operand_in = load<kLanes>(b_operand + ((middle) * sizes.inner.value + inner));
      }
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const Index middle = (is_here ? i : 0);
        const float x_value = widen(x_in[p], lane);
        const float b_operand_value = widen(b_operand_in, lane);
        const float position_along_value = widen(position_along[middle]);
        float total_term_value;
        float total_2_term_value;
        forward_column_stage_1(position_along_value, x_value, b_operand_value, total_term_value,
            total_2_term_value);
        sums_1[0][lane].add_if(is_here, total_term_value);
        sums_1[1][lane].add_if(is_here, total_2_term_value);
      }
    }
    {
      Pack<float, kLanes> out_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float total_value = sums_1[0][lane].total;
        const float total_2_value = sums_1[1][lane].total;
        float out_value;
        forward_column_row_values(total_value, total_2_value, out_value);
        out_out.at[lane] = narrow<float>(out_value);
      }
      const Index inner = beside;
      store(out + ((outer) * sizes.inner.value + inner), out_out);
    }
  }
}

struct BackwardSizes {
  Size outer, inner;
  Pitch pieces_1_pitch;
};

__device__ __forceinline__ void backward_column_stage_1(const float d_out, const float x_at_1,
    const float b_operand_at_1, const float x_at_0, const float b_operand_at_0, float& total_term,
    float& total_term_by, float& total_2_term, float& total_2_term_by, float& carried_d_after_add,
    float& carried_d_after_add_2) {
  // add(b)
  const float after_add = x_at_0 + b_operand_at_0;
  // add(b)
  const float after_add_2 = x_at_1 + b_operand_at_1;
  // sigmoid
  const float after_sigmoid = sigmoid(after_add_2);
  // backward, down to sigmoid
  const float d_after_sigmoid = d_out * after_add;
  // backward, down to select(-2, 1)
  // backward, down to select(-2, 0)
  // backward, down to unflatten(-1, (2, -1))
  // backward, down to unflatten(-1, (2, -1))
  // backward, down to add(b)
  // backward, down to add(b)
  total_term = d_out;
  total_term_by = after_sigmoid;
  total_2_term = d_after_sigmoid * (1.0f - after_sigmoid);
  total_2_term_by = after_sigmoid;
  carried_d_after_add = d_out * after_sigmoid;
  carried_d_after_add_2 = total_2_term * after_sigmoid;
}

__device__ __forceinline__ void backward_column_values(const float carried_d_after_add,
    const float carried_d_after_add_2, float& d_x_at_0, float& d_x_at_1) {
  d_x_at_0 = carried_d_after_add;
  d_x_at_1 = carried_d_after_add_2;
}

__device__ __forceinline__ void backward_column_row_values(const float total, const float total_2,
    float& d_b_operand_at_0, float& d_b_operand_at_1) {
  d_b_operand_at_0 = total;
  d_b_operand_at_1 = total_2;
}

// Reads d_out, x_at_1, x_at_0, b_operand_at_1 by (inner), b_operand_at_0 by (inner); writes d_x_at_0, d_x_at_1, d_b_operand_at_0, d_b_operand_at_1.
__global__ void __launch_bounds__(256, 2)
backward_column(const float* __restrict__ d_out, const float* __restrict__ x_at_1_memory,
    const float* __restrict__ b_operand_at_1, const float* __restrict__ x_at_0_memory,
    const float* __restrict__ b_operand_at_0, float* __restrict__ d_x_at_0_memory,
    float* __restrict__ d_x_at_1_memory, float* __restrict__ d_b_operand_at_0,
    float* __restrict__ d_b_operand_at_1, BackwardSizes sizes, Size across, Index tiles) {
  const Pitched<const float> x_at_1{x_at_1_memory, sizes.pieces_1_pitch};
  const Pitched<const float> x_at_0{x_at_0_memory, sizes.pieces_1_pitch};
  const Pitched<float> d_x_at_0{d_x_at_0_memory, sizes.pieces_1_pitch};
  const Pitched<float> d_x_at_1{d_x_at_1_memory, sizes.pieces_1_pitch};
  constexpr int kLanes = 4, kPacks = 4;
  __shared__ float cells[2048], totals[128];
  const Index length = sizes.outer.value, behind = sizes.inner.value;
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
    Pack<float, kLanes> d_out_in[kPacks];
    Pack<float, kLanes> x_at_1_in[kPacks];
    Pack<float, kLanes> x_at_0_in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p * along + y;
      d_out_in[p] = load<kLanes>(d_out + (base + p * step));
      x_at_1_in[p] = load<kLanes>(x_at_1 + (base + p * step));
      x_at_0_in[p] = load<kLanes>(x_at_0 + (base + p * step));
    }
    float b_operand_at_1_here[kLanes];
    float b_operand_at_0_here[kLanes];
    {
      const Index inner = beside;
      const auto b_operand_at_1_in = load<kLanes>(b_operand_at_1 + (inner));
      const auto b_operand_at_0_in = load<kLanes>(b_operand_at_0 + (inner));
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        b_operand_at_1_here[lane] = widen(b_operand_at_1_in, lane);
        b_operand_at_0_here[lane] = widen(b_operand_at_0_in, lane);
      }
    }
    Sum<float> sums_1[2][kLanes];
    float carried_d_after_add[kPacks][kLanes];
    float carried_d_after_add_2[kPacks][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p * along + y;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float d_out_value = widen(d_out_in[p], lane);
        const float x_at_1_value = widen(x_at_1_in[p], lane);
        const float x_at_0_value = widen(x_at_0_in[p], lane);
        const float b_operand_at_1_value = b_operand_at_1_here[lane];
        const float b_operand_at_0_value = b_operand_at_0_here[lane];
        float total_term_value;
        float total_term_by_value;
        float total_2_term_value;
        float total_2_term_by_value;
        float carried_d_after_add_value;
        float carried_d_after_add_2_value;
        backward_column_stage_1(d_out_value, x_at_1_value, b_operand_at_1_value, x_at_0_value,
            b_operand_at_0_value, total_term_value, total_term_by_value, total_2_term_value,
            total_2_term_by_value, carried_d_after_add_value, carried_d_after_add_2_value);
        sums_1[0][lane].add(total_term_value, total_term_by_value);
        sums_1[1][lane].add(total_2_term_value, total_2_term_by_value);
        carried_d_after_add[p][lane] = carried_d_after_add_value;
        carried_d_after_add_2[p][lane] = carried_d_after_add_2_value;
      }
    }
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!is_here) sums_1[0][lane] = {};
      if (!is_here) sums_1[1][lane] = {};
    }
    combine_across(sums_1, cells, totals);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p * along + y;
      Pack<float, kLanes> d_x_at_0_out;
      Pack<float, kLanes> d_x_at_1_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float carried_d_after_add_value = carried_d_after_add[p][lane];
        const float carried_d_after_add_2_value = carried_d_after_add_2[p][lane];
        float d_x_at_0_value;
        float d_x_at_1_value;
        backward_column_values(carried_d_after_add_value, carried_d_after_add_2_value, d_x_at_0_value,
            d_x_at_1_value);
        d_x_at_0_out.at[lane] = narrow<float>(d_x_at_0_value);
        d_x_at_1_out.at[lane] = narrow<float>(d_x_at_1_value);
      }
      if (is_here) store(d_x_at_0 + (base + p * step), d_x_at_0_out);
      if (is_here) store(d_x_at_1 + (base + p * step), d_x_at_1_out);
    }
    if (is_beside && threadIdx.y == 0) {
      Pack<float, kLanes> d_b_operand_at_0_out;
      Pack<float, kLanes> d_b_operand_at_1_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float total_value = sums_1[0][lane].total;
        const float total_2_value = sums_1[1][lane].total;
        float d_b_operand_at_0_value;
        float d_b_operand_at_1_value;
        backward_column_row_values(total_value, total_2_value, d_b_operand_at_0_value,
            d_b_operand_at_1_value);
        d_b_operand_at_0_out.at[lane] = narrow<float>(d_b_operand_at_0_value);
        d_b_operand_at_1_out.at[lane] = narrow<float>(d_b_operand_at_1_value);
      }
      const Index inner = beside;
      store(d_b_operand_at_0 + (inner), d_b_operand_at_0_out);
      store(d_b_operand_at_1 + (inner), d_b_operand_at_1_out);
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

// a: x, b_operand, out, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const b_operand = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ size_of(a[4]), size_of(a[5]), size_of(a[6]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[8]);
  const int device = static_cast<int>(a[7]);
  const DeviceGuard guard(device);
  const int64_t forward_column_across = static_cast<int64_t>(sizes.inner.value) / 4,
      forward_column_packs = static_cast<int64_t>(sizes.outer.value) * forward_column_across;
  const auto forward_column_beside = static_cast<unsigned>(power_of_two(forward_column_packs, 1, 32));
  const dim3 forward_column_block(forward_column_beside, 128 / forward_column_beside);
  const int64_t forward_column_tiles = ceil_divide(forward_column_packs, forward_column_block.x),
      forward_column_tasks = ceil_divide(forward_column_tiles, forward_column_block.y);
  const int64_t forward_column_slots = forward_column_tasks;
  if (is_measuring) return scratch.used;
  {
    forward_column<<<static_cast<unsigned>(forward_column_slots), forward_column_block, 0, stream>>>(x,
        b_operand, out, sizes, size_of(forward_column_across), static_cast<Index>(forward_column_tiles));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, b_operand, d_out, d_x, d_b_operand, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const b_operand = reinterpret_cast<const float*>(a[1]);
  auto* const d_out = reinterpret_cast<const float*>(a[2]);
  auto* const d_x = reinterpret_cast<float*>(a[3]);
  auto* const d_b_operand = reinterpret_cast<float*>(a[4]);
  const bool is_measuring = a[5] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2] | a[3] | a[4]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const BackwardSizes sizes{ size_of(a[6]), size_of(a[7]), { size_of(a[7]), static_cast<Index>(1 * a[7])} };
  auto* const x_at_0 = x + 0 * a[7];
  auto* const x_at_1 = x + 1 * a[7];
  auto* const b_operand_at_0 = b_operand + 0 * a[7];
  auto* const b_operand_at_1 = b_operand + 1 * a[7];
  auto* const d_x_at_0 = d_x + 0 * a[7];
  auto* const d_x_at_1 = d_x + 1 * a[7];
  auto* const d_b_operand_at_0 = d_b_operand + 0 * a[7];
  auto* const d_b_operand_at_1 = d_b_operand + 1 * a[7];
  const auto stream = reinterpret_cast<cudaStream_t>(a[9]);
  const int device = static_cast<int>(a[8]);
  const DeviceGuard guard(device);
  const int64_t backward_column_across = static_cast<int64_t>(sizes.inner.value) / 4,
      backward_column_packs = 1 * backward_column_across;
  const dim3 backward_column_block = column_block(backward_column_packs,
      ceil_divide(static_cast<int64_t>(sizes.outer.value), 4), 16, 256);
  const int64_t backward_column_tiles = ceil_divide(backward_column_packs, backward_column_block.x),
      backward_column_tasks = backward_column_tiles;
  const int64_t backward_column_slots = backward_column_tasks;
  if (is_measuring) return scratch.used;
  {
    backward_column<<<static_cast<unsigned>(backward_column_slots), backward_column_block, 0,
        stream>>>(d_out, x_at_1, b_operand_at_1, x_at_0, b_operand_at_0, d_x_at_0, d_x_at_1,
        d_b_operand_at_0, d_b_operand_at_1, sizes, size_of(backward_column_across),
        static_cast<Index>(backward_column_tiles));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
