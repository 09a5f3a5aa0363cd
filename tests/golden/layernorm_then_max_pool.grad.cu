// fusegen 0.1.0   chain c75df2c79737   signature forward+backward: d_out float32, d_x float32, out float32, saved_mean float32, saved_variance float32, winner_index uint8, x float32; 32-bit offsets
//   layernorm | max_pool2d(2)
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

// The first maximum and where it stands; a NaN beats every number, as in torch. It begins as its constructor says, and not
// its members, for nvcc 13.0 does not heed those of arrays of arrays.
template <typename T>
struct Maximum {
  T best;
  int at;
  __device__ Maximum() : best(0), at(-1) {}
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

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct ForwardSizes {
  Size outer, middle, inner, middle_unpooled, inner_unpooled;
};

__device__ __forceinline__ void forward_bundle_stage_1(const float x, float& total_term) {
  total_term = x;
}

__device__ __forceinline__ void forward_bundle_stage_2(const float count_of_window_2_inner, float& held) {
  held = 1.0f / count_of_window_2_inner;
}

__device__ __forceinline__ void forward_bundle_stage_3(const float total, const float held, float& held_2,
    float& held_4, float& held_5) {
  held_2 = total * held;
  held_4 = held_2;
  held_5 = held_2;
}

__device__ __forceinline__ void forward_bundle_stage_4(const float x, const float held_2,
    float& total_2_term, float& total_2_term_by) {
  total_2_term = x - held_2;
  total_2_term_by = total_2_term;
}

__device__ __forceinline__ void forward_bundle_stage_5(const float total_2, const float held, float& held_3,
    float& held_6) {
  held_3 = rsqrtf(total_2 * held + 1e-05f);
  held_6 = total_2 * held;
}

__device__ __forceinline__ void forward_bundle_stage_6(const float x, const float held_4, const float held_3,
    float& peak_term) {
  peak_term = (x - held_4) * held_3;
}

// Reads x; writes out, winner_index, saved_mean, saved_variance.
__global__ void __launch_bounds__(256, 4)
forward_bundle(const float* x, float* __restrict__ out, uint8_t* __restrict__ winner_index,
    float* __restrict__ saved_mean, float* __restrict__ saved_variance, ForwardSizes sizes) {
  wait_for_kernel_before();
  const float count_of_window_2_inner_value = static_cast<float>(2 * sizes.inner.value);
  // A thread has packs of each of a bundle's rows.
  // kInner elements of a pack side by side are of one window.
  [[maybe_unused]] constexpr int kRows = 2, kPacks = 1, kLanes = 2, kInner = 2, kWindows = kLanes / kInner;
  __shared__ float cells[2][16];
  int turn = 0;
  const Index length = sizes.inner.value * 2;
  const Index bundles = sizes.outer.value * sizes.middle.value;
  for (Index first = blockIdx.x * blockDim.y; first < bundles; first += gridDim.x * blockDim.y) {
    const bool is_live = first + threadIdx.y < bundles;
    const Index bundle = is_live ? first + threadIdx.y : 0;
    [[maybe_unused]] const Index end = is_live ? length : 0;
    const Index above_middle = divide(bundle, sizes.middle);
    const Index middle = bundle - above_middle * sizes.middle.value;
    const Index outer = above_middle;
    Pack<float, kLanes> x_in[kRows][kPacks];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
        const int window_1 = r;
        if (i < end) x_in[r][p] = load<kLanes>(x + ((outer) * sizes.middle_unpooled.value + (middle * 2 + window_1)) * length + i);
      }
    }
    Sum<float> sums_1[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
        const bool is_here = i < end;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[r][p], lane);
          float total_term_value;
          forward_bundle_stage_1(x_value, total_term_value);
          if (is_here) sums_1[r].add(total_term_value);
        }
      }
    }
    combine<8, false>(sums_1, cells[turn++ & 1]);
    float held_here;
    {
      float held_value;
      forward_bundle_stage_2(count_of_window_2_inner_value, held_value);
      held_here = held_value;
    }
    float held_2_here[kRows];
    float held_4_here[kRows];
    float held_5_here[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float total_value = sums_1[r].total;
      const float held_value = held_here;
      float held_2_value;
      float held_4_value;
      float held_5_value;
      forward_bundle_stage_3(total_value, held_value, held_2_value, held_4_value, held_5_value);
      held_2_here[r] = held_2_value;
      held_4_here[r] = held_4_value;
      held_5_here[r] = held_5_value;
    }
    Sum<float> sums_4[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
        const bool is_here = i < end;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[r][p], lane);
          const float held_2_value = held_2_here[r];
          float total_2_term_value;
          float total_2_term_by_value;
          forward_bundle_stage_4(x_value, held_2_value, total_2_term_value, total_2_term_by_value);
          if (is_here) sums_4[r].add(total_2_term_value, total_2_term_by_value);
        }
      }
    }
    combine<8, false>(sums_4, cells[turn++ & 1]);
    float held_3_here[kRows];
    float held_6_here[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float total_2_value = sums_4[r].total;
      const float held_value = held_here;
      float held_3_value;
      float held_6_value;
      forward_bundle_stage_5(total_2_value, held_value, held_3_value, held_6_value);
      held_3_here[r] = held_3_value;
      held_6_here[r] = held_6_value;
    }
    Maximum<float> peak_sum[kPacks][kWindows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const int window_1 = r;
          const int window_2 = lane % kInner;
          const int position_value = (window_1) * 2 + window_2;
          const float x_value = widen(x_in[r][p], lane);
          const float held_4_value = held_4_here[r];
          const float held_3_value = held_3_here[r];
          float peak_term_value;
          forward_bundle_stage_6(x_value, held_4_value, held_3_value, peak_term_value);
          peak_sum[p][lane / kInner].add(peak_term_value, position_value);
        }
      }
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
      Pack<float, kWindows> out_out;
#pragma unroll
      for (int beside = 0; beside < kWindows; ++beside) {
        out_out.at[beside] = narrow<float>(peak_sum[p][beside].max());
      }
      if (i < end) store(out + ((outer) * sizes.middle.value + middle) * (length / kInner) + i / kInner,
          out_out);
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
      Pack<uint8_t, kWindows> winner_index_out;
#pragma unroll
      for (int beside = 0; beside < kWindows; ++beside) {
        winner_index_out.at[beside] = narrow<uint8_t>(peak_sum[p][beside].argmax());
      }
      if (i < end) store(winner_index + ((outer) * sizes.middle.value + middle) * (length / kInner) + i / kInner, winner_index_out);
    }
    if (is_live && threadIdx.x == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int window_1 = r;
        saved_mean[(outer) * sizes.middle_unpooled.value + (middle * 2 + window_1)] = narrow<float>(held_5_here[r]);
      }
    }
    if (is_live && threadIdx.x == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int window_1 = r;
        saved_variance[(outer) * sizes.middle_unpooled.value + (middle * 2 + window_1)] = narrow<float>(held_6_here[r]);
      }
    }
  }
}

struct BackwardSizes {
  Size outer, middle, inner, middle_unpooled, inner_unpooled;
};

__device__ __forceinline__ void backward_bundle_stage_1(const float x, const float saved_mean,
    const float saved_variance, const int winner_index, float& picked_x_term, float& picked_saved_mean_term,
    float& picked_saved_variance_term, int& picked_x_term_at, int& picked_saved_mean_term_at,
    int& picked_saved_variance_term_at) {
  picked_x_term = x;
  picked_saved_mean_term = saved_mean;
  picked_saved_variance_term = saved_variance;
  picked_x_term_at = winner_index;
  picked_saved_mean_term_at = winner_index;
  picked_saved_variance_term_at = winner_index;
}

__device__ __forceinline__ void backward_bundle_stage_2(const float d_out, const float picked_x,
    const float picked_saved_mean, const float picked_saved_variance, float& held, float& held_2,
    float& held_3) {
  const float inverse_root = rsqrtf(picked_saved_variance + 1e-05f);
  held = -0.5f * (d_out * (picked_x - picked_saved_mean) * inverse_root) * (inverse_root * inverse_root);
  held_2 = -(d_out * inverse_root);
  held_3 = d_out * inverse_root;
}

__device__ __forceinline__ void backward_bundle_stage_3(const int position, const int winner_index,
    const float held, const float held_2, float& total_term, float& total_2_term) {
  const bool is_equal = position == winner_index;
  total_term = is_equal ? held : 0.0f;
  total_2_term = is_equal ? held_2 : 0.0f;
}

__device__ __forceinline__ void backward_bundle_stage_4(const float total_2,
    const float count_of_window_2_inner, const float total, float& held_4, float& held_5) {
  const float quotient = 1.0f / count_of_window_2_inner;
  held_4 = total_2 * quotient;
  held_5 = 2.0f * total * quotient;
}

__device__ __forceinline__ void backward_bundle_stage_5(const float x, const float saved_mean,
    const float held_5, const float held_4, const int position, const int winner_index, const float held_3,
    float& held_6) {
  held_6 = fmaf(x - saved_mean, held_5, held_4) + (position == winner_index ? held_3 : 0.0f);
}

// Reads x, winner_index by (outer, middle, inner), saved_mean by (outer, middle, window_1), saved_variance by (outer, middle, window_1), d_out by (outer, middle, inner); writes d_x.
__global__ void __launch_bounds__(256, 4)
backward_bundle(const float* x, const uint8_t* winner_index, const float* saved_mean,
    const float* saved_variance, const float* d_out, float* __restrict__ d_x, BackwardSizes sizes) {
  wait_for_kernel_before();
  const float count_of_window_2_inner_value = static_cast<float>(2 * sizes.inner.value);
  // A thread has packs of each of a bundle's rows.
  // kInner elements of a pack side by side are of one window.
  [[maybe_unused]] constexpr int kRows = 2, kPacks = 1, kLanes = 2, kInner = 2, kWindows = kLanes / kInner;
  __shared__ float cells[2][32];
  int turn = 0;
  const Index length = sizes.inner.value * 2;
  const Index bundles = sizes.outer.value * sizes.middle.value;
  for (Index first = blockIdx.x * blockDim.y; first < bundles; first += gridDim.x * blockDim.y) {
    const bool is_live = first + threadIdx.y < bundles;
    const Index bundle = is_live ? first + threadIdx.y : 0;
    [[maybe_unused]] const Index end = is_live ? length : 0;
    const Index above_middle = divide(bundle, sizes.middle);
    const Index middle = bundle - above_middle * sizes.middle.value;
    const Index outer = above_middle;
    Pack<float, kLanes> x_in[kRows][kPacks];
    Pack<uint8_t, kWindows> winner_index_in[kPacks];
    Pack<float, kWindows> d_out_in[kPacks];
    float saved_mean_in[kRows];
    float saved_variance_in[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
        const int window_1 = r;
        if (i < end) x_in[r][p] = load<kLanes>(x + ((outer) * sizes.middle_unpooled.value + (middle * 2 + window_1)) * length + i);
      }
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
      if (i < end) winner_index_in[p] = load<kWindows>(winner_index + ((outer) * sizes.middle.value + middle) * (length / kInner) + i / kInner);
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
      if (i < end) d_out_in[p] = load<kWindows>(d_out + ((outer) * sizes.middle.value + middle) * (length / kInner) + i / kInner);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int window_1 = r;
      saved_mean_in[r] = saved_mean[(outer) * sizes.middle_unpooled.value + (middle * 2 + window_1)];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int window_1 = r;
      saved_variance_in[r] = saved_variance[(outer) * sizes.middle_unpooled.value + (middle * 2 + window_1)];
    }
    Picked<float> picked_x_sum[kPacks][kWindows];
    Picked<float> picked_saved_mean_sum[kPacks][kWindows];
    Picked<float> picked_saved_variance_sum[kPacks][kWindows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const int window_1 = r;
          const int window_2 = lane % kInner;
          const int position_value = (window_1) * 2 + window_2;
          const float x_value = widen(x_in[r][p], lane);
          const float saved_mean_value = widen(saved_mean_in[r]);
          const float saved_variance_value = widen(saved_variance_in[r]);
          const int winner_index_value = widen(winner_index_in[p], lane / kInner);
          float picked_x_term_value;
          float picked_saved_mean_term_value;
          float picked_saved_variance_term_value;
          int picked_x_term_at_value;
          int picked_saved_mean_term_at_value;
          int picked_saved_variance_term_at_value;
          backward_bundle_stage_1(x_value, saved_mean_value, saved_variance_value, winner_index_value,
              picked_x_term_value, picked_saved_mean_term_value, picked_saved_variance_term_value,
              picked_x_term_at_value, picked_saved_mean_term_at_value, picked_saved_variance_term_at_value);
          picked_x_sum[p][lane / kInner].add(picked_x_term_value, picked_x_term_at_value == position_value);
          picked_saved_mean_sum[p][lane / kInner].add(picked_saved_mean_term_value,
              picked_saved_mean_term_at_value == position_value);
          picked_saved_variance_sum[p][lane / kInner].add(picked_saved_variance_term_value,
              picked_saved_variance_term_at_value == position_value);
        }
      }
    }
    float held_here[kPacks][kWindows];
    float held_2_here[kPacks][kWindows];
    float held_3_here[kPacks][kWindows];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int beside = 0; beside < kWindows; ++beside) {
        const float d_out_value = widen(d_out_in[p], beside);
        const float picked_x_value = picked_x_sum[p][beside].pick();
        const float picked_saved_mean_value = picked_saved_mean_sum[p][beside].pick();
        const float picked_saved_variance_value = picked_saved_variance_sum[p][beside].pick();
        float held_value;
        float held_2_value;
        float held_3_value;
        backward_bundle_stage_2(d_out_value, picked_x_value, picked_saved_mean_value,
            picked_saved_variance_value, held_value, held_2_value, held_3_value);
        held_here[p][beside] = held_value;
        held_2_here[p][beside] = held_2_value;
        held_3_here[p][beside] = held_3_value;
      }
    }
    Sum<float> sums_3[2 * kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
        const bool is_here = i < end;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const int window_1 = r;
          const int window_2 = lane % kInner;
          const int position_value = (window_1) * 2 + window_2;
          const int winner_index_value = widen(winner_index_in[p], lane / kInner);
          const float held_value = held_here[p][lane / kInner];
          const float held_2_value = held_2_here[p][lane / kInner];
          float total_term_value;
          float total_2_term_value;
          backward_bundle_stage_3(position_value, winner_index_value, held_value, held_2_value,
              total_term_value, total_2_term_value);
          if (is_here) sums_3[r].add(total_term_value);
          if (is_here) sums_3[kRows + r].add(total_2_term_value);
        }
      }
    }
    combine<8, false>(sums_3, cells[turn++ & 1]);
    float held_4_here[kRows];
    float held_5_here[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float total_2_value = sums_3[kRows + r].total;
      const float total_value = sums_3[r].total;
      float held_4_value;
      float held_5_value;
      backward_bundle_stage_4(total_2_value, count_of_window_2_inner_value, total_value, held_4_value,
          held_5_value);
      held_4_here[r] = held_4_value;
      held_5_here[r] = held_5_value;
    }
    float held_6_here[kRows][kPacks][kLanes];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const int window_1 = r;
          const int window_2 = lane % kInner;
          const int position_value = (window_1) * 2 + window_2;
          const float x_value = widen(x_in[r][p], lane);
          const float saved_mean_value = widen(saved_mean_in[r]);
          const float held_5_value = held_5_here[r];
          const float held_4_value = held_4_here[r];
          const int winner_index_value = widen(winner_index_in[p], lane / kInner);
          const float held_3_value = held_3_here[p][lane / kInner];
          float held_6_value;
          backward_bundle_stage_5(x_value, saved_mean_value, held_5_value, held_4_value, position_value,
              winner_index_value, held_3_value, held_6_value);
          held_6_here[r][p][lane] = held_6_value;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
        const int window_1 = r;
        Pack<float, kLanes> d_x_out;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          d_x_out.at[lane] = narrow<float>(held_6_here[r][p][lane]);
        }
        if (i < end) store(d_x + ((outer) * sizes.middle_unpooled.value + (middle * 2 + window_1)) * length + i, d_x_out);
      }
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

// a: x, out, winner_index, saved_mean, saved_variance, scratch (-1: return the bytes it needs), outer, middle, inner, middle_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const out = reinterpret_cast<float*>(a[1]);
  auto* const winner_index = reinterpret_cast<uint8_t*>(a[2]);
  auto* const saved_mean = reinterpret_cast<float*>(a[3]);
  auto* const saved_variance = reinterpret_cast<float*>(a[4]);
  const bool is_measuring = a[5] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const ForwardSizes sizes{ size_of(a[6]), size_of(a[7]), size_of(a[8]), size_of(a[9]), size_of(a[10]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[12]);
  const int device = static_cast<int>(a[11]);
  const DeviceGuard guard(device);
  const dim3 forward_bundle_block = row_block(ceil_divide(static_cast<int64_t>(sizes.inner.value) * static_cast<int64_t>(2), 2), 256);
  const int64_t forward_bundle_tasks = ceil_divide(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value), forward_bundle_block.y);
  const int64_t forward_bundle_resident = resident_blocks(forward_bundle, forward_bundle_block, 0, 0, device);
  const int64_t forward_bundle_slots = forward_bundle_tasks < forward_bundle_resident ? forward_bundle_tasks : forward_bundle_resident;
  if (is_measuring) return scratch.used;
  {
    follow(forward_bundle, static_cast<unsigned>(forward_bundle_slots), forward_bundle_block, 0, stream, x,
        out, winner_index, saved_mean, saved_variance, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, winner_index, saved_mean, saved_variance, d_out, d_x, scratch (-1: return the bytes it needs), outer, middle, inner, middle_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const winner_index = reinterpret_cast<const uint8_t*>(a[1]);
  auto* const saved_mean = reinterpret_cast<const float*>(a[2]);
  auto* const saved_variance = reinterpret_cast<const float*>(a[3]);
  auto* const d_out = reinterpret_cast<const float*>(a[4]);
  auto* const d_x = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[4] | a[5]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const BackwardSizes sizes{ size_of(a[7]), size_of(a[8]), size_of(a[9]), size_of(a[10]), size_of(a[11]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[13]);
  const int device = static_cast<int>(a[12]);
  const DeviceGuard guard(device);
  const dim3 backward_bundle_block = row_block(ceil_divide(static_cast<int64_t>(sizes.inner.value) * static_cast<int64_t>(2), 2), 256);
  const int64_t backward_bundle_tasks = ceil_divide(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value), backward_bundle_block.y);
  const int64_t backward_bundle_resident = resident_blocks(backward_bundle, backward_bundle_block, 0, 0,
      device);
  const int64_t backward_bundle_slots = backward_bundle_tasks < backward_bundle_resident ? backward_bundle_tasks : backward_bundle_resident;
  if (is_measuring) return scratch.used;
  {
    follow(backward_bundle, static_cast<unsigned>(backward_bundle_slots), backward_bundle_block, 0, stream,
        x, winner_index, saved_mean, saved_variance, d_out, d_x, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
