// fusegen 0.1.0   chain 2cb6071d872f   signature forward: out float32, x float32; 32-bit offsets
//   keep(y) | amax(-1, keepdim=True) | rsub(y)
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

// The largest number; a NaN beats every number, as in torch. It begins as its constructor says: of an array of arrays, nvcc
// 13.0 gives no more than the first of them what a member's initializer says.
template <typename T>
struct Peak {
  T best;
  __device__ Peak(T first = static_cast<T>(-INFINITY)) : best(first) {}
  __device__ void add(T value) { best = maximum(value, best); }
  __device__ void add_if(bool is_here, T value) { add(is_here ? value : best); }
  template <typename U>
  __device__ void merge(const Peak<U>& other) {
    add(other.best);
  }
  __device__ T max() const { return best; }
  __device__ T number() const { return best; }
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

struct ForwardSizes {
  Size outer, inner;
};

__device__ __forceinline__ void forward_row_stage_1(const float x, float& peak_term) {
  peak_term = x;
}

__device__ __forceinline__ void forward_row_values(const float x, const float peak, float& out) {
  // rsub(y)
  out = x - peak;
}

// Reads x; writes out.
__global__ void __launch_bounds__(512, 2)
forward_row(const float* __restrict__ x, float* __restrict__ out, ForwardSizes sizes, uint64_t* meetings,
    Index blocks) {
  constexpr int kLanes = 4, kPacks = 4, kCells = 1;
  __shared__ float cells[2][16];
  __shared__ unsigned int words[160 * kCells];
  int turn = 0;
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  // This block's share of every row of its team.
  const Index rank = blockIdx.x % blocks, team = blockIdx.x / blocks;
  const Index share = (length + blocks * kLanes - 1) / (blocks * kLanes) * kLanes, begin = rank * share;
  const Index reach = begin < length ? min(share, length - begin) : 0;
  uint64_t* const meeting = meetings + team * blocks * 4;
  const Index stride = gridDim.x / blocks;
  extern __shared__ uint4 room[];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  auto* const x_next = reinterpret_cast<Pack<float, kLanes>*>(room + 0) + thread;
  const auto send_row = [&](Index row, int slot) {
    const Index end = row < rows ? reach : 0, base = row * length + begin;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
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
      Pack<float, kLanes> x_in[kPacks];
      Peak<float> peaks_1[1];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
        const bool is_here = i < end;
        x_in[p] = x_next[slot * 2048 + p * 512];
        Peak<float> peaks_1_here[1];
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[p], lane);
          float peak_term_value;
          forward_row_stage_1(x_value, peak_term_value);
          peaks_1_here[0].add(peak_term_value);
        }
        if (is_here) peaks_1[0].merge(peaks_1_here[0]);
      }
      combine<16, true, false>(peaks_1, cells[turn++ & 1]);
      if (threadIdx.x == 0) {
        uint64_t* const mine = meeting + ((number & 3) * blocks + rank) * kCells;
        leave(mine + 0, number, peaks_1[0].best);
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
      float found[1];
      merge_numbers<Peak<float>, kCells>(words + 0, blocks, found[0]);
      const float peak_value = found[0];
      Pack<float, kLanes> x_in[kPacks];
      const int slot = slot_before;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
        const bool is_here = i < end;
        x_in[p] = x_next[slot * 2048 + p * 512];
        Pack<float, kLanes> out_out;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[p], lane);
          float out_value;
          forward_row_values(x_value, peak_value, out_value);
          out_out.at[lane] = narrow<float>(out_value);
        }
        if (is_here) store(out + (base + i), out_out);
      }
    }
    send_row(first + 2 * stride, slot_before);
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

// a: x, out, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const out = reinterpret_cast<float*>(a[1]);
  const bool is_measuring = a[2] == -1;
  if (!is_measuring && ((a[0] | a[1]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[2])};
  const ForwardSizes sizes{ size_of(a[3]), size_of(a[4]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[6]);
  const int device = static_cast<int>(a[5]);
  const DeviceGuard guard(device);
  const int64_t forward_row_rows = static_cast<int64_t>(sizes.outer.value),
      forward_row_length = static_cast<int64_t>(sizes.inner.value);
  // So many blocks share a row; there are as many such teams as the device works on at once.
  const int64_t forward_row_blocks = ceil_divide(forward_row_length, 8192);
  const dim3 forward_row_block = row_block(ceil_divide(forward_row_length, forward_row_blocks * 16), 256);
  const int64_t forward_row_resident = resident_blocks(forward_row, forward_row_block, 98304, 98304,
      device) / forward_row_blocks;
  const int64_t forward_row_slots = forward_row_rows < forward_row_resident ? forward_row_rows : forward_row_resident;
  if (forward_row_slots == 0) return -static_cast<int64_t>(cudaErrorCooperativeLaunchTooLarge);
  const int64_t forward_row_meeting_cells = forward_row_slots * forward_row_blocks * 4;
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
    launch.dynamicSmemBytes = 98304;
    launch.stream = stream;
    launch.attrs = &together;
    launch.numAttrs = 1;
    cudaLaunchKernelEx(&launch, forward_row, x, out, sizes, forward_row_meetings,
        static_cast<Index>(forward_row_blocks));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
