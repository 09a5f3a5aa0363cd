// The binding of generated modules to Python: the same for all of them, built once and linked to each.
#include <Python.h>

#include <cstdint>
#include <cstring>

// A program takes pointers to inputs, outputs and scratch memory, sizes, and where to run.
struct Program {
  const char* name;
  int64_t (*run)(const int64_t*);
  int64_t inputs, outputs, arguments;
};

constexpr Py_ssize_t kMostArguments = 1024;

// What this module has; with a text for errors, its programs hold Python up.
static const Program* programs = nullptr;
static int64_t program_count = 0;
static const char* (*error_text)(int64_t) = nullptr;

static const Program* program_named(const char* name) {
  for (int64_t i = 0; i < program_count; ++i) {
    if (std::strcmp(programs[i].name, name) == 0) return &programs[i];
  }
  return static_cast<const Program*>(static_cast<void*>(PyErr_Format(PyExc_LookupError, "the module has no program %s", name)));
}

// What the program returns: 0, or 1 where a tensor is not aligned. -1 for a Python error.
static int64_t run(const Program& program, const int64_t* a) {
  int64_t result;
  if (error_text == nullptr) {
    Py_BEGIN_ALLOW_THREADS;
    result = program.run(a);
    Py_END_ALLOW_THREADS;
    return result;
  }
  result = program.run(a);
  if (result >= 0) return result;
  PyErr_SetString(PyExc_RuntimeError, error_text(result));
  return -1;
}

// launch(program, its arguments...): what it returns.
static PyObject* launch(PyObject*, PyObject* const* args, Py_ssize_t given) {
  const char* const name = given > 0 ? PyUnicode_AsUTF8(args[0]) : "";
  const Program* const program = name == nullptr ? nullptr : program_named(name);
  if (program == nullptr) return nullptr;
  if (given != program->arguments + 1) return PyErr_Format(PyExc_TypeError, "%s takes %zd integers, got %zd", name, program->arguments, given - 1);
  int64_t a[kMostArguments];
  for (Py_ssize_t i = 0; i < program->arguments; ++i) a[i] = PyLong_AsLongLong(args[i + 1]);
  if (PyErr_Occurred()) return nullptr;
  const int64_t result = run(*program, a);
  return result < 0 ? nullptr : PyLong_FromLongLong(result);
}

// A planned call: what is known of it beforehand stays here, so that a call reads pointers, allocates and launches.

// A tensor as DLPack's C exchange API shows it: no Python object is made for a size or a stride.
struct Tensor {
  char* data;
  int32_t device_kind, device_index, rank, dtype;
  const int64_t *sizes, *strides;
  uint64_t byte_offset;

  int64_t pointer() const { return reinterpret_cast<int64_t>(data + byte_offset); }
};

struct Exchange {
  uint32_t major_version, minor_version;
  const Exchange* older;
  void* owning[3];
  int (*read)(PyObject*, Tensor*);
};

// One program on tensors of one combination of layouts and types.
struct Plan {
  const Program& program;
  const Exchange* exchange = nullptr;
  int64_t* seen = nullptr;         // what `describe` says of each input, one after the other
  int64_t* bytes = nullptr;        // from where each input is read to behind its last
  int64_t* offsets = nullptr;      // in bytes, how far behind its beginning that is
  int64_t sizes[kMostArguments];   // what the program takes between its pointers and its last argument
  Py_ssize_t size_count = 0;
  // Borrowed from the tuple `owned`. needs, layouts and scratch may be None; updates has, for each of the last outputs,
  // the input in whose place it is written.
  PyObject *owned = nullptr, *types, *needs, *allocate, *layouts, *scratch, *is_grad_enabled, *where, *where_arguments, *updates, *note_changes;

  ~Plan() {
    PyMem_Free(seen);
    PyMem_Free(bytes);
    PyMem_Free(offsets);
    Py_XDECREF(owned);
  }
  static void* operator new(size_t size) noexcept { return PyMem_Malloc(size); }
  static void operator delete(void* plan) { PyMem_Free(plan); }
};

static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");

// Whether a tensor's memory has what the tensor has. The imaginary part of a conjugate is negated in torch's mind alone;
// elements of such lie two by two, so that no plan reads them where they lie, unless there is but one.
static bool is_stored(PyObject* object, const Tensor& tensor) {
  for (int32_t axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.sizes[axis] != 1) return true;
  }
  PyObject* const is_negated = PyObject_CallMethodNoArgs(object, is_neg);
  Py_XDECREF(is_negated);
  PyErr_Clear();
  return is_negated == Py_False;
}

// False for a subclass of torch's tensors, to which an allocation may mean more than memory, and for a tensor without
// memory or whose memory has something else, to which Python sees.
static bool read(const Plan& plan, PyObject* object, Tensor* tensor) {
  bool is_known = false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plan.types); ++i) {
    is_known |= reinterpret_cast<PyObject*>(Py_TYPE(object)) == PyTuple_GET_ITEM(plan.types, i);
  }
  if (!is_known) return false;
  if (plan.exchange->read(object, tensor) == 0) return tensor->data != nullptr && is_stored(object, *tensor);
  PyErr_Clear();
  return false;
}

// How far a tensor reaches in memory.
static int64_t bytes_of(const Tensor& tensor) {
  int64_t elements = 1;
  for (int32_t axis = 0; axis < tensor.rank; ++axis) elements += (tensor.sizes[axis] - 1) * tensor.strides[axis];
  return elements * (tensor.dtype >> 8 & 0xff) / 8;  // of a type, the second byte has its bits
}

// Writes what a tensor is, and gives the end of what it wrote.
static int64_t* describe(const Tensor& tensor, int64_t* seen) {
  const int64_t kinds[] = {tensor.device_kind, tensor.device_index, tensor.rank, tensor.dtype};
  const size_t bytes = static_cast<size_t>(tensor.rank) * sizeof(int64_t);
  std::memcpy(seen, kinds, sizeof kinds);
  std::memcpy(seen + 4, tensor.sizes, bytes);
  std::memcpy(seen + 4 + tensor.rank, tensor.strides, bytes);
  return seen + 4 + 2 * tensor.rank;
}

// Whether a tensor is what `describe` said at `seen`, which moves on.
static bool is_as_described(const Tensor& tensor, const int64_t** seen) {
  const int64_t* const s = *seen;
  if (s[0] != tensor.device_kind || s[1] != tensor.device_index || s[2] != tensor.rank || s[3] != tensor.dtype) return false;
  const size_t bytes = static_cast<size_t>(tensor.rank) * sizeof(int64_t);
  *seen += 4 + 2 * tensor.rank;
  return std::memcmp(s + 4, tensor.sizes, bytes) == 0 && std::memcmp(s + 4 + tensor.rank, tensor.strides, bytes) == 0;
}

// Whether autograd wants of the inputs what the plan gives; -1 for a Python error.
static int has_planned_needs(const Plan& plan, PyObject* const* inputs) {
  const bool is_planned = plan.needs != Py_None;
  bool is_equal = true, is_any = false;
  for (Py_ssize_t i = 0; i < plan.program.inputs; ++i) {
    PyObject* const needs = PyObject_GetAttr(inputs[i], requires_grad);
    if (needs == nullptr) return -1;
    Py_DECREF(needs);
    is_any |= needs == Py_True;
    is_equal &= !is_planned || needs == PyTuple_GET_ITEM(plan.needs, i);
  }
  if (!is_any) return !is_planned;
  PyObject* const is_enabled = PyObject_CallNoArgs(plan.is_grad_enabled);
  if (is_enabled == nullptr) return -1;
  Py_DECREF(is_enabled);
  return is_planned ? is_equal && is_enabled == Py_True : is_enabled == Py_False;
}

// New memory, and its pointer; it is_home where it lies on the device of the inputs.
static PyObject* allocate(const Plan& plan, PyObject* layout, int64_t* pointer, bool* is_home) {
  PyObject* const memory = PyObject_Call(plan.allocate, layout, nullptr);
  Tensor tensor;
  if (memory == nullptr || plan.exchange->read(memory, &tensor) != 0) {
    Py_XDECREF(memory);
    return nullptr;
  }
  *pointer = tensor.pointer();
  *is_home &= tensor.device_index == plan.seen[1];
  return memory;
}

static Py_ssize_t updated(const Plan& plan, Py_ssize_t i) { return PyLong_AsSsize_t(PyTuple_GET_ITEM(plan.updates, i)); }

// Whether no input that is updated has memory in common with another one.
static bool are_apart(const Plan& plan, const int64_t* a) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plan.updates); ++i) {
    const Py_ssize_t mine = updated(plan, i);
    for (Py_ssize_t other = 0; other < plan.program.inputs; ++other) {
      if (other != mine && a[mine] < a[other] + plan.bytes[other] && a[other] < a[mine] + plan.bytes[mine]) return false;
    }
  }
  return true;
}

// Tells torch which inputs have changed; false with a Python error set.
static bool note_changes(const Plan& plan, PyObject* const* inputs) {
  const Py_ssize_t count = PyTuple_GET_SIZE(plan.updates);
  PyObject* const changed = count == 0 ? nullptr : PyTuple_New(count);
  if (changed == nullptr) return count == 0;
  for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(changed, i, Py_NewRef(inputs[updated(plan, i)]));
  PyObject* const done = PyObject_CallOneArg(plan.note_changes, changed);
  Py_DECREF(changed);
  Py_XDECREF(done);
  return done != nullptr;
}

// Runs on new outputs, given in a tuple, and updates in place; a holds the pointers of the inputs. None where Python has
// to see to it: another device is current, some view is not aligned, or what is updated is not apart.
static PyObject* run_on_new(const Plan& plan, PyObject* const* inputs, int64_t* a) {
  if (!are_apart(plan, a)) return Py_NewRef(Py_None);
  bool is_home = true;
  int64_t* next = a + plan.program.inputs;
  const Py_ssize_t update_count = PyTuple_GET_SIZE(plan.updates), count = plan.program.outputs - update_count;
  PyObject* const outputs = PyTuple_New(count);
  if (outputs == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const memory = allocate(plan, PyTuple_GET_ITEM(plan.layouts, i), next++, &is_home);
    PyTuple_SET_ITEM(outputs, i, memory);
    if (memory == nullptr) break;
  }
  next = a + plan.program.inputs + count;
  for (Py_ssize_t i = 0; i < update_count; ++i) *next++ = a[updated(plan, i)];
  PyObject* scratch = nullptr;
  *next = 0;
  if (plan.scratch != Py_None && !PyErr_Occurred()) scratch = allocate(plan, plan.scratch, next, &is_home);
  PyObject* const where = PyErr_Occurred() ? nullptr : PyObject_Call(plan.where, plan.where_arguments, nullptr);
  int64_t state = 1;
  if (where != nullptr) {
    std::memcpy(next + 1, plan.sizes, static_cast<size_t>(plan.size_count) * sizeof(int64_t));
    next[1 + plan.size_count] = PyLong_AsLongLong(where);
    Py_DECREF(where);
    if (is_home) state = run(plan.program, a);
  }
  Py_XDECREF(scratch);
  if (state == 0 && note_changes(plan, inputs)) return outputs;
  Py_DECREF(outputs);
  return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
}

constexpr const char* kCapsule = "fusegen.Plan";

static const Plan& plan_of(PyObject* capsule) { return *static_cast<Plan*>(PyCapsule_GetPointer(capsule, kCapsule)); }

// attempt(first input, tuple of the others): None where they are not as planned; True where they are, but Python has to
// go on; else the outputs.
static PyObject* attempt(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  const Plan& plan = plan_of(self);
  const Py_ssize_t count = plan.program.inputs;
  if (given != 2 || !PyTuple_Check(args[1]) || PyTuple_GET_SIZE(args[1]) != count - 1) Py_RETURN_NONE;
  PyObject* inputs[kMostArguments];
  int64_t a[kMostArguments];
  const int64_t* seen = plan.seen;
  for (Py_ssize_t i = 0; i < count; ++i) {
    inputs[i] = i == 0 ? args[0] : PyTuple_GET_ITEM(args[1], i - 1);
    Tensor tensor;
    if (!read(plan, inputs[i], &tensor) || !is_as_described(tensor, &seen)) Py_RETURN_NONE;
    a[i] = tensor.pointer() + plan.offsets[i];
  }
  const int is_planned = has_planned_needs(plan, inputs);
  if (is_planned < 0) return nullptr;
  if (is_planned == 0) Py_RETURN_NONE;
  if (plan.needs != Py_None || plan.layouts == Py_None) Py_RETURN_TRUE;
  PyObject* const outputs = run_on_new(plan, inputs, a);
  if (outputs != Py_None) return outputs;
  Py_DECREF(outputs);
  Py_RETURN_TRUE;
}

// run(inputs): the outputs, for a tuple of inputs that are as planned; None where Python has to see to it.
static PyObject* run_planned(PyObject* self, PyObject* given) {
  const Plan& plan = plan_of(self);
  if (plan.layouts == Py_None || PyTuple_GET_SIZE(given) != plan.program.inputs) Py_RETURN_NONE;
  PyObject* inputs[kMostArguments];
  int64_t a[kMostArguments];
  for (Py_ssize_t i = 0; i < plan.program.inputs; ++i) {
    Tensor tensor;
    inputs[i] = PyTuple_GET_ITEM(given, i);
    if (!read(plan, inputs[i], &tensor)) Py_RETURN_NONE;
    a[i] = tensor.pointer() + plan.offsets[i];
  }
  return run_on_new(plan, inputs, a);
}

static void forget(PyObject* capsule) { delete static_cast<Plan*>(PyCapsule_GetPointer(capsule, kCapsule)); }

static PyMethodDef attempt_method = {"attempt", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(attempt)), METH_FASTCALL, nullptr};
static PyMethodDef run_method = {"run", run_planned, METH_O, nullptr};

// Fills a plan from plan's arguments; false with a Python error set.
static bool fill(Plan* plan, PyObject* inputs, PyObject* facts) {
  PyObject *exchange, *sizes, *offsets;
  if (!PyArg_ParseTuple(facts, "OOOOOOOOOOOOO", &exchange, &plan->types, &plan->needs, &plan->allocate, &plan->layouts, &plan->scratch, &sizes,
                        &plan->is_grad_enabled, &plan->where, &plan->where_arguments, &plan->updates, &plan->note_changes, &offsets)) return false;
  plan->owned = Py_NewRef(facts);
  plan->exchange = static_cast<const Exchange*>(PyCapsule_GetPointer(exchange, "dlpack_exchange_api"));
  while (plan->exchange != nullptr && plan->exchange->major_version != 1) plan->exchange = plan->exchange->older;
  if (plan->exchange == nullptr) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ImportError, "torch's tensors do not offer version 1 of DLPack's C exchange API");
    return false;
  }
  plan->size_count = PyTuple_GET_SIZE(sizes);
  for (Py_ssize_t i = 0; i < plan->size_count; ++i) plan->sizes[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, i));
  Tensor tensors[kMostArguments];
  size_t length = 0;
  for (Py_ssize_t i = 0; i < plan->program.inputs; ++i) {
    if (plan->exchange->read(PyTuple_GET_ITEM(inputs, i), &tensors[i]) != 0) return false;
    length += 4 + 2 * static_cast<size_t>(tensors[i].rank);
  }
  int64_t* next = plan->seen = PyMem_New(int64_t, length);
  plan->bytes = PyMem_New(int64_t, plan->program.inputs);
  plan->offsets = PyMem_New(int64_t, plan->program.inputs);
  if (plan->seen == nullptr || plan->bytes == nullptr || plan->offsets == nullptr) {
    PyErr_NoMemory();
    return false;
  }
  for (Py_ssize_t i = 0; i < plan->program.inputs; ++i) {
    next = describe(tensors[i], next);
    plan->offsets[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(offsets, i));
    plan->bytes[i] = bytes_of(tensors[i]) - plan->offsets[i];
  }
  return !PyErr_Occurred();
}

// plan(program, inputs, facts): the functions attempt and run. facts are DLPack's exchange API, the types a tensor may
// have, which inputs need gradients or None, how to allocate, with what for each output (None: Python does it) and for
// scratch memory (None: there is none), the sizes, whether gradients are wanted at all, where to run, the inputs that are
// updated, whom to tell of those, and how many bytes behind its beginning each input is read.
static PyObject* plan(PyObject*, PyObject* args) {
  const char* name;
  PyObject *inputs, *facts;
  if (!PyArg_ParseTuple(args, "sO!O!", &name, &PyTuple_Type, &inputs, &PyTuple_Type, &facts)) return nullptr;
  const Program* const program = program_named(name);
  if (program == nullptr) return nullptr;
  auto* const made = new Plan{*program};
  if (made == nullptr) return PyErr_NoMemory();
  PyObject* const capsule = PyCapsule_New(made, kCapsule, forget);
  PyObject* result = nullptr;
  if (capsule == nullptr) delete made;
  else if (fill(made, inputs, facts)) result = Py_BuildValue("NN", PyCFunction_New(&attempt_method, capsule), PyCFunction_New(&run_method, capsule));
  Py_XDECREF(capsule);
  return result;
}

static PyMethodDef methods[] = {
    {"launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(launch)), METH_FASTCALL, nullptr},
    {"plan", plan, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

extern "C" PyObject* make_module(const char* name, const Program* given, int64_t count, const char* (*text)(int64_t)) {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, name, nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  programs = given, program_count = count, error_text = text;
  for (int64_t i = 0; i < count; ++i) {
    if (given[i].arguments <= kMostArguments) continue;
    return PyErr_Format(PyExc_ImportError, "%s takes %zd arguments, and %zd at most are allowed", given[i].name, given[i].arguments, kMostArguments);
  }
  return PyModule_Create(&definition);
}
