// Arrays of strings in GGUF files: each a little-endian u64 length, then UTF-8. A vocabulary has up to
// 250,000, and every start reads two such arrays.
#include <cstring>

#include "bindings/bindings.h"

namespace twostep {

namespace {

constexpr uint64_t kFar = uint64_t{1} << 62;  // no file is that long

// Where the string that begins at `at` ends; beyond the data if it does not fit.
uint64_t string_end(const ByteArray& data, uint64_t at) {
  if (at > data.size() || data.size() - at < 8) return at + 8;
  uint64_t length;
  std::memcpy(&length, data.data() + at, 8);
  return length > kFar ? kFar : at + 8 + length;
}

uint64_t skip_strings(const ByteArray& data, uint64_t at, uint64_t count) {
  for (; count > 0 && at <= data.size(); count--) at = string_end(data, at);
  return at;
}

nb::list read_strings(const ByteArray& data, uint64_t at, uint64_t count) {
  nb::list texts;
  for (; count > 0; count--) {
    const uint64_t end = string_end(data, at);
    if (end > data.size()) throw nb::index_error("a string reaches beyond the data");
    const auto* bytes = reinterpret_cast<const char*>(data.data() + at + 8);
    PyObject* text = PyUnicode_DecodeUTF8(bytes, static_cast<Py_ssize_t>(end - at - 8), "strict");
    if (text == nullptr) throw nb::python_error();
    texts.append(nb::steal(text));
    at = end;
  }
  return texts;
}

}  // namespace

void bind_strings(nb::module_& m) {
  m.def("skip_strings", &skip_strings, nb::arg("data"), nb::arg("start"), nb::arg("count"),
        "The offset behind `count` strings; beyond the data's size if they do not fit.");
  m.def("read_strings", &read_strings, nb::arg("data"), nb::arg("start"), nb::arg("count"),
        "`count` strings as a list. Raises UnicodeDecodeError, or IndexError if they do not fit.");
}

}  // namespace twostep
