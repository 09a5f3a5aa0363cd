// fusegen 0.1.0   chain 3ef4da3fd893   signature forward+backward: bias float32, d_bias float32, d_out float32, d_weight float32, d_x float32, out float32, weight float32, x float32; 64-bit offsets
//   layernorm(64, weight, bias) | gelu | mul(0.5)
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

using Index = int64_t;

// Vector variants of these stand in glibc's libmvec; the attribute lets loops use them.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GLIBC_PREREQ(2, 35)
extern "C" {
__attribute__((simd("notinbranch"))) float erff(float) noexcept;
__attribute__((simd("notinbranch"))) float expf(float) noexcept;
}
#endif
#endif

namespace {

struct Size {
  Index value;
};

inline Index divide(Index n, Size d) { return n / d.value; }

template <typename Stored>
inline Stored widen(Stored x) {
  return x;
}

template <typename Stored, typename Value>
inline Stored narrow(Value x) {
  return static_cast<Stored>(x);
}

// Scratch memory, handed out piece by piece; with no base it only counts.
struct Scratch {
  char* base;
  Index used = 0;
  template <typename T>
  T* take(Index count) {
    T* const piece = reinterpret_cast<T*>(base + used);
    used += (count * static_cast<Index>(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
};

// Work is cut into pieces that depend on the sizes alone, never on the number of threads: so are the results.
constexpr Index kPiece = 16384;

inline Index pieces_of(Index length) { return std::max<Index>(1, (length + kPiece - 1) / kPiece); }

// Below this many elements one thread does it all: waking another costs more.
constexpr Index kSerial = 16384;

// How many blocks of rows leave partials of their own, where columns are added up.
inline Index slots_of(Index rows, Index columns) {
  return std::max<Index>(1, std::min<Index>(std::min<Index>(rows, 64), rows * columns / kPiece));
}

struct Sum {
  double total = 0;
  void add(double term) { total += term; }
  void merge(const Sum& other) { total += other.total; }
  double sum() const { return total; }
};

// Count, mean and the sum of squared distances from it; merged by Chan's formula.
struct Moments {
  double count = 0, centre = 0, distances = 0;
  void merge(const Moments& other) {
    if (other.count == 0) return;
    const double all = count + other.count, gap = other.centre - centre;
    centre += gap * (other.count / all);
    distances += other.distances + gap * gap * (count * other.count / all);
    count = all;
  }
  void add(double term) { merge({1, term, 0}); }
  double mean() const { return centre; }
  double variance() const { return distances / count; }
};

// From sums about a first guess of the mean: drift is the sum of distances, which would be 0 had the guess been exact.
inline Moments moments_about(double about, Index count, double distances, double drift) {
  const double n = static_cast<double>(count);
  return {n, about + drift / n, distances - drift * (drift / n)};
}

struct ForwardSizes {
  Size outer, inner;
};

static inline __attribute__((always_inline)) void forward_row_stage_1(const float x, float& mean_term) {
  mean_term = x;
}

static inline __attribute__((always_inline)) void forward_row_values(const float x, const float mean,
    const float variance, const float weight, const float bias, float& out) {
  // layernorm(64, weight, bias)
  const float after_layernorm = (x - mean) * (1.0f / sqrtf(variance + 1e-05f)) * weight + bias;
  // gelu
  const float after_gelu = after_layernorm * 0.5f * (1.0f + erff(after_layernorm * 0.707106769f));
  // mul(0.5)
  out = after_gelu * 0.5f;
}

static void forward_row(const float* __restrict__ x, const float* __restrict__ weight,
    const float* __restrict__ bias, float* __restrict__ out, const ForwardSizes& sizes, int threads) {
  const Index rows = sizes.outer.value, length = sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * length > kSerial)
  for (Index row = 0; row < rows; ++row) {
    const Index outer = row;
    Moments mean_all;
    for (Index begin = 0; begin < length; begin += kPiece) {
      const Index end = std::min(length, begin + kPiece);
      float mean_part = 0;
#pragma omp simd reduction(+ : mean_part)
      for (Index r = begin; r < end; ++r) {
        const Index inner = r;
        const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
        float mean_term_value;
        forward_row_stage_1(x_value, mean_term_value);
        mean_part += mean_term_value;
      }
      const float mean_about = mean_part / static_cast<float>(end - begin);
      float mean_distances = 0, mean_drift = 0;
#pragma omp simd reduction(+ : mean_distances, mean_drift)
      for (Index r = begin; r < end; ++r) {
        const Index inner = r;
        const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
        float mean_term_value;
        forward_row_stage_1(x_value, mean_term_value);
        const float distance = mean_term_value - mean_about;
        mean_distances += distance * distance;
        mean_drift += distance;
      }
      const Moments mean_sum = moments_about(mean_about, end - begin, mean_distances, mean_drift);
      mean_all.merge(mean_sum);
    }
    const Moments& mean_sum = mean_all;
    const float mean_value = static_cast<float>(mean_sum.mean());
    const float variance_value = static_cast<float>(mean_sum.variance());
#pragma omp simd
    for (Index r = 0; r < length; ++r) {
      const Index inner = r;
      const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
      const float weight_value = widen(weight[inner]);
      const float bias_value = widen(bias[inner]);
      float out_value;
      forward_row_values(x_value, mean_value, variance_value, weight_value, bias_value, out_value);
      out[(outer) * sizes.inner.value + inner] = narrow<float>(out_value);
    }
  }
}

struct BackwardSizes {
  Size outer, inner;
};

static inline __attribute__((always_inline)) void backward_row_stage_1(const float x, float& mean_term) {
  mean_term = x;
}

static inline __attribute__((always_inline)) void backward_row_stage_2(const float d_out, const float x,
    const float mean, const float variance, const float weight, const float bias, float& total_term,
    float& total_2_term) {
  // layernorm(64, weight, bias)
  const float difference = x - mean;
  const float after_layernorm = difference * (1.0f / sqrtf(variance + 1e-05f)) * weight + bias;
  // backward, down to gelu
  const float d_after_gelu = d_out * 0.5f;
  // backward, down to layernorm(64, weight, bias)
  const float product = after_layernorm * 0.707106769f;
  const float product_2 = d_after_gelu * (after_layernorm * 0.5f) * (1.12837923f * expf(-(product * product)));
  const float d_after_layernorm = product_2 * 0.707106769f + d_after_gelu * (1.0f + erff(product)) * 0.5f;
  total_term = d_after_layernorm * weight * difference;
  total_2_term = d_after_layernorm * weight;
}

static inline __attribute__((always_inline)) void backward_row_values(const float x, const float mean,
    const float total, const float variance, const float count_of_inner, const float d_out,
    const float weight, const float bias, const float total_2, float& d_x) {
  // layernorm(64, weight, bias)
  const float difference = x - mean;
  const float inverse_root = 1.0f / sqrtf(variance + 1e-05f);
  const float after_layernorm = difference * inverse_root * weight + bias;
  // backward, down to gelu
  const float d_after_gelu = d_out * 0.5f;
  // backward, down to layernorm(64, weight, bias)
  const float product = after_layernorm * 0.707106769f;
  const float product_2 = d_after_gelu * (after_layernorm * 0.5f) * (1.12837923f * expf(-(product * product)));
  const float d_after_layernorm = product_2 * 0.707106769f + d_after_gelu * (1.0f + erff(product)) * 0.5f;
  const float product_3 = 2.0f * (-0.5f * total * (inverse_root * inverse_root * inverse_root));
  const float sum = difference * (product_3 / count_of_inner) + d_after_layernorm * weight * inverse_root;
  d_x = sum - total_2 * inverse_root / count_of_inner;
}

static inline __attribute__((always_inline)) void backward_row_row_values(const float mean,
    const float variance, float& mean_scratch, float& variance_scratch) {
  mean_scratch = mean;
  variance_scratch = variance;
}

static void backward_row(const float* __restrict__ x, const float* __restrict__ d_out,
    const float* __restrict__ weight, const float* __restrict__ bias, float* __restrict__ d_x,
    float* __restrict__ mean_scratch, float* __restrict__ variance_scratch, const BackwardSizes& sizes,
    int threads) {
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  const Index rows = sizes.outer.value, length = sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * length > kSerial)
  for (Index row = 0; row < rows; ++row) {
    const Index outer = row;
    Moments mean_all;
    for (Index begin = 0; begin < length; begin += kPiece) {
      const Index end = std::min(length, begin + kPiece);
      float mean_part = 0;
#pragma omp simd reduction(+ : mean_part)
      for (Index r = begin; r < end; ++r) {
        const Index inner = r;
        const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
        float mean_term_value;
        backward_row_stage_1(x_value, mean_term_value);
        mean_part += mean_term_value;
      }
      const float mean_about = mean_part / static_cast<float>(end - begin);
      float mean_distances = 0, mean_drift = 0;
#pragma omp simd reduction(+ : mean_distances, mean_drift)
      for (Index r = begin; r < end; ++r) {
        const Index inner = r;
        const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
        float mean_term_value;
        backward_row_stage_1(x_value, mean_term_value);
        const float distance = mean_term_value - mean_about;
        mean_distances += distance * distance;
        mean_drift += distance;
      }
      const Moments mean_sum = moments_about(mean_about, end - begin, mean_distances, mean_drift);
      mean_all.merge(mean_sum);
    }
    const Moments& mean_sum = mean_all;
    const float mean_value = static_cast<float>(mean_sum.mean());
    const float variance_value = static_cast<float>(mean_sum.variance());
    Sum total_all;
    Sum total_2_all;
    for (Index begin = 0; begin < length; begin += kPiece) {
      const Index end = std::min(length, begin + kPiece);
      float total_part = 0;
      float total_2_part = 0;
#pragma omp simd reduction(+ : total_part, total_2_part)
      for (Index r = begin; r < end; ++r) {
        const Index inner = r;
        const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
        const float d_out_value = widen(d_out[(outer) * sizes.inner.value + inner]);
        const float weight_value = widen(weight[inner]);
        const float bias_value = widen(bias[inner]);
        float total_term_value;
        float total_2_term_value;
        backward_row_stage_2(d_out_value, x_value, mean_value, variance_value, weight_value, bias_value,
            total_term_value, total_2_term_value);
        total_part += total_term_value;
        total_2_part += total_2_term_value;
      }
      const Sum total_sum{static_cast<double>(total_part)};
      const Sum total_2_sum{static_cast<double>(total_2_part)};
      total_all.merge(total_sum);
      total_2_all.merge(total_2_sum);
    }
    const Sum& total_sum = total_all;
    const Sum& total_2_sum = total_2_all;
    const float total_value = static_cast<float>(total_sum.sum());
    const float total_2_value = static_cast<float>(total_2_sum.sum());
#pragma omp simd
    for (Index r = 0; r < length; ++r) {
      const Index inner = r;
      const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
      const float d_out_value = widen(d_out[(outer) * sizes.inner.value + inner]);
      const float weight_value = widen(weight[inner]);
      const float bias_value = widen(bias[inner]);
      float d_x_value;
      backward_row_values(x_value, mean_value, total_value, variance_value, count_of_inner_value,
          d_out_value, weight_value, bias_value, total_2_value, d_x_value);
      d_x[(outer) * sizes.inner.value + inner] = narrow<float>(d_x_value);
    }
    {
      float mean_scratch_value;
      float variance_scratch_value;
      backward_row_row_values(mean_value, variance_value, mean_scratch_value, variance_scratch_value);
      mean_scratch[outer] = narrow<float>(mean_scratch_value);
      variance_scratch[outer] = narrow<float>(variance_scratch_value);
    }
  }
}

static inline __attribute__((always_inline)) void backward_outer_values(const float d_out, const float x,
    const float mean, const float variance, const float weight, const float bias, float& total_3_term,
    float& total_4_term) {
  // layernorm(64, weight, bias)
  const float product = (x - mean) * (1.0f / sqrtf(variance + 1e-05f));
  const float after_layernorm = product * weight + bias;
  // backward, down to gelu
  const float d_after_gelu = d_out * 0.5f;
  // backward, down to layernorm(64, weight, bias)
  const float product_2 = after_layernorm * 0.707106769f;
  const float product_3 = d_after_gelu * (after_layernorm * 0.5f) * (1.12837923f * expf(-(product_2 * product_2)));
  const float d_after_layernorm = product_3 * 0.707106769f + d_after_gelu * (1.0f + erff(product_2)) * 0.5f;
  total_3_term = d_after_layernorm * product;
  total_4_term = d_after_layernorm;
}

static void backward_outer(const float* __restrict__ d_out, const float* __restrict__ x,
    const float* __restrict__ mean, const float* __restrict__ variance, const float* __restrict__ weight,
    const float* __restrict__ bias, Sum* __restrict__ total_3_partials, Sum* __restrict__ total_4_partials,
    const BackwardSizes& sizes, int threads) {
  const Index kept = 1, rows = sizes.outer.value, columns = sizes.inner.value;
  const Index slots = slots_of(rows, columns);
#pragma omp parallel for num_threads(threads) schedule(static) if (kept * rows * columns > kSerial)
  for (Index task = 0; task < kept * slots; ++task) {
    const Index kept_index = task / slots, slot = task % slots;
    Sum* const total_3_sums = total_3_partials + task * columns;
    std::fill(total_3_sums, total_3_sums + columns, Sum());
    Sum* const total_4_sums = total_4_partials + task * columns;
    std::fill(total_4_sums, total_4_sums + columns, Sum());
    for (Index row = rows * slot / slots; row < rows * (slot + 1) / slots; ++row) {
      const Index outer = row;
#pragma omp simd
      for (Index r = 0; r < columns; ++r) {
        const Index inner = r;
        const float d_out_value = widen(d_out[(outer) * sizes.inner.value + inner]);
        const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
        const float mean_value = widen(mean[outer]);
        const float variance_value = widen(variance[outer]);
        const float weight_value = widen(weight[inner]);
        const float bias_value = widen(bias[inner]);
        float total_3_term_value;
        float total_4_term_value;
        backward_outer_values(d_out_value, x_value, mean_value, variance_value, weight_value, bias_value,
            total_3_term_value, total_4_term_value);
        total_3_sums[r].add(total_3_term_value);
        total_4_sums[r].add(total_4_term_value);
      }
    }
  }
}

static inline __attribute__((always_inline)) void backward_finalise_values(const float total_3,
    const float total_4, float& d_weight, float& d_bias) {
  d_weight = total_3;
  d_bias = total_4;
}

static void backward_finalise(float* __restrict__ d_weight, float* __restrict__ d_bias,
    const Sum* __restrict__ total_3_partials, const Sum* __restrict__ total_4_partials,
    const BackwardSizes& sizes, Index slots, int threads) {
  const Index columns = sizes.inner.value, results = sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) if (results * slots > kSerial)
  for (Index result = 0; result < results; ++result) {
    const Index above = result / columns, column = result % columns;
    Sum total_3_sum;
    for (Index slot = 0; slot < slots; ++slot) total_3_sum.merge(total_3_partials[(above * slots + slot) * columns + column]);
    Sum total_4_sum;
    for (Index slot = 0; slot < slots; ++slot) total_4_sum.merge(total_4_partials[(above * slots + slot) * columns + column]);
    const float total_3_value = static_cast<float>(total_3_sum.sum());
    const float total_4_value = static_cast<float>(total_4_sum.sum());
    const Index inner = result;
    float d_weight_value;
    float d_bias_value;
    backward_finalise_values(total_3_value, total_4_value, d_weight_value, d_bias_value);
    d_weight[inner] = narrow<float>(d_weight_value);
    d_bias[inner] = narrow<float>(d_bias_value);
  }
}

}  // namespace

// a: x, weight, bias, out, scratch (-1: return the bytes it needs), outer, inner, threads.
static int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ {a[5]}, {a[6]} };
  const int threads = static_cast<int>(a[7]);
  if (is_measuring) return scratch.used;
  forward_row(x, weight, bias, out, sizes, threads);
  return 0;
}

// a: x, weight, bias, d_out, d_x, d_weight, d_bias, scratch (-1: return the bytes it needs), outer, inner, threads.
static int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const d_out = reinterpret_cast<const float*>(a[3]);
  auto* const d_x = reinterpret_cast<float*>(a[4]);
  auto* const d_weight = reinterpret_cast<float*>(a[5]);
  auto* const d_bias = reinterpret_cast<float*>(a[6]);
  const bool is_measuring = a[7] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[7])};
  const BackwardSizes sizes{ {a[8]}, {a[9]} };
  const int threads = static_cast<int>(a[10]);
  const Index total_3_partials_slots = slots_of(sizes.outer.value, sizes.inner.value)
;
  const Index total_4_partials_slots = slots_of(sizes.outer.value, sizes.inner.value)
;
  auto* const mean_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  auto* const variance_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  auto* const total_3_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.inner.value) * total_3_partials_slots);
  auto* const total_4_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.inner.value) * total_4_partials_slots);
  if (is_measuring) return scratch.used;
  backward_row(x, d_out, weight, bias, d_x, mean_scratch, variance_scratch, sizes, threads);
  backward_outer(d_out, x, mean_scratch, variance_scratch, weight, bias, total_3_partials, total_4_partials,
      sizes, threads);
  backward_finalise(d_weight, d_bias, total_3_partials, total_4_partials, sizes, total_3_partials_slots,
      threads);
  return 0;
}
static PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t given) {
  int64_t a[8];
  if (given != 8) {
    PyErr_Format(PyExc_TypeError, "forward takes 8 integers, got %zd", given);
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < given; ++i) a[i] = PyLong_AsLongLong(args[i]);
  if (PyErr_Occurred()) return nullptr;
  int64_t result;
  Py_BEGIN_ALLOW_THREADS;
  result = run_forward(a);
  Py_END_ALLOW_THREADS;
  return PyLong_FromLongLong(result);
}

static PyObject* backward(PyObject*, PyObject* const* args, Py_ssize_t given) {
  int64_t a[11];
  if (given != 11) {
    PyErr_Format(PyExc_TypeError, "backward takes 11 integers, got %zd", given);
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < given; ++i) a[i] = PyLong_AsLongLong(args[i]);
  if (PyErr_Occurred()) return nullptr;
  int64_t result;
  Py_BEGIN_ALLOW_THREADS;
  result = run_backward(a);
  Py_END_ALLOW_THREADS;
  return PyLong_FromLongLong(result);
}

static PyMethodDef methods[] = {
    {"forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(forward)), METH_FASTCALL, nullptr},
    {"backward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(backward)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fusegen_5b2fcf2b76b3", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_fusegen_5b2fcf2b76b3() { return PyModule_Create(&definition); }
