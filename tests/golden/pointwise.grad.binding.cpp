// fusegen 0.1.0   chain f8c0d91a637e: the binding to Python
#include <Python.h>

#include <cstdint>

extern "C" int64_t run_forward(const int64_t* a);
extern "C" int64_t run_backward(const int64_t* a);
extern "C" const char* error_text(int64_t code);

static PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t given) {
  int64_t a[9];
  if (given != 9) {
    PyErr_Format(PyExc_TypeError, "forward takes 9 integers, got %zd", given);
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < given; ++i) a[i] = PyLong_AsLongLong(args[i]);
  if (PyErr_Occurred()) return nullptr;
  const int64_t result = run_forward(a);
  if (result < 0) {
    PyErr_SetString(PyExc_RuntimeError, error_text(result));
    return nullptr;
  }
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
  const int64_t result = run_backward(a);
  if (result < 0) {
    PyErr_SetString(PyExc_RuntimeError, error_text(result));
    return nullptr;
  }
  return PyLong_FromLongLong(result);
}

static PyMethodDef methods[] = {
    {"forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(forward)), METH_FASTCALL, nullptr},
    {"backward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(backward)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fusegen_749374ccb620", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_fusegen_749374ccb620() { return PyModule_Create(&definition); }
