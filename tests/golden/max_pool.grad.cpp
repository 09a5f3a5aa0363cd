// fusegen 0.1.0   chain 0fc799c91c80   signature forward+backward: d_out float32, d_scale float32, d_x float32, out float32, picked_x float32, scale float32, winner_index uint8, x float32; 64-bit offsets
//   leaky_relu(0.2) | mul_channel(scale) | leaky_relu(0.2) | max_pool3d(2)
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

// The first maximum and where it stands; a NaN beats every number, as in torch.
struct Maximum {
  double best = 0;
  int at = -1;
  void add(double value, int position) {
    if (at < 0 || value > best || value != value) best = value, at = position;
  }
  double max() const { return best; }
  int argmax() const { return at; }
};

struct Picked {
  double value = 0;
  void add(double candidate, bool is_it) { value = is_it ? candidate : value; }
  double pick() const { return value; }
};

struct ForwardSizes {
  Size outer, axis_1, axis_2, axis_3, inner, axis_2_unpooled, axis_3_unpooled, inner_unpooled;
};

static inline __attribute__((always_inline)) void forward_window_stage_1(const float x, const float scale,
    float& maximum_term) {
  // leaky_relu(0.2)
  const float after_leaky_relu = x > 0.0f ? x : x * 0.2f;
  // mul_channel(scale)
  const float after_mul_channel = after_leaky_relu * scale;
  // leaky_relu(0.2)
  maximum_term = after_mul_channel > 0.0f ? after_mul_channel : after_mul_channel * 0.2f;
}

static inline __attribute__((always_inline)) void forward_window_stage_2(const float x,
    const int winner_index_2, float& picked_x_2_term, int& picked_x_2_term_at) {
  picked_x_2_term = x;
  picked_x_2_term_at = winner_index_2;
}

static inline __attribute__((always_inline)) void forward_window_row_values(const float maximum,
    const float picked_x_2, const int winner_index_2, float& out, float& picked_x, int& winner_index) {
  out = maximum;
  picked_x = picked_x_2;
  winner_index = winner_index_2;
}

static void forward_window(const float* __restrict__ x, const float* __restrict__ scale,
    float* __restrict__ out, float* __restrict__ picked_x, uint8_t* __restrict__ winner_index,
    const ForwardSizes& sizes, int threads) {
  const Index results = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.axis_3.value * sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) if (results > kSerial / 8)
  for (Index result = 0; result < results; ++result) {
    const Index above_inner = divide(result, sizes.inner);
    const Index inner = result - above_inner * sizes.inner.value;
    const Index above_axis_3 = divide(above_inner, sizes.axis_3);
    const Index axis_3 = above_inner - above_axis_3 * sizes.axis_3.value;
    const Index above_axis_2 = divide(above_axis_3, sizes.axis_2);
    const Index axis_2 = above_axis_3 - above_axis_2 * sizes.axis_2.value;
    const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
    const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
    const Index outer = above_axis_1;
    Maximum maximum_sum;
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
    const float maximum_value = static_cast<float>(maximum_sum.max());
    const int winner_index_2_value = static_cast<int>(maximum_sum.argmax());
    Picked picked_x_2_sum;
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
    const float picked_x_2_value = static_cast<float>(picked_x_2_sum.pick());
    {
      float out_value;
      float picked_x_value;
      int winner_index_value;
      forward_window_row_values(maximum_value, picked_x_2_value, winner_index_2_value, out_value,
          picked_x_value, winner_index_value);
      out[((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner] = narrow<float>(out_value);
      picked_x[((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner] = narrow<float>(picked_x_value);
      winner_index[((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner] = narrow<uint8_t>(winner_index_value);
    }
  }
}

struct BackwardSizes {
  Size outer, axis_1, axis_2, axis_3, inner, axis_2_unpooled, axis_3_unpooled, inner_unpooled;
};

static inline __attribute__((always_inline)) void backward_window_values(const int position,
    const int winner_index, const float picked_x, const float scale, const float d_out, float& d_x) {
  const bool is_above = picked_x > 0.0f;
  const float chosen = (is_above ? picked_x : picked_x * 0.2f) * scale > 0.0f ? d_out : d_out * 0.2f;
  const float product = chosen * scale;
  d_x = position == winner_index ? (is_above ? product : product * 0.2f) : 0.0f;
}

static void backward_window(const uint8_t* __restrict__ winner_index, const float* __restrict__ picked_x,
    const float* __restrict__ scale, const float* __restrict__ d_out, float* __restrict__ d_x,
    const BackwardSizes& sizes, int threads) {
  const Index results = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.axis_3.value * sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) if (results > kSerial / 8)
  for (Index result = 0; result < results; ++result) {
    const Index above_inner = divide(result, sizes.inner);
    const Index inner = result - above_inner * sizes.inner.value;
    const Index above_axis_3 = divide(above_inner, sizes.axis_3);
    const Index axis_3 = above_inner - above_axis_3 * sizes.axis_3.value;
    const Index above_axis_2 = divide(above_axis_3, sizes.axis_2);
    const Index axis_2 = above_axis_3 - above_axis_2 * sizes.axis_2.value;
    const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
    const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
    const Index outer = above_axis_1;
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
}

static inline __attribute__((always_inline)) void backward_inner_values(const float picked_x,
    const float scale, const float d_out, float& total_term) {
  const float chosen = picked_x > 0.0f ? picked_x : picked_x * 0.2f;
  total_term = (chosen * scale > 0.0f ? d_out : d_out * 0.2f) * chosen;
}

static void backward_inner(const float* __restrict__ picked_x, const float* __restrict__ scale,
    const float* __restrict__ d_out, Sum* __restrict__ total_partials, const BackwardSizes& sizes,
    int threads) {
  const Index rows = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.axis_3.value,
      length = sizes.inner.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index begin = piece * kPiece, end = std::min(length, begin + kPiece);
    const Index above_axis_3 = divide(row, sizes.axis_3);
    const Index axis_3 = row - above_axis_3 * sizes.axis_3.value;
    const Index above_axis_2 = divide(above_axis_3, sizes.axis_2);
    const Index axis_2 = above_axis_3 - above_axis_2 * sizes.axis_2.value;
    const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
    const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
    const Index outer = above_axis_1;
    float total_part = 0;
#pragma omp simd reduction(+ : total_part)
    for (Index r = begin; r < end; ++r) {
      const Index inner = r;
      const float picked_x_value = widen(picked_x[((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner]);
      const float scale_value = widen(scale[axis_1]);
      const float d_out_value = widen(d_out[((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner]);
      float total_term_value;
      backward_inner_values(picked_x_value, scale_value, d_out_value, total_term_value);
      total_part += total_term_value;
    }
    const Sum total_sum{static_cast<double>(total_part)};
    total_partials[(axis_1) * (sizes.outer.value * sizes.axis_2.value * sizes.axis_3.value * pieces) + (((outer) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * pieces + piece] = total_sum;
  }
}

static inline __attribute__((always_inline)) void backward_finalise_values(const float total,
    float& d_scale) {
  d_scale = total;
}

static void backward_finalise(float* __restrict__ d_scale, const Sum* __restrict__ total_partials,
    const BackwardSizes& sizes, Index slots, int threads) {
  const Index columns = 1, results = sizes.axis_1.value;
#pragma omp parallel for num_threads(threads) schedule(static) if (results * slots > kSerial)
  for (Index result = 0; result < results; ++result) {
    const Index above = result / columns, column = result % columns;
    Sum total_sum;
    for (Index slot = 0; slot < slots; ++slot) total_sum.merge(total_partials[(above * slots + slot) * columns + column]);
    const float total_value = static_cast<float>(total_sum.sum());
    const Index axis_1 = result;
    float d_scale_value;
    backward_finalise_values(total_value, d_scale_value);
    d_scale[axis_1] = narrow<float>(d_scale_value);
  }
}

}  // namespace

// a: x, scale, out, picked_x, winner_index, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, axis_3, inner, axis_2_unpooled, axis_3_unpooled, inner_unpooled, threads.
static int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const scale = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  auto* const picked_x = reinterpret_cast<float*>(a[3]);
  auto* const winner_index = reinterpret_cast<uint8_t*>(a[4]);
  const bool is_measuring = a[5] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const ForwardSizes sizes{ {a[6]}, {a[7]}, {a[8]}, {a[9]}, {a[10]}, {a[11]}, {a[12]}, {a[13]} };
  const int threads = static_cast<int>(a[14]);
  if (is_measuring) return scratch.used;
  forward_window(x, scale, out, picked_x, winner_index, sizes, threads);
  return 0;
}

// a: scale, picked_x, winner_index, d_out, d_x, d_scale, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, axis_3, inner, axis_2_unpooled, axis_3_unpooled, inner_unpooled, threads.
static int64_t run_backward(const int64_t* a) {
  auto* const scale = reinterpret_cast<const float*>(a[0]);
  auto* const picked_x = reinterpret_cast<const float*>(a[1]);
  auto* const winner_index = reinterpret_cast<const uint8_t*>(a[2]);
  auto* const d_out = reinterpret_cast<const float*>(a[3]);
  auto* const d_x = reinterpret_cast<float*>(a[4]);
  auto* const d_scale = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const BackwardSizes sizes{ {a[7]}, {a[8]}, {a[9]}, {a[10]}, {a[11]}, {a[12]}, {a[13]}, {a[14]} };
  const int threads = static_cast<int>(a[15]);
  const Index total_partials_slots = sizes.outer.value * sizes.axis_2.value * sizes.axis_3.value * pieces_of(sizes.inner.value)
;
  auto* const total_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.axis_1.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  backward_window(winner_index, picked_x, scale, d_out, d_x, sizes, threads);
  backward_inner(picked_x, scale, d_out, total_partials, sizes, threads);
  backward_finalise(d_scale, total_partials, sizes, total_partials_slots, threads);
  return 0;
}
static PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t given) {
  int64_t a[15];
  if (given != 15) {
    PyErr_Format(PyExc_TypeError, "forward takes 15 integers, got %zd", given);
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
  int64_t a[16];
  if (given != 16) {
    PyErr_Format(PyExc_TypeError, "backward takes 16 integers, got %zd", given);
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

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fusegen_35b125f7ef1a", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_fusegen_35b125f7ef1a() { return PyModule_Create(&definition); }
