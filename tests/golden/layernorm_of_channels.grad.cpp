// fusegen 0.1.0   chain 4b84aacee5b2   signature forward+backward: bias float32, d_bias float32, d_out float32, d_weight float32, d_x float32, out float32, weight float32, x float32; 64-bit offsets
//   layernorm(weight, bias, axis=1)
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

using Index = int64_t;

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
  Size outer, middle, inner;
};

static inline __attribute__((always_inline)) void forward_column_stage_1(const float x, float& mean_term) {
  mean_term = x;
}

static inline __attribute__((always_inline)) void forward_column_values(const float x, const float mean,
    const float variance, const float weight, const float bias, float& out) {
  // layernorm(weight, bias, axis=1)
  out = (x - mean) * (1.0f / sqrtf(variance + 1e-05f)) * weight + bias;
}

static void forward_column(const float* __restrict__ x, const float* __restrict__ weight,
    const float* __restrict__ bias, float* __restrict__ out, const ForwardSizes& sizes, int threads) {
  constexpr Index kBlock = 64;
  const Index above = sizes.outer.value, length = sizes.middle.value, beside = sizes.inner.value;
  const Index blocks = (beside + kBlock - 1) / kBlock;
#pragma omp parallel for num_threads(threads) schedule(static) if (above * length * beside > kSerial)
  for (Index task = 0; task < above * blocks; ++task) {
    const Index above_index = task / blocks, first = task % blocks * kBlock;
    const Index width = std::min(kBlock, beside - first);
    const Index outer = above_index;
    double mean_part[kBlock] = {};
    for (Index r = 0; r < length; ++r) {
      const Index middle = r;
#pragma omp simd
      for (Index b = 0; b < width; ++b) {
        const Index beside_index = first + b;
        const Index inner = beside_index;
        const float x_value = widen(x[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
        float mean_term_value;
        forward_column_stage_1(x_value, mean_term_value);
        mean_part[b] += mean_term_value;
      }
    }
    float mean_about[kBlock];
    double mean_distances[kBlock] = {}, mean_drift[kBlock] = {};
    for (Index b = 0; b < width; ++b) mean_about[b] = static_cast<float>(mean_part[b] / static_cast<double>(length));
    for (Index r = 0; r < length; ++r) {
      const Index middle = r;
#pragma omp simd
      for (Index b = 0; b < width; ++b) {
        const Index beside_index = first + b;
        const Index inner = beside_index;
        const float x_value = widen(x[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
        float mean_term_value;
        forward_column_stage_1(x_value, mean_term_value);
        const double distance = mean_term_value - mean_about[b];
        mean_distances[b] += distance * distance;
        mean_drift[b] += distance;
      }
    }
    float mean_at[kBlock];
    for (Index b = 0; b < width; ++b) {
      const Moments mean_sum = moments_about(mean_about[b], length, mean_distances[b], mean_drift[b]);
      mean_at[b] = static_cast<float>(mean_sum.mean());
    }
    float variance_at[kBlock];
    for (Index b = 0; b < width; ++b) {
      const Moments mean_sum = moments_about(mean_about[b], length, mean_distances[b], mean_drift[b]);
      variance_at[b] = static_cast<float>(mean_sum.variance());
    }
    for (Index r = 0; r < length; ++r) {
      const Index middle = r;
#pragma omp simd
      for (Index b = 0; b < width; ++b) {
        const Index beside_index = first + b;
        const Index inner = beside_index;
        const float mean_value = mean_at[b];
        const float variance_value = variance_at[b];
        const float x_value = widen(x[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
        const float weight_value = widen(weight[middle]);
        const float bias_value = widen(bias[middle]);
        float out_value;
        forward_column_values(x_value, mean_value, variance_value, weight_value, bias_value, out_value);
        out[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner] = narrow<float>(out_value);
      }
    }
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
};

static inline __attribute__((always_inline)) void backward_column_stage_1(const float d_out,
    const float weight, const float x, float& total_term, float& mean_term) {
  total_term = d_out * weight;
  mean_term = x;
}

static inline __attribute__((always_inline)) void backward_column_stage_2(const float d_out,
    const float weight, const float x, const float mean, float& total_2_term) {
  total_2_term = d_out * weight * (x - mean);
}

static inline __attribute__((always_inline)) void backward_column_values(const float x, const float mean,
    const float total_2, const float variance, const float count_of_middle, const float d_out,
    const float weight, const float total, float& d_x) {
  const float inverse_root = 1.0f / sqrtf(variance + 1e-05f);
  const float product = 2.0f * (-0.5f * total_2 * (inverse_root * inverse_root * inverse_root));
  const float sum = (x - mean) * (product / count_of_middle) + d_out * weight * inverse_root;
  d_x = sum - total * inverse_root / count_of_middle;
}

static inline __attribute__((always_inline)) void backward_column_row_values(const float mean,
    const float variance, float& mean_scratch, float& variance_scratch) {
  mean_scratch = mean;
  variance_scratch = variance;
}

static void backward_column(const float* __restrict__ d_out, const float* __restrict__ weight,
    const float* __restrict__ x, float* __restrict__ d_x, float* __restrict__ mean_scratch,
    float* __restrict__ variance_scratch, const BackwardSizes& sizes, int threads) {
  const float count_of_middle_value = static_cast<float>(sizes.middle.value);
  constexpr Index kBlock = 64;
  const Index above = sizes.outer.value, length = sizes.middle.value, beside = sizes.inner.value;
  const Index blocks = (beside + kBlock - 1) / kBlock;
#pragma omp parallel for num_threads(threads) schedule(static) if (above * length * beside > kSerial)
  for (Index task = 0; task < above * blocks; ++task) {
    const Index above_index = task / blocks, first = task % blocks * kBlock;
    const Index width = std::min(kBlock, beside - first);
    const Index outer = above_index;
    double total_part[kBlock] = {};
    double mean_part[kBlock] = {};
    for (Index r = 0; r < length; ++r) {
      const Index middle = r;
#pragma omp simd
      for (Index b = 0; b < width; ++b) {
        const Index beside_index = first + b;
        const Index inner = beside_index;
        const float d_out_value = widen(d_out[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
        const float weight_value = widen(weight[middle]);
        const float x_value = widen(x[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
        float total_term_value;
        float mean_term_value;
        backward_column_stage_1(d_out_value, weight_value, x_value, total_term_value, mean_term_value);
        total_part[b] += total_term_value;
        mean_part[b] += mean_term_value;
      }
    }
    float mean_about[kBlock];
    double mean_distances[kBlock] = {}, mean_drift[kBlock] = {};
    for (Index b = 0; b < width; ++b) mean_about[b] = static_cast<float>(mean_part[b] / static_cast<double>(length));
    for (Index r = 0; r < length; ++r) {
      const Index middle = r;
#pragma omp simd
      for (Index b = 0; b < width; ++b) {
        const Index beside_index = first + b;
        const Index inner = beside_index;
        const float d_out_value = widen(d_out[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
        const float weight_value = widen(weight[middle]);
        const float x_value = widen(x[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
        float total_term_value;
        float mean_term_value;
        backward_column_stage_1(d_out_value, weight_value, x_value, total_term_value, mean_term_value);
        const double distance = mean_term_value - mean_about[b];
        mean_distances[b] += distance * distance;
        mean_drift[b] += distance;
      }
    }
    float total_at[kBlock];
    for (Index b = 0; b < width; ++b) {
      const Sum total_sum{ total_part[b]};
      total_at[b] = static_cast<float>(total_sum.sum());
    }
    float mean_at[kBlock];
    for (Index b = 0; b < width; ++b) {
      const Moments mean_sum = moments_about(mean_about[b], length, mean_distances[b], mean_drift[b]);
      mean_at[b] = static_cast<float>(mean_sum.mean());
    }
    float variance_at[kBlock];
    for (Index b = 0; b < width; ++b) {
      const Moments mean_sum = moments_about(mean_about[b], length, mean_distances[b], mean_drift[b]);
      variance_at[b] = static_cast<float>(mean_sum.variance());
    }
    double total_2_part[kBlock] = {};
    for (Index r = 0; r < length; ++r) {
      const Index middle = r;
#pragma omp simd
      for (Index b = 0; b < width; ++b) {
        const Index beside_index = first + b;
        const Index inner = beside_index;
        const float mean_value = mean_at[b];
        const float d_out_value = widen(d_out[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
        const float weight_value = widen(weight[middle]);
        const float x_value = widen(x[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
        float total_2_term_value;
        backward_column_stage_2(d_out_value, weight_value, x_value, mean_value, total_2_term_value);
        total_2_part[b] += total_2_term_value;
      }
    }
    float total_2_at[kBlock];
    for (Index b = 0; b < width; ++b) {
      const Sum total_2_sum{ total_2_part[b]};
      total_2_at[b] = static_cast<float>(total_2_sum.sum());
    }
    for (Index r = 0; r < length; ++r) {
      const Index middle = r;
#pragma omp simd
      for (Index b = 0; b < width; ++b) {
        const Index beside_index = first + b;
        const Index inner = beside_index;
        const float total_value = total_at[b];
        const float mean_value = mean_at[b];
        const float variance_value = variance_at[b];
        const float total_2_value = total_2_at[b];
        const float d_out_value = widen(d_out[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
        const float weight_value = widen(weight[middle]);
        const float x_value = widen(x[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
        float d_x_value;
        backward_column_values(x_value, mean_value, total_2_value, variance_value, count_of_middle_value,
            d_out_value, weight_value, total_value, d_x_value);
        d_x[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner] = narrow<float>(d_x_value);
      }
    }
    for (Index b = 0; b < width; ++b) {
      const Index beside_index = first + b;
      const Index inner = beside_index;
      const float mean_value = mean_at[b];
      const float variance_value = variance_at[b];
      float mean_scratch_value;
      float variance_scratch_value;
      backward_column_row_values(mean_value, variance_value, mean_scratch_value, variance_scratch_value);
      mean_scratch[(outer) * sizes.inner.value + inner] = narrow<float>(mean_scratch_value);
      variance_scratch[(outer) * sizes.inner.value + inner] = narrow<float>(variance_scratch_value);
    }
  }
}

static inline __attribute__((always_inline)) void backward_inner_values(const float d_out, const float x,
    const float mean, const float variance, float& total_3_term, float& total_4_term) {
  total_3_term = d_out * ((x - mean) * (1.0f / sqrtf(variance + 1e-05f)));
  total_4_term = d_out;
}

static void backward_inner(const float* __restrict__ d_out, const float* __restrict__ x,
    const float* __restrict__ mean, const float* __restrict__ variance, Sum* __restrict__ total_3_partials,
    Sum* __restrict__ total_4_partials, const BackwardSizes& sizes, int threads) {
  const Index rows = sizes.outer.value * sizes.middle.value, length = sizes.inner.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index begin = piece * kPiece, end = std::min(length, begin + kPiece);
    const Index above_middle = divide(row, sizes.middle);
    const Index middle = row - above_middle * sizes.middle.value;
    const Index outer = above_middle;
    float total_3_part = 0;
    float total_4_part = 0;
#pragma omp simd reduction(+ : total_3_part, total_4_part)
    for (Index r = begin; r < end; ++r) {
      const Index inner = r;
      const float d_out_value = widen(d_out[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
      const float x_value = widen(x[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
      const float mean_value = widen(mean[(outer) * sizes.inner.value + inner]);
      const float variance_value = widen(variance[(outer) * sizes.inner.value + inner]);
      float total_3_term_value;
      float total_4_term_value;
      backward_inner_values(d_out_value, x_value, mean_value, variance_value, total_3_term_value,
          total_4_term_value);
      total_3_part += total_3_term_value;
      total_4_part += total_4_term_value;
    }
    const Sum total_3_sum{static_cast<double>(total_3_part)};
    const Sum total_4_sum{static_cast<double>(total_4_part)};
    total_3_partials[(middle) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = total_3_sum;
    total_4_partials[(middle) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = total_4_sum;
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
  const Index columns = 1, results = sizes.middle.value;
#pragma omp parallel for num_threads(threads) schedule(static) if (results * slots > kSerial)
  for (Index result = 0; result < results; ++result) {
    const Index above = result / columns, column = result % columns;
    Sum total_3_sum;
    for (Index slot = 0; slot < slots; ++slot) total_3_sum.merge(total_3_partials[(above * slots + slot) * columns + column]);
    Sum total_4_sum;
    for (Index slot = 0; slot < slots; ++slot) total_4_sum.merge(total_4_partials[(above * slots + slot) * columns + column]);
    const float total_3_value = static_cast<float>(total_3_sum.sum());
    const float total_4_value = static_cast<float>(total_4_sum.sum());
    const Index middle = result;
    float d_weight_value;
    float d_bias_value;
    backward_finalise_values(total_3_value, total_4_value, d_weight_value, d_bias_value);
    d_weight[middle] = narrow<float>(d_weight_value);
    d_bias[middle] = narrow<float>(d_bias_value);
  }
}

}  // namespace

// a: x, weight, bias, out, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
static int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ {a[5]}, {a[6]}, {a[7]} };
  const int threads = static_cast<int>(a[8]);
  if (is_measuring) return scratch.used;
  forward_column(x, weight, bias, out, sizes, threads);
  return 0;
}

// a: x, weight, d_out, d_x, d_weight, d_bias, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
static int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const d_out = reinterpret_cast<const float*>(a[2]);
  auto* const d_x = reinterpret_cast<float*>(a[3]);
  auto* const d_weight = reinterpret_cast<float*>(a[4]);
  auto* const d_bias = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const BackwardSizes sizes{ {a[7]}, {a[8]}, {a[9]} };
  const int threads = static_cast<int>(a[10]);
  const Index total_3_partials_slots = sizes.outer.value * pieces_of(sizes.inner.value)
;
  const Index total_4_partials_slots = sizes.outer.value * pieces_of(sizes.inner.value)
;
  auto* const mean_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const variance_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const total_3_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.middle.value) * total_3_partials_slots);
  auto* const total_4_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.middle.value) * total_4_partials_slots);
  if (is_measuring) return scratch.used;
  backward_column(d_out, weight, x, d_x, mean_scratch, variance_scratch, sizes, threads);
  backward_inner(d_out, x, mean_scratch, variance_scratch, total_3_partials, total_4_partials, sizes,
      threads);
  backward_finalise(d_weight, d_bias, total_3_partials, total_4_partials, sizes, total_3_partials_slots,
      threads);
  return 0;
}
static PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t given) {
  int64_t a[9];
  if (given != 9) {
    PyErr_Format(PyExc_TypeError, "forward takes 9 integers, got %zd", given);
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

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fusegen_c63776830eac", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_fusegen_c63776830eac() { return PyModule_Create(&definition); }
