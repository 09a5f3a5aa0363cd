// fusegen 0.1.0   chain 0fc799c91c80   signature forward+backward: d_out float32, d_scale float32, d_x float32, out float32, picked_x float32, scale float32, winner_index uint8, x float32; 32-bit offsets
//   leaky_relu(0.2) | mul_channel(scale) | leaky_relu(0.2) | max_pool3d(2)
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

// N neighbours, moved by one access that leaves no trace in the caches: every element is used once.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

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

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
  using Whole = typename Bits<sizeof(T) * N>::type;
  Pack<T, N> pack;
  *reinterpret_cast<Whole*>(&pack) = __ldcs(reinterpret_cast<const Whole*>(from));
  return pack;
}

template <int N, typename T>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
  using Whole = typename Bits<sizeof(T) * N>::type;
  __stcs(reinterpret_cast<Whole*>(to), *reinterpret_cast<const Whole*>(&pack));
}

template <typename T>
struct Sum {
  T total = 0;
  __device__ void add(T term) { total += term; }
  template <typename U>
  __device__ void merge(const Sum<U>& other) {
    total += other.total;
  }
  __device__ T sum() const { return total; }
};

// The first maximum and where it stands; a NaN beats every number, as in torch.
template <typename T>
struct Maximum {
  T best = 0;
  int at = -1;
  __device__ void add(T value, int position) {
    if (at < 0 || value > best || value != value) best = value, at = position;
  }
  __device__ T max() const { return best; }
  __device__ int argmax() const { return at; }
};

template <typename T>
struct Picked {
  T value = 0;
  __device__ void add(T candidate, bool is_it) { value = is_it ? candidate : value; }
  __device__ T pick() const { return value; }
};

// Everyone's accumulator merged over the lanes of a row, in a fixed tree; cells of one row lie `stride` apart.
template <typename Accumulator>
__device__ Accumulator combine(const Accumulator& mine, int lane, int lanes, int cell, int stride,
    void* memory) {
  Accumulator* const cells = static_cast<Accumulator*>(memory);
  cells[cell] = mine;
  __syncthreads();
  for (int half = lanes / 2; half > 0; half /= 2) {
    if (lane < half) cells[cell].merge(cells[cell + half * stride]);
    __syncthreads();
  }
  const Accumulator all = cells[cell - lane * stride];
  __syncthreads();
  return all;
}

struct ForwardSizes {
  Size outer, axis_1, axis_2, axis_3, inner, axis_2_unpooled, axis_3_unpooled, inner_unpooled;
};

__device__ __forceinline__ void forward_window_stage_1(const float x, const float scale,
    float& maximum_term) {
  // leaky_relu(0.2)
  const float after_leaky_relu = x > 0.0f ? x : x * 0.2f;
  // mul_channel(scale)
  const float after_mul_channel = after_leaky_relu * scale;
  // leaky_relu(0.2)
  maximum_term = after_mul_channel > 0.0f ? after_mul_channel : after_mul_channel * 0.2f;
}

__device__ __forceinline__ void forward_window_stage_2(const float x, const int winner_index_2,
    float& picked_x_2_term, int& picked_x_2_term_at) {
  picked_x_2_term = x;
  picked_x_2_term_at = winner_index_2;
}

__device__ __forceinline__ void forward_window_row_values(const float maximum, const float picked_x_2,
    const int winner_index_2, float& out, float& picked_x, int& winner_index) {
  out = maximum;
  picked_x = picked_x_2;
  winner_index = winner_index_2;
}

// Reads x, scale by (axis_1); writes out, picked_x, winner_index.
__global__ void __launch_bounds__(256)
forward_window(const float* __restrict__ x, const float* __restrict__ scale, float* __restrict__ out,
    float* __restrict__ picked_x, uint8_t* __restrict__ winner_index, ForwardSizes sizes) {
  const Index results = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.axis_3.value * sizes.inner.value;
  const Index result = static_cast<Index>(blockIdx.x) * 256 + threadIdx.x;
  if (result >= results) return;
  const Index above_inner = divide(result, sizes.inner);
  const Index inner = result - above_inner * sizes.inner.value;
  const Index above_axis_3 = divide(above_inner, sizes.axis_3);
  const Index axis_3 = above_inner - above_axis_3 * sizes.axis_3.value;
  const Index above_axis_2 = divide(above_axis_3, sizes.axis_2);
  const Index axis_2 = above_axis_3 - above_axis_2 * sizes.axis_2.value;
  const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
  const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
  const Index outer = above_axis_1;
  Maximum<float> maximum_sum;
#pragma unroll
  for (int position_value = 0; position_value < 8; ++position_value) {
    const Index above_window_3 = position_value / 2;
    const Index window_3 = position_value - above_window_3 * 2;
    const Index above_window_2 = above_window_3 / 2;
    const Index window_2 = above_window_3 - above_window_2 * 2;
    const Index window_1 = above_window_2;
    const float x_value = widen(x[((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.axis_3_unpooled.value + (axis_3 * 2 + window_2)) * sizes.inner_unpooled.value + (inner * 2 + window_3)]);
    const float scale_value = widen(scale[axis_1]);
    float maximum_term_value;
    forward_window_stage_1(x_value, scale_value, maximum_term_value);
    maximum_sum.add(maximum_term_value, position_value);
  }
  const float maximum_value = maximum_sum.max();
  const int winner_index_2_value = maximum_sum.argmax();
  Picked<float> picked_x_2_sum;
#pragma unroll
  for (int position_value = 0; position_value < 8; ++position_value) {
    const Index above_window_3 = position_value / 2;
    const Index window_3 = position_value - above_window_3 * 2;
    const Index above_window_2 = above_window_3 / 2;
    const Index window_2 = above_window_3 - above_window_2 * 2;
    const Index window_1 = above_window_2;
    const float x_value = widen(x[((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.axis_3_unpooled.value + (axis_3 * 2 + window_2)) * sizes.inner_unpooled.value + (inner * 2 + window_3)]);
    float picked_x_2_term_value;
    int picked_x_2_term_at_value;
    forward_window_stage_2(x_value, winner_index_2_value, picked_x_2_term_value, picked_x_2_term_at_value);
    picked_x_2_sum.add(picked_x_2_term_value, picked_x_2_term_at_value == position_value);
  }
  const float picked_x_2_value = picked_x_2_sum.pick();
  float out_value;
  float picked_x_value;
  int winner_index_value;
  forward_window_row_values(maximum_value, picked_x_2_value, winner_index_2_value, out_value, picked_x_value,
      winner_index_value);
  out[((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner] = narrow<float>(out_value);
  picked_x[((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner] = narrow<float>(picked_x_value);
  winner_index[((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner] = narrow<uint8_t>(winner_index_value);
}

struct BackwardSizes {
  Size outer, axis_1, axis_2, axis_3, inner, axis_2_unpooled, axis_3_unpooled, inner_unpooled;
};

__device__ __forceinline__ void backward_window_values(const int position, const int winner_index,
    const float picked_x, const float scale, const float d_out, float& d_x) {
  const bool is_above = picked_x > 0.0f;
  const float chosen = (is_above ? picked_x : picked_x * 0.2f) * scale > 0.0f ? d_out : d_out * 0.2f;
  const float product = chosen * scale;
  d_x = position == winner_index ? (is_above ? product : product * 0.2f) : 0.0f;
}

// Reads winner_index by (outer, axis_1, axis_2, axis_3, inner), picked_x by (outer, axis_1, axis_2, axis_3, inner), scale by (axis_1), d_out by (outer, axis_1, axis_2, axis_3, inner); writes d_x.
__global__ void __launch_bounds__(256)
backward_window(const uint8_t* __restrict__ winner_index, const float* __restrict__ picked_x,
    const float* __restrict__ scale, const float* __restrict__ d_out, float* __restrict__ d_x,
    BackwardSizes sizes) {
  const Index results = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.axis_3.value * sizes.inner.value;
  const Index result = static_cast<Index>(blockIdx.x) * 256 + threadIdx.x;
  if (result >= results) return;
  const Index above_inner = divide(result, sizes.inner);
  const Index inner = result - above_inner * sizes.inner.value;
  const Index above_axis_3 = divide(above_inner, sizes.axis_3);
  const Index axis_3 = above_inner - above_axis_3 * sizes.axis_3.value;
  const Index above_axis_2 = divide(above_axis_3, sizes.axis_2);
  const Index axis_2 = above_axis_3 - above_axis_2 * sizes.axis_2.value;
  const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
  const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
  const Index outer = above_axis_1;
#pragma unroll
  for (int position_value = 0; position_value < 8; ++position_value) {
    const Index above_window_3 = position_value / 2;
    const Index window_3 = position_value - above_window_3 * 2;
    const Index above_window_2 = above_window_3 / 2;
    const Index window_2 = above_window_3 - above_window_2 * 2;
    const Index window_1 = above_window_2;
    const int winner_index_value = widen(winner_index[((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner]);
    const float picked_x_value = widen(picked_x[((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner]);
    const float scale_value = widen(scale[axis_1]);
    const float d_out_value = widen(d_out[((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner]);
    float d_x_value;
    backward_window_values(position_value, winner_index_value, picked_x_value, scale_value, d_out_value,
        d_x_value);
    d_x[((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.axis_3_unpooled.value + (axis_3 * 2 + window_2)) * sizes.inner_unpooled.value + (inner * 2 + window_3)] = narrow<float>(d_x_value);
  }
}

__device__ __forceinline__ void backward_inner_values(const float picked_x, const float scale,
    const float d_out, float& total_term) {
  const float chosen = picked_x > 0.0f ? picked_x : picked_x * 0.2f;
  total_term = (chosen * scale > 0.0f ? d_out : d_out * 0.2f) * chosen;
}

// Reads picked_x, d_out, scale by (axis_1); leaves partials of total.
__global__ void __launch_bounds__(256)
backward_inner(const float* __restrict__ picked_x, const float* __restrict__ scale,
    const float* __restrict__ d_out, Sum<float>* __restrict__ total_partials, BackwardSizes sizes,
    Index rows, Index pieces, Index piece_length) {
  constexpr int kLanes = 4, kPacks = 2;
  __shared__ alignas(16) unsigned char shared[256 * 4];
  const Index task = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool is_live = task < rows * pieces;
  const Index row = is_live ? task / pieces : 0, piece = is_live ? task % pieces : 0;
  const Index above_axis_3 = divide(row, sizes.axis_3);
  const Index axis_3 = row - above_axis_3 * sizes.axis_3.value;
  const Index above_axis_2 = divide(above_axis_3, sizes.axis_2);
  const Index axis_2 = above_axis_3 - above_axis_2 * sizes.axis_2.value;
  const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
  const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
  const Index outer = above_axis_1;
  const float scale_value = widen(scale[axis_1]);
  Sum<float> total_sum;
  const auto element = [&](Index inner, float picked_x_value, float d_out_value) {
    float total_term_value;
    backward_inner_values(picked_x_value, scale_value, d_out_value, total_term_value);
    total_sum.add(total_term_value);
  };
  if (is_live) {
    const Index length = sizes.inner.value, base = row * length;
    const Index begin = base + piece * piece_length, end = min(begin + piece_length, base + length);
    // Packs start at multiples of their size; what stands before and behind them goes one by one.
    const Index head = min(end, (begin + kLanes - 1) / kLanes * kLanes);
    const Index packs = (end - head) / kLanes, tail = head + packs * kLanes;
    if (threadIdx.x < (head - begin) + (end - tail)) {
      const Index i = threadIdx.x < head - begin ? begin + threadIdx.x : tail + threadIdx.x - (head - begin);
      element(i - base, widen(picked_x[i]), widen(d_out[i]));
    }
    for (Index from = threadIdx.x; from < packs; from += blockDim.x * kPacks) {
      Pack<float, kLanes> picked_x_in[kPacks];
      Pack<float, kLanes> d_out_in[kPacks];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
        picked_x_in[p] = load<kLanes>(picked_x + i);
        d_out_in[p] = load<kLanes>(d_out + i);
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          element(i + lane - base, widen(picked_x_in[p].at[lane]), widen(d_out_in[p].at[lane]));
        }
      }
    }
  }
  total_sum = combine(total_sum, threadIdx.x, blockDim.x, threadIdx.y * blockDim.x + threadIdx.x, 1, shared);
  if (is_live && threadIdx.x == 0) {
    total_partials[(axis_1) * (sizes.outer.value * sizes.axis_2.value * sizes.axis_3.value * pieces) + (((outer) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * pieces + piece] = total_sum;
  }
}

__device__ __forceinline__ void backward_finalise_values(const float total, float& d_scale) {
  d_scale = total;
}

// Merges partials into total; writes d_scale.
__global__ void __launch_bounds__(256)
backward_finalise(float* __restrict__ d_scale, const Sum<float>* __restrict__ total_partials,
    BackwardSizes sizes, Index slots) {
  __shared__ alignas(16) unsigned char shared[256 * 8];
  const Index columns = 1, strips = (columns + blockDim.x - 1) / blockDim.x;
  const Index above = blockIdx.x / strips, column = blockIdx.x % strips * blockDim.x + threadIdx.x;
  Sum<double> total_sum;
  if (column < columns) {
    for (Index slot = threadIdx.y; slot < slots; slot += blockDim.y) {
      total_sum.merge(total_partials[(above * slots + slot) * columns + column]);
    }
  }
  total_sum = combine(total_sum, threadIdx.y, blockDim.y, threadIdx.y * blockDim.x + threadIdx.x, blockDim.x,
      shared);
  if (threadIdx.y != 0 || column >= columns) return;
  const float total_value = static_cast<float>(total_sum.sum());
  const Index result = above * columns + column;
  const Index axis_1 = result;
  float d_scale_value;
  backward_finalise_values(total_value, d_scale_value);
  d_scale[axis_1] = narrow<float>(d_scale_value);
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

// a: x, scale, out, picked_x, winner_index, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, axis_3, inner, axis_2_unpooled, axis_3_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const scale = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  auto* const picked_x = reinterpret_cast<float*>(a[3]);
  auto* const winner_index = reinterpret_cast<uint8_t*>(a[4]);
  const bool is_measuring = a[5] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const ForwardSizes sizes{ size_of(a[6]), size_of(a[7]), size_of(a[8]), size_of(a[9]), size_of(a[10]),
      size_of(a[11]), size_of(a[12]), size_of(a[13]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[15]);
  if (is_measuring) return scratch.used;
  const DeviceGuard guard(static_cast<int>(a[14]));
  {
    const auto blocks = static_cast<unsigned>(ceil_divide(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.axis_3.value) * static_cast<int64_t>(sizes.inner.value), 256));
    forward_window<<<blocks, 256, 0, stream>>>(x, scale, out, picked_x, winner_index, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: scale, picked_x, winner_index, d_out, d_x, d_scale, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, axis_3, inner, axis_2_unpooled, axis_3_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const scale = reinterpret_cast<const float*>(a[0]);
  auto* const picked_x = reinterpret_cast<const float*>(a[1]);
  auto* const winner_index = reinterpret_cast<const uint8_t*>(a[2]);
  auto* const d_out = reinterpret_cast<const float*>(a[3]);
  auto* const d_x = reinterpret_cast<float*>(a[4]);
  auto* const d_scale = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  if (!is_measuring && ((a[1] | a[3]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const BackwardSizes sizes{ size_of(a[7]), size_of(a[8]), size_of(a[9]), size_of(a[10]), size_of(a[11]),
      size_of(a[12]), size_of(a[13]), size_of(a[14]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[16]);
  const int64_t backward_inner_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.axis_3.value), backward_inner_length = static_cast<int64_t>(sizes.inner.value);
  const int64_t backward_inner_pieces = ceil_divide(backward_inner_length, 8192);
  const int64_t total_partials_slots = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.axis_3.value) * backward_inner_pieces;
  auto* const total_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.axis_1.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  const DeviceGuard guard(static_cast<int>(a[15]));
  {
    const auto blocks = static_cast<unsigned>(ceil_divide(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.axis_3.value) * static_cast<int64_t>(sizes.inner.value), 256));
    backward_window<<<blocks, 256, 0, stream>>>(winner_index, picked_x, scale, d_out, d_x, sizes);
  }
  {
    const int64_t piece_length = ceil_divide(backward_inner_length, backward_inner_pieces);
    const auto lanes = static_cast<unsigned>(power_of_two(ceil_divide(piece_length, 8), 32, 256));
    const dim3 block(lanes, 256 / lanes);
    const auto blocks = static_cast<unsigned>(ceil_divide(backward_inner_rows * backward_inner_pieces,
        block.y));
    backward_inner<<<blocks, block, 0, stream>>>(picked_x, scale, d_out, total_partials, sizes,
        static_cast<Index>(backward_inner_rows), static_cast<Index>(backward_inner_pieces),
        static_cast<Index>(piece_length));
  }
  {
    const int64_t columns = 1, results = static_cast<int64_t>(sizes.axis_1.value);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1, 32));
    const dim3 block(width, 256 / width);
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    backward_finalise<<<blocks, block, 0, stream>>>(d_scale, total_partials, sizes,
        static_cast<Index>(total_partials_slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
