// fusegen 0.1.0   chain 4b84aacee5b2   signature forward+backward: bias float32, d_bias float32, d_out float32, d_weight float32, d_x float32, out float32, saved_mean float32, saved_variance float32, weight float32, x float32 with gaps; 32-bit offsets
//   layernorm(weight, bias, axis=1)
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
__device__ __forceinline__ void send(Pack<T, N>* to, Pitched<const T> from) {
  send(to, from.here());
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

// The accumulator of the thread whose number in the warp differs in one bit.
template <template <typename> class Kind, typename T>
__device__ __forceinline__ Kind<T> exchange(Kind<T> mine, int bit) {
  return {__shfl_xor_sync(0xffffffffu, mine.number(), bit)};
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

// A thread's elements around the mean of the first of them: what they are off by, and squared. Merged, around their mean.
template <typename T>
struct Spread {
  T centre = 0, off = 0, squares = 0;
  __device__ void add(bool is_first, T value) { add_if(true, is_first, value); }
  __device__ void add_if(bool is_here, bool is_first, T value) {
    if (is_first) centre = is_here ? value : T(0);
    const T distance = is_here ? value - centre : T(0);
    off += distance;
    squares = fma(distance, distance, squares);
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

// The same for means and squared distances from them.
template <typename T, int N, int L>
__device__ __forceinline__ void combine_across(Spread<T> (&mine)[N][L], T count, T inverse_length, T* cells,
    T* totals) {
  Sum<T> sums[N][L], distances[2 * N][L];
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int lane = 0; lane < L; ++lane) sums[n][lane].add(fma(count, mine[n][lane].centre,
        mine[n][lane].off));
  }
  combine_across(sums, cells, totals);
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int lane = 0; lane < L; ++lane) {
      mine[n][lane].move(sums[n][lane].total * inverse_length, count);
      distances[n][lane].add(mine[n][lane].squares);
      distances[n + N][lane].add(mine[n][lane].off);
    }
  }
  combine_across(distances, cells, totals);
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int lane = 0; lane < L; ++lane) {
      // A mean is mended by what the distances from it add up to.
      const T drift = distances[n + N][lane].total * inverse_length;
      mine[n][lane].centre += drift;
      mine[n][lane].squares = distances[n][lane].total - drift * distances[n + N][lane].total;
    }
  }
}

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct ForwardSizes {
  Size outer, middle, inner;
  Pitch x_pitch;
};

__device__ __forceinline__ void forward_column_stage_1(const float x, float& mean_term) {
  mean_term = x;
}

__device__ __forceinline__ void forward_column_values_once(const float variance, float& inverse_root) {
  inverse_root = rsqrtf(variance + 1e-05f);
}

__device__ __forceinline__ void forward_column_values(const float x, const float mean,
    const float inverse_root, const float weight, const float bias, float& out) {
  // layernorm(weight, bias, axis=1)
  out = fmaf((x - mean) * inverse_root, weight, bias);
}

__device__ __forceinline__ void forward_column_row_values(const float mean, const float variance,
    float& saved_mean, float& saved_variance) {
  saved_mean = mean;
  saved_variance = variance;
}

// Reads x, weight by (middle), bias by (middle); writes out, saved_mean, saved_variance.
__global__ void __launch_bounds__(256, 2)
forward_column(const float* __restrict__ x_memory, const float* __restrict__ weight,
    const float* __restrict__ bias, float* __restrict__ out, float* __restrict__ saved_mean,
    float* __restrict__ saved_variance, ForwardSizes sizes, Size across, Index tiles) {
  const Pitched<const float> x{x_memory, sizes.x_pitch};
  constexpr int kLanes = 4, kPacks = 8;
  __shared__ float cells[3072], totals[192];
  const Index length = sizes.middle.value, behind = sizes.inner.value;
  // Rows lie beside each other in packs, of which across.value have all before the axis in common.
  const Index packs = sizes.outer.value * across.value;
  const float inverse_length = 1 / static_cast<float>(length);
  const float count = threadIdx.y < length / kPacks ? kPacks : 0;
  // So many threads have all of a row, as many packs each.
  const Index along = length / kPacks, y = min(threadIdx.y, along - 1), step = along * behind;
  extern __shared__ uint4 room[];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  auto* const x_next = reinterpret_cast<Pack<float, kLanes>*>(room + 0) + thread;
  const auto send_tile = [&](Index tile) {
    if (tile >= tiles) return send_off();
    const Index place = tile * blockDim.x + threadIdx.x, pack = min(place, packs - 1);
    const Index above = divide(pack, across), beside = (pack - above * across.value) * kLanes;
    const bool is_beside = place < packs;
    [[maybe_unused]] const bool is_here = is_beside && threadIdx.y < along;
    const Index base = above * length * behind + y * behind + beside;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p * along + y;
      if (is_here) send(&x_next[p * 256], x + (base + p * step));
    }
    send_off();
  };
  send_tile(blockIdx.x);
  for (Index tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Index place = tile * blockDim.x + threadIdx.x, pack = min(place, packs - 1);
    const Index above = divide(pack, across), beside = (pack - above * across.value) * kLanes;
    const bool is_beside = place < packs;
    [[maybe_unused]] const bool is_here = is_beside && threadIdx.y < along;
    const Index base = above * length * behind + y * behind + beside;
    const Index outer = above;
    Pack<float, kLanes> x_in[kPacks];
    wait_for_sent<0>();
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      x_in[p] = x_next[p * 256];
    }
    send_tile(tile + gridDim.x);
    Spread<float> spreads_1[1][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p * along + y;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        float mean_term_value;
        forward_column_stage_1(x_value, mean_term_value);
        spreads_1[0][lane].add(p == 0, mean_term_value);
      }
    }
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!is_here) spreads_1[0][lane] = {};
    }
    combine_across(spreads_1, count, inverse_length, cells, totals);
    float inverse_root_beside[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const float variance_value = spreads_1[0][lane].squares * inverse_length;
      float inverse_root_value;
      forward_column_values_once(variance_value, inverse_root_value);
      inverse_root_beside[lane] = inverse_root_value;
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p * along + y;
      if (!is_here) continue;
      Pack<float, kLanes> out_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const Index middle = i;
        const float mean_value = spreads_1[0][lane].centre;
        const float x_value = widen(x_in[p], lane);
        const float weight_value = widen(weight[middle]);
        const float bias_value = widen(bias[middle]);
        float out_value;
        const float inverse_root_value = inverse_root_beside[lane];
        forward_column_values(x_value, mean_value, inverse_root_value, weight_value, bias_value, out_value);
        out_out.at[lane] = narrow<float>(out_value);
      }
      if (is_here) store(out + (base + p * step), out_out);
    }
    if (is_beside && threadIdx.y == 0) {
      Pack<float, kLanes> saved_mean_out;
      Pack<float, kLanes> saved_variance_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float mean_value = spreads_1[0][lane].centre;
        const float variance_value = spreads_1[0][lane].squares * inverse_length;
        float saved_mean_value;
        float saved_variance_value;
        forward_column_row_values(mean_value, variance_value, saved_mean_value, saved_variance_value);
        saved_mean_out.at[lane] = narrow<float>(saved_mean_value);
        saved_variance_out.at[lane] = narrow<float>(saved_variance_value);
      }
      const Index inner = beside;
      store(saved_mean + ((outer) * sizes.inner.value + inner), saved_mean_out);
      store(saved_variance + ((outer) * sizes.inner.value + inner), saved_variance_out);
    }
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
  Pitch x_pitch;
};

__device__ __forceinline__ void backward_column_stage_1_once(const float saved_variance,
    float& inverse_root) {
  inverse_root = rsqrtf(saved_variance + 1e-05f);
}

__device__ __forceinline__ void backward_column_stage_1(const float d_out, const float weight, const float x,
    const float saved_mean, const float inverse_root, float& total_3_term, float& total_3_term_by,
    float& total_4_term, float& total_4_term_by, float& total_term, float& total_term_by,
    float& total_2_term) {
  total_3_term = d_out * weight;
  total_3_term_by = x - saved_mean;
  total_4_term = d_out;
  total_4_term_by = weight;
  total_term = d_out;
  total_term_by = total_3_term_by * inverse_root;
  total_2_term = d_out;
}

__device__ __forceinline__ void backward_column_values_once(const float saved_variance, const float total_3,
    const float count_of_middle, const float total_4, float& inverse_root_2, float& negated, float& product) {
  inverse_root_2 = rsqrtf(saved_variance + 1e-05f);
  const float quotient = 1.0f / count_of_middle;
  const float product_2 = total_3 * inverse_root_2 * inverse_root_2 * inverse_root_2 * quotient;
  negated = -product_2;
  product = total_4 * inverse_root_2 * quotient;
}

__device__ __forceinline__ void backward_column_values(const float x, const float saved_mean,
    const float negated, const float d_out, const float weight, const float inverse_root_2,
    const float product, float& d_x) {
  d_x = fmaf(x - saved_mean, negated, d_out * weight * inverse_root_2) - product;
}

// Reads d_out, x, weight by (middle), saved_mean by (outer, inner), saved_variance by (outer, inner); leaves partials of total, total_2; writes d_x.
__global__ void __launch_bounds__(256, 2)
backward_column(const float* __restrict__ d_out, const float* __restrict__ weight,
    const float* __restrict__ x_memory, const float* __restrict__ saved_mean,
    const float* __restrict__ saved_variance, float* __restrict__ d_x,
    Sum<float>* __restrict__ total_partials, Sum<float>* __restrict__ total_2_partials, BackwardSizes sizes,
    Size across, Index tiles) {
  const float count_of_middle_value = static_cast<float>(sizes.middle.value);
  const Pitched<const float> x{x_memory, sizes.x_pitch};
  constexpr int kLanes = 4, kPacks = 4;
  __shared__ float cells[2048], totals[128];
  const Index length = sizes.middle.value, behind = sizes.inner.value;
  // Rows lie beside each other in packs, of which across.value have all before the axis in common.
  const Index packs = sizes.outer.value * across.value;
  // So many threads have all of a row, as many packs each.
  const Index along = length / kPacks, y = min(threadIdx.y, along - 1), step = along * behind;
  Sum<float> total_sum[kPacks];
  Sum<float> total_2_sum[kPacks];
  for (Index tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Index place = tile * blockDim.x + threadIdx.x, pack = min(place, packs - 1);
    const Index above = divide(pack, across), beside = (pack - above * across.value) * kLanes;
    const bool is_beside = place < packs;
    [[maybe_unused]] const bool is_here = is_beside && threadIdx.y < along;
    const Index base = above * length * behind + y * behind + beside;
    const Index outer = above;
    Pack<float, kLanes> d_out_in[kPacks];
    Pack<float, kLanes> x_in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p * along + y;
      d_out_in[p] = load<kLanes>(d_out + (base + p * step));
      x_in[p] = load<kLanes>(x + (base + p * step));
    }
    float saved_mean_here[kLanes];
    float saved_variance_here[kLanes];
    {
      const Index inner = beside;
      const auto saved_mean_in = load<kLanes>(saved_mean + ((outer) * sizes.inner.value + inner));
      const auto saved_variance_in = load<kLanes>(saved_variance + ((outer) * sizes.inner.value + inner));
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        saved_mean_here[lane] = widen(saved_mean_in, lane);
        saved_variance_here[lane] = widen(saved_variance_in, lane);
      }
    }
    float inverse_root_beside[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const float saved_variance_value = saved_variance_here[lane];
      float inverse_root_value;
      backward_column_stage_1_once(saved_variance_value, inverse_root_value);
      inverse_root_beside[lane] = inverse_root_value;
    }
    Sum<float> sums_1[2][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p * along + y;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const Index middle = i;
        const float d_out_value = widen(d_out_in[p], lane);
        const float x_value = widen(x_in[p], lane);
        const float saved_mean_value = saved_mean_here[lane];
        const float weight_value = widen(weight[middle]);
        float total_3_term_value;
        float total_3_term_by_value;
        float total_4_term_value;
        float total_4_term_by_value;
        float total_term_value;
        float total_term_by_value;
        float total_2_term_value;
        const float inverse_root_value = inverse_root_beside[lane];
        backward_column_stage_1(d_out_value, weight_value, x_value, saved_mean_value, inverse_root_value,
            total_3_term_value, total_3_term_by_value, total_4_term_value, total_4_term_by_value,
            total_term_value, total_term_by_value, total_2_term_value);
        sums_1[0][lane].add(total_3_term_value, total_3_term_by_value);
        sums_1[1][lane].add(total_4_term_value, total_4_term_by_value);
        if (is_here) total_sum[p].add(total_term_value, total_term_by_value);
        if (is_here) total_2_sum[p].add(total_2_term_value);
      }
    }
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!is_here) sums_1[0][lane] = {};
      if (!is_here) sums_1[1][lane] = {};
    }
    combine_across(sums_1, cells, totals);
    float inverse_root_2_beside[kLanes];
    float negated_beside[kLanes];
    float product_beside[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const float total_3_value = sums_1[0][lane].total;
      const float total_4_value = sums_1[1][lane].total;
      const float saved_variance_value = saved_variance_here[lane];
      float inverse_root_2_value;
      float negated_value;
      float product_value;
      backward_column_values_once(saved_variance_value, total_3_value, count_of_middle_value, total_4_value,
          inverse_root_2_value, negated_value, product_value);
      inverse_root_2_beside[lane] = inverse_root_2_value;
      negated_beside[lane] = negated_value;
      product_beside[lane] = product_value;
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p * along + y;
      Pack<float, kLanes> d_x_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const Index middle = i;
        const float d_out_value = widen(d_out_in[p], lane);
        const float x_value = widen(x_in[p], lane);
        const float saved_mean_value = saved_mean_here[lane];
        const float weight_value = widen(weight[middle]);
        float d_x_value;
        const float inverse_root_2_value = inverse_root_2_beside[lane];
        const float negated_value = negated_beside[lane];
        const float product_value = product_beside[lane];
        backward_column_values(x_value, saved_mean_value, negated_value, d_out_value, weight_value,
            inverse_root_2_value, product_value, d_x_value);
        d_x_out.at[lane] = narrow<float>(d_x_value);
      }
      if (is_here) store(d_x + (base + p * step), d_x_out);
    }
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = p * along + y;
    {
      Sum<float> total = total_sum[p];
      for (int offset = blockDim.x / 2; offset > 0; offset /= 2) total.merge(exchange(total, offset));
      if (threadIdx.x == 0 && threadIdx.y < along) total_partials[blockIdx.x * length + i] = total;
    }
    {
      Sum<float> total = total_2_sum[p];
      for (int offset = blockDim.x / 2; offset > 0; offset /= 2) total.merge(exchange(total, offset));
      if (threadIdx.x == 0 && threadIdx.y < along) total_2_partials[blockIdx.x * length + i] = total;
    }
  }
}

__device__ __forceinline__ void backward_finalise_values(const float total, const float total_2,
    float& d_weight, float& d_bias) {
  d_weight = total;
  d_bias = total_2;
}

// Merges partials into total, total_2; writes d_weight, d_bias.
__global__ void __launch_bounds__(512)
backward_finalise(float* __restrict__ d_weight, float* __restrict__ d_bias, const Sum<float>* total_partials,
    const Sum<float>* total_2_partials, BackwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 16];
  const Index columns = sizes.middle.value, strips = (columns + blockDim.x - 1) / blockDim.x;
  const Index above = blockIdx.x / strips, column = blockIdx.x % strips * blockDim.x + threadIdx.x;
  const Index result = above * columns + column;
  const bool is_live = column < columns;
  Sum<double> total_sum;
  Sum<double> total_2_sum;
  constexpr int kAtOnce = 8;
  if (is_live) {
    for (Index first = threadIdx.y; first < slots; first += kAtOnce * blockDim.y) {
      Sum<float> total_next[kAtOnce];
      Sum<float> total_2_next[kAtOnce];
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
  const float total_value = static_cast<float>(total_sum.sum());
  const float total_2_value = static_cast<float>(total_2_sum.sum());
  const Index middle = result;
  float d_weight_value;
  float d_bias_value;
  backward_finalise_values(total_value, total_2_value, d_weight_value, d_bias_value);
  d_weight[middle] = narrow<float>(d_weight_value);
  d_bias[middle] = narrow<float>(d_bias_value);
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

// Threads beside each other along x, in whole warps with those along a strided row.
static dim3 column_block(int64_t beside, int64_t along, int64_t most_beside, int64_t most) {
  int64_t x = power_of_two(beside, 1, most_beside);
  while (x > 1 && x * ceil_divide(along, 32 / x) * (32 / x) > most) x /= 2;
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(ceil_divide(along, 32 / x) * (32 / x)));
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

// a: x, weight, bias, out, saved_mean, saved_variance, scratch (-1: return the bytes it needs), outer, middle, inner, run and gap of x, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  auto* const saved_mean = reinterpret_cast<float*>(a[4]);
  auto* const saved_variance = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  if (!is_measuring && ((a[0] | a[3] | a[4] | a[5]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const ForwardSizes sizes{ size_of(a[7]), size_of(a[8]), size_of(a[9]), { size_of(a[10]),
      static_cast<Index>(a[11])} };
  const auto stream = reinterpret_cast<cudaStream_t>(a[13]);
  const int device = static_cast<int>(a[12]);
  const DeviceGuard guard(device);
  const int64_t forward_column_across = static_cast<int64_t>(sizes.inner.value) / 4,
      forward_column_packs = static_cast<int64_t>(sizes.outer.value) * forward_column_across;
  const dim3 forward_column_block = column_block(forward_column_packs,
      ceil_divide(static_cast<int64_t>(sizes.middle.value), 8), 16, 256);
  const int64_t forward_column_tiles = ceil_divide(forward_column_packs, forward_column_block.x),
      forward_column_tasks = forward_column_tiles;
  const int64_t forward_column_resident = resident_blocks(forward_column, forward_column_block, 32768, 32768,
      device);
  const int64_t forward_column_slots = forward_column_tasks < forward_column_resident ? forward_column_tasks : forward_column_resident;
  if (is_measuring) return scratch.used;
  {
    forward_column<<<static_cast<unsigned>(forward_column_slots), forward_column_block, 32768, stream>>>(x,
        weight, bias, out, saved_mean, saved_variance, sizes, size_of(forward_column_across),
        static_cast<Index>(forward_column_tiles));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, weight, saved_mean, saved_variance, d_out, d_x, d_weight, d_bias, scratch (-1: return the bytes it needs), outer, middle, inner, run and gap of x, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const saved_mean = reinterpret_cast<const float*>(a[2]);
  auto* const saved_variance = reinterpret_cast<const float*>(a[3]);
  auto* const d_out = reinterpret_cast<const float*>(a[4]);
  auto* const d_x = reinterpret_cast<float*>(a[5]);
  auto* const d_weight = reinterpret_cast<float*>(a[6]);
  auto* const d_bias = reinterpret_cast<float*>(a[7]);
  const bool is_measuring = a[8] == -1;
  if (!is_measuring && ((a[0] | a[2] | a[3] | a[4] | a[5]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[8])};
  const BackwardSizes sizes{ size_of(a[9]), size_of(a[10]), size_of(a[11]), { size_of(a[12]),
      static_cast<Index>(a[13])} };
  const auto stream = reinterpret_cast<cudaStream_t>(a[15]);
  const int device = static_cast<int>(a[14]);
  const DeviceGuard guard(device);
  const int64_t backward_column_across = static_cast<int64_t>(sizes.inner.value) / 4,
      backward_column_packs = static_cast<int64_t>(sizes.outer.value) * backward_column_across;
  const dim3 backward_column_block = column_block(backward_column_packs,
      ceil_divide(static_cast<int64_t>(sizes.middle.value), 4), 16, 256);
  const int64_t backward_column_tiles = ceil_divide(backward_column_packs, backward_column_block.x),
      backward_column_tasks = backward_column_tiles;
  const int64_t backward_column_resident = resident_blocks(backward_column, backward_column_block, 0, 0,
      device);
  const int64_t backward_column_slots = backward_column_tasks < backward_column_resident ? backward_column_tasks : backward_column_resident;
  const int64_t total_partials_slots = backward_column_slots;
  const int64_t total_2_partials_slots = backward_column_slots;
  auto* const total_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.middle.value) * total_partials_slots);
  auto* const total_2_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.middle.value) * total_2_partials_slots);
  if (is_measuring) return scratch.used;
  {
    backward_column<<<static_cast<unsigned>(backward_column_slots), backward_column_block, 0,
        stream>>>(d_out, weight, x, saved_mean, saved_variance, d_x, total_partials, total_2_partials, sizes,
        size_of(backward_column_across), static_cast<Index>(backward_column_tiles));
  }
  {
    const int64_t columns = static_cast<int64_t>(sizes.middle.value),
        results = static_cast<int64_t>(sizes.middle.value);
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
