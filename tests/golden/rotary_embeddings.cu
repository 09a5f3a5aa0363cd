// fusegen 0.1.0   chain 97039486bd88   signature forward: cos_operand float32, out float32, sin_operand float32, x float32; 32-bit offsets
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

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
