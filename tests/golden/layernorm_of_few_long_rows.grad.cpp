// fusegen 0.1.0   chain b1d23cb647a0   signature forward+backward: d_out float32, d_x float32, out float32, x float32; 64-bit offsets
//   layernorm
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
  Size outer, inner;
};

static inline __attribute__((always_inline)) void forward_inner_values(const float x, float& mean_term) {
  mean_term = x;
}

static void forward_inner(const float* __restrict__ x, Moments* __restrict__ mean_partials,
    const ForwardSizes& sizes, int threads) {
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index begin = piece * kPiece, end = std::min(length, begin + kPiece);
    const Index outer = row;
    float mean_part = 0;
#pragma omp simd reduction(+ : mean_part)
    for (Index r = begin; r < end; ++r) {
      const Index inner = r;
      const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
      float mean_term_value;
      forward_inner_values(x_value, mean_term_value);
      mean_part += mean_term_value;
    }
    const float mean_about = mean_part / static_cast<float>(end - begin);
    float mean_distances = 0, mean_drift = 0;
#pragma omp simd reduction(+ : mean_distances, mean_drift)
    for (Index r = begin; r < end; ++r) {
      const Index inner = r;
      const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
      float mean_term_value;
      forward_inner_values(x_value, mean_term_value);
      const float distance = mean_term_value - mean_about;
      mean_distances += distance * distance;
      mean_drift += distance;
    }
    const Moments mean_sum = moments_about(mean_about, end - begin, mean_distances, mean_drift);
    mean_partials[(outer) * (1 * pieces) + (0) * pieces + piece] = mean_sum;
  }
}

static inline __attribute__((always_inline)) void forward_finalise_values(const float mean,
    const float variance, float& mean_scratch, float& variance_scratch) {
  mean_scratch = mean;
  variance_scratch = variance;
}

static void forward_finalise(float* __restrict__ mean_scratch, float* __restrict__ variance_scratch,
    const Moments* __restrict__ mean_partials, const ForwardSizes& sizes, Index slots, int threads) {
  const Index columns = 1, results = sizes.outer.value;
#pragma omp parallel for num_threads(threads) schedule(static) if (results * slots > kSerial)
  for (Index result = 0; result < results; ++result) {
    const Index above = result / columns, column = result % columns;
    Moments mean_sum;
    for (Index slot = 0; slot < slots; ++slot) mean_sum.merge(mean_partials[(above * slots + slot) * columns + column]);
    const float mean_value = static_cast<float>(mean_sum.mean());
    const float variance_value = static_cast<float>(mean_sum.variance());
    const Index outer = result;
    float mean_scratch_value;
    float variance_scratch_value;
    forward_finalise_values(mean_value, variance_value, mean_scratch_value, variance_scratch_value);
    mean_scratch[outer] = narrow<float>(mean_scratch_value);
    variance_scratch[outer] = narrow<float>(variance_scratch_value);
  }
}

static inline __attribute__((always_inline)) void forward_pointwise_values(const float x, const float mean,
    const float variance, float& out) {
  // layernorm
  out = (x - mean) * (1.0f / sqrtf(variance + 1e-05f));
}

static void forward_pointwise(const float* __restrict__ x, const float* __restrict__ mean,
    const float* __restrict__ variance, float* __restrict__ out, const ForwardSizes& sizes, int threads) {
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index begin = piece * kPiece, end = std::min(length, begin + kPiece);
    const Index outer = row;
#pragma omp simd
    for (Index r = begin; r < end; ++r) {
      const Index inner = r;
      const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
      const float mean_value = widen(mean[outer]);
      const float variance_value = widen(variance[outer]);
      float out_value;
      forward_pointwise_values(x_value, mean_value, variance_value, out_value);
      out[(outer) * sizes.inner.value + inner] = narrow<float>(out_value);
    }
  }
}

struct BackwardSizes {
  Size outer, inner;
};

static inline __attribute__((always_inline)) void backward_inner_values(const float d_out, const float x,
    float& total_term, float& mean_term) {
  total_term = d_out;
  mean_term = x;
}

static void backward_inner(const float* __restrict__ d_out, const float* __restrict__ x,
    Sum* __restrict__ total_partials, Moments* __restrict__ mean_partials, const BackwardSizes& sizes,
    int threads) {
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index begin = piece * kPiece, end = std::min(length, begin + kPiece);
    const Index outer = row;
    float total_part = 0;
    float mean_part = 0;
#pragma omp simd reduction(+ : total_part, mean_part)
    for (Index r = begin; r < end; ++r) {
      const Index inner = r;
      const float d_out_value = widen(d_out[(outer) * sizes.inner.value + inner]);
      const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
      float total_term_value;
      float mean_term_value;
      backward_inner_values(d_out_value, x_value, total_term_value, mean_term_value);
      total_part += total_term_value;
      mean_part += mean_term_value;
    }
    const Sum total_sum{static_cast<double>(total_part)};
    const float mean_about = mean_part / static_cast<float>(end - begin);
    float mean_distances = 0, mean_drift = 0;
#pragma omp simd reduction(+ : mean_distances, mean_drift)
    for (Index r = begin; r < end; ++r) {
      const Index inner = r;
      const float d_out_value = widen(d_out[(outer) * sizes.inner.value + inner]);
      const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
      float total_term_value;
      float mean_term_value;
      backward_inner_values(d_out_value, x_value, total_term_value, mean_term_value);
      const float distance = mean_term_value - mean_about;
      mean_distances += distance * distance;
      mean_drift += distance;
    }
    const Moments mean_sum = moments_about(mean_about, end - begin, mean_distances, mean_drift);
    total_partials[(outer) * (1 * pieces) + (0) * pieces + piece] = total_sum;
    mean_partials[(outer) * (1 * pieces) + (0) * pieces + piece] = mean_sum;
  }
}

static inline __attribute__((always_inline)) void backward_finalise_values(const float mean,
    const float total, const float variance, float& mean_scratch, float& total_scratch,
    float& variance_scratch) {
  mean_scratch = mean;
  total_scratch = total;
  variance_scratch = variance;
}

static void backward_finalise(float* __restrict__ mean_scratch, float* __restrict__ total_scratch,
    float* __restrict__ variance_scratch, const Sum* __restrict__ total_partials,
    const Moments* __restrict__ mean_partials, const BackwardSizes& sizes, Index slots, int threads) {
  const Index columns = 1, results = sizes.outer.value;
#pragma omp parallel for num_threads(threads) schedule(static) if (results * slots > kSerial)
  for (Index result = 0; result < results; ++result) {
    const Index above = result / columns, column = result % columns;
    Sum total_sum;
    for (Index slot = 0; slot < slots; ++slot) total_sum.merge(total_partials[(above * slots + slot) * columns + column]);
    Moments mean_sum;
    for (Index slot = 0; slot < slots; ++slot) mean_sum.merge(mean_partials[(above * slots + slot) * columns + column]);
    const float total_value = static_cast<float>(total_sum.sum());
    const float mean_value = static_cast<float>(mean_sum.mean());
    const float variance_value = static_cast<float>(mean_sum.variance());
    const Index outer = result;
    float mean_scratch_value;
    float total_scratch_value;
    float variance_scratch_value;
    backward_finalise_values(mean_value, total_value, variance_value, mean_scratch_value,
        total_scratch_value, variance_scratch_value);
    mean_scratch[outer] = narrow<float>(mean_scratch_value);
    total_scratch[outer] = narrow<float>(total_scratch_value);
    variance_scratch[outer] = narrow<float>(variance_scratch_value);
  }
}

static inline __attribute__((always_inline)) void backward_inner_2_values(const float d_out, const float x,
    const float mean, float& total_2_term) {
  total_2_term = d_out * (x - mean);
}

static void backward_inner_2(const float* __restrict__ d_out, const float* __restrict__ x,
    const float* __restrict__ mean, Sum* __restrict__ total_2_partials, const BackwardSizes& sizes,
    int threads) {
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index begin = piece * kPiece, end = std::min(length, begin + kPiece);
    const Index outer = row;
    float total_2_part = 0;
#pragma omp simd reduction(+ : total_2_part)
    for (Index r = begin; r < end; ++r) {
      const Index inner = r;
      const float d_out_value = widen(d_out[(outer) * sizes.inner.value + inner]);
      const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
      const float mean_value = widen(mean[outer]);
      float total_2_term_value;
      backward_inner_2_values(d_out_value, x_value, mean_value, total_2_term_value);
      total_2_part += total_2_term_value;
    }
    const Sum total_2_sum{static_cast<double>(total_2_part)};
    total_2_partials[(outer) * (1 * pieces) + (0) * pieces + piece] = total_2_sum;
  }
}

static inline __attribute__((always_inline)) void backward_finalise_2_values(const float total_2,
    float& total_2_scratch) {
  total_2_scratch = total_2;
}

static void backward_finalise_2(float* __restrict__ total_2_scratch,
    const Sum* __restrict__ total_2_partials, const BackwardSizes& sizes, Index slots, int threads) {
  const Index columns = 1, results = sizes.outer.value;
#pragma omp parallel for num_threads(threads) schedule(static) if (results * slots > kSerial)
  for (Index result = 0; result < results; ++result) {
    const Index above = result / columns, column = result % columns;
    Sum total_2_sum;
    for (Index slot = 0; slot < slots; ++slot) total_2_sum.merge(total_2_partials[(above * slots + slot) * columns + column]);
    const float total_2_value = static_cast<float>(total_2_sum.sum());
    const Index outer = result;
    float total_2_scratch_value;
    backward_finalise_2_values(total_2_value, total_2_scratch_value);
    total_2_scratch[outer] = narrow<float>(total_2_scratch_value);
  }
}

static inline __attribute__((always_inline)) void backward_pointwise_values(const float x, const float mean,
    const float total_2, const float variance, const float count_of_inner, const float d_out,
    const float total, float& d_x) {
  const float inverse_root = 1.0f / sqrtf(variance + 1e-05f);
  const float product = 2.0f * (-0.5f * total_2 * (inverse_root * inverse_root * inverse_root));
  d_x = (x - mean) * (product / count_of_inner) + d_out * inverse_root - total * inverse_root / count_of_inner;
}

static void backward_pointwise(const float* __restrict__ x, const float* __restrict__ mean,
    const float* __restrict__ total_2, const float* __restrict__ variance, const float* __restrict__ d_out,
    const float* __restrict__ total, float* __restrict__ d_x, const BackwardSizes& sizes, int threads) {
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index begin = piece * kPiece, end = std::min(length, begin + kPiece);
    const Index outer = row;
#pragma omp simd
    for (Index r = begin; r < end; ++r) {
      const Index inner = r;
      const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
      const float mean_value = widen(mean[outer]);
      const float total_2_value = widen(total_2[outer]);
      const float variance_value = widen(variance[outer]);
      const float d_out_value = widen(d_out[(outer) * sizes.inner.value + inner]);
      const float total_value = widen(total[outer]);
      float d_x_value;
      backward_pointwise_values(x_value, mean_value, total_2_value, variance_value, count_of_inner_value,
          d_out_value, total_value, d_x_value);
      d_x[(outer) * sizes.inner.value + inner] = narrow<float>(d_x_value);
    }
  }
}

}  // namespace

// a: x, out, scratch (-1: return the bytes it needs), outer, inner, threads.
static int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const out = reinterpret_cast<float*>(a[1]);
  const bool is_measuring = a[2] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[2])};
  const ForwardSizes sizes{ {a[3]}, {a[4]} };
  const int threads = static_cast<int>(a[5]);
  const Index mean_partials_slots = 1 * pieces_of(sizes.inner.value)
;
  auto* const mean_partials = scratch.take<Moments>(static_cast<int64_t>(sizes.outer.value) * mean_partials_slots);
  auto* const mean_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  auto* const variance_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  if (is_measuring) return scratch.used;
  forward_inner(x, mean_partials, sizes, threads);
  forward_finalise(mean_scratch, variance_scratch, mean_partials, sizes, mean_partials_slots, threads);
  forward_pointwise(x, mean_scratch, variance_scratch, out, sizes, threads);
  return 0;
}

// a: x, d_out, d_x, scratch (-1: return the bytes it needs), outer, inner, threads.
static int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const d_out = reinterpret_cast<const float*>(a[1]);
  auto* const d_x = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const BackwardSizes sizes{ {a[4]}, {a[5]} };
  const int threads = static_cast<int>(a[6]);
  const Index total_partials_slots = 1 * pieces_of(sizes.inner.value)
;
  const Index mean_partials_slots = 1 * pieces_of(sizes.inner.value)
;
  const Index total_2_partials_slots = 1 * pieces_of(sizes.inner.value)
;
  auto* const total_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.outer.value) * total_partials_slots);
  auto* const mean_partials = scratch.take<Moments>(static_cast<int64_t>(sizes.outer.value) * mean_partials_slots);
  auto* const mean_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  auto* const total_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  auto* const variance_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  auto* const total_2_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.outer.value) * total_2_partials_slots);
  auto* const total_2_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  if (is_measuring) return scratch.used;
  backward_inner(d_out, x, total_partials, mean_partials, sizes, threads);
  backward_finalise(mean_scratch, total_scratch, variance_scratch, total_partials, mean_partials, sizes,
      total_partials_slots, threads);
  backward_inner_2(d_out, x, mean_scratch, total_2_partials, sizes, threads);
  backward_finalise_2(total_2_scratch, total_2_partials, sizes, total_2_partials_slots, threads);
  backward_pointwise(x, mean_scratch, total_2_scratch, variance_scratch, d_out, total_scratch, d_x, sizes,
      threads);
  return 0;
}
static PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t given) {
  int64_t a[6];
  if (given != 6) {
    PyErr_Format(PyExc_TypeError, "forward takes 6 integers, got %zd", given);
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
  int64_t a[7];
  if (given != 7) {
    PyErr_Format(PyExc_TypeError, "backward takes 7 integers, got %zd", given);
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

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fusegen_348fcca7a861", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_fusegen_348fcca7a861() { return PyModule_Create(&definition); }
