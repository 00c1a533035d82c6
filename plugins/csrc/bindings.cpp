// The Python side of the native code: the operations on numpy arrays, and the decoder.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "../../quasar_trt/engines/csrc/decoder.h"
#include "../../quasar_trt/engines/csrc/thread_pool.h"
#include "bandwidth.h"
#include "kernels.h"

namespace py = pybind11;
using namespace quasar;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const Kernels* const* table = runnable_kernels(); *table; ++table) names.emplace_back((*table)->name);
  return names;
}

// An empty name means the best.
const Kernels* kernels_named(const std::string& name) {
  for (const Kernels* const* table = runnable_kernels(); *table; ++table)
    if (name.empty() || name == (*table)->name) return *table;
  throw std::invalid_argument("instruction set '" + name + "' was not compiled in or does not run here");
}

template <class T>
const T* pointer(const py::dict& tensors, const std::string& name) {
  if (!tensors.contains(name)) return nullptr;
  const auto array = py::cast<py::array>(tensors[name.c_str()]);
  return static_cast<const T*>(array.data());
}

// A weight with a scale is INT8 and reads `codes`; one without is BF16.
Linear linear_named(const py::dict& tensors, const std::string& name, int k, Input codes, int hadamard) {
  const Weight weight{pointer<void>(tensors, name + ".weight"), pointer<float>(tensors, name + ".scale"),
                      pointer<float>(tensors, name + ".bias"), k};
  return {weight, weight.scale ? codes : Input::kFloats, pointer<float>(tensors, name + ".inverse_smoother"), hadamard};
}

// Collectives as callables on arrays, by name. They had better not be Python functions: signals are then answered between passes.
class PyCollectives : public Collectives {
 public:
  PyCollectives(py::dict callables, const DecoderShape& shape) : callables_(std::move(callables)), rank_(shape.rank), ranks_(shape.ranks) {}
  ~PyCollectives() override {
    py::gil_scoped_acquire acquire;
    callables_ = py::dict();
  }
  void largest(int32_t* x, int64_t count) override { call("largest", x, {count}); }
  void add(int32_t* x, int64_t count) override { call("add", x, {count}); }
  void add(double* x, int64_t count) override { call("add", x, {count}); }
  void gather(float* x, int64_t count) override { call("gather", x, {ranks_, count}); }
  void collect(float* x, int64_t count) override {
    if (rank_ == 0) call("collect", x, {ranks_, count});
    else call("collect", x, {count});
  }

 private:
  template <class T>
  void call(const char* name, T* x, std::vector<py::ssize_t> shape) {
    py::gil_scoped_acquire acquire;
    callables_[name](py::array_t<T>(std::move(shape), x, py::none()));  // a view: it has a base
  }

  py::dict callables_;
  const int rank_, ranks_;
};

class PyDecoder {
 public:
  // Of each part its sequence, rows, rows with logits and the parents of its last rows, as Part has them.
  using Parts = std::vector<std::tuple<int, int, int, std::vector<int>>>;

  // `tensors`: packed arrays by name (kept alive here), with "rope.cos" and "rope.sin" [max_seq_len, head / 2] among them.
  // `shape`: sizes, the bits of the layers' activations, and the columns of the Hadamard blocks by name of a linear.
  // `collectives`: those of several ranks, see PyCollectives, or none.
  PyDecoder(const py::dict& shape, py::dict tensors, std::shared_ptr<ThreadPool> pool, const std::string& isa,
            const std::optional<py::dict>& collectives)
      : tensors_(std::move(tensors)), pool_(std::move(pool)) {
    const auto number = [&](const char* name) { return py::cast<int>(shape[name]); };
    shape_ = {number("layers"), number("hidden"), number("intermediate"), number("heads"), number("kv_heads"), number("head"),
              number("vocab"), py::cast<float>(shape["norm_epsilon"]), number("rescored"), number("max_rows"), number("max_seq_len"),
              number("rank"), number("ranks"), number("vocab_share"), number("attention_inputs")};
    const Input codes = number("activations") == 16 ? Input::kCodes16 : Input::kCodes8;
    const auto blocks = py::cast<std::map<std::string, int>>(shape["hadamard_blocks"]);
    DecoderWeights weights;
    weights.embedding = pointer<uint16_t>(tensors_, "transformer.vocab_embedding.weight");
    weights.final_norm = pointer<float>(tensors_, "transformer.ln_f.weight");
    weights.head = linear_named(tensors_, "lm_head", shape_.hidden, Input::kCodes16, 0);
    weights.head_rows = pointer<uint16_t>(tensors_, "lm_head.rows");
    weights.cos = pointer<float>(tensors_, "rope.cos");
    weights.sin = pointer<float>(tensors_, "rope.sin");
    for (int i = 0; i < shape_.layers; ++i) {
      const std::string prefix = "transformer.layers." + std::to_string(i) + ".";
      const auto linear = [&](const std::string& name, int k) {
        const auto block = blocks.find(name);
        return linear_named(tensors_, prefix + name, k, codes, block == blocks.end() ? 0 : block->second);
      };
      weights.layers.push_back({pointer<float>(tensors_, prefix + "input_layernorm.weight"),
                                pointer<float>(tensors_, prefix + "post_layernorm.weight"),
                                pointer<float>(tensors_, prefix + "attention.q_layernorm.weight"),
                                pointer<float>(tensors_, prefix + "attention.k_layernorm.weight"),
                                linear("attention.qkv", shape_.attention_inputs ? shape_.attention_inputs : shape_.hidden),
                                linear("attention.dense", shape_.heads * shape_.head),
                                linear("mlp.fc_gate", shape_.hidden),
                                linear("mlp.proj", shape_.intermediate)});
    }
    decoder_ = std::make_unique<Decoder>(shape_, std::move(weights), *pool_, kernels_named(isa),
                                         collectives ? std::make_unique<PyCollectives>(*collectives, shape_) : nullptr);
  }

  // Logits [sum of logit_rows, vocab] float32, a read-only view that the next step overwrites; no rows on ranks but the first.
  py::array step(const Parts& parts, const Array<int32_t>& tokens) {
    const std::vector<Part> batch = batch_of(parts);
    int rows = 0, logit_rows = 0;
    for (const Part& part : batch) {
      rows += part.rows;
      logit_rows += part.logit_rows;
    }
    if (rows != tokens.size()) throw std::invalid_argument("the parts' rows do not add up to the tokens given");
    std::shared_ptr<const float> logits;
    {
      py::gil_scoped_release release;
      logits = decoder_->step(batch, tokens.data());
    }
    if (shape_.rank) logit_rows = 0;
    const auto item = static_cast<py::ssize_t>(sizeof(float));
    const py::capsule owner(new std::shared_ptr<const float>(logits),
                            [](void* p) { delete static_cast<std::shared_ptr<const float>*>(p); });
    py::array view(py::dtype::of<float>(), {static_cast<py::ssize_t>(logit_rows), static_cast<py::ssize_t>(shape_.vocab)},
                   {padded(shape_.vocab) * item, item}, logits.get(), owner);
    py::detail::array_proxy(view.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    return view;
  }

  // Rows [rows, padded columns] float32 in place of tokens, see GivenRows. Returns the residual stream behind the last layer, a copy
  // [rows, hidden]. Sizes are trusted.
  Array<float> step_rows(const Parts& parts, const Array<float>& residual, const Array<float>& attention_input) {
    const std::vector<Part> batch = batch_of(parts);
    const float* found;
    {
      py::gil_scoped_release release;
      found = decoder_->step(batch, GivenRows{residual.data(), attention_input.data()});
    }
    Array<float> rows({residual.shape(0), static_cast<py::ssize_t>(shape_.hidden)});
    for (py::ssize_t row = 0; row < rows.shape(0); ++row)
      std::copy_n(found + row * padded(shape_.hidden), shape_.hidden, rows.mutable_data(row, 0));
    return rows;
  }

  void keep_states(std::vector<int> layers) { decoder_->keep_states(std::move(layers)); }

  // Float32 [rows, kept layers, hidden], a copy.
  Array<float> states(const std::vector<int>& rows, int kept) const {
    Array<float> found({static_cast<py::ssize_t>(rows.size()), static_cast<py::ssize_t>(kept), static_cast<py::ssize_t>(shape_.hidden)});
    for (size_t i = 0; i < rows.size(); ++i)
      for (int place = 0; place < kept; ++place)
        std::copy_n(decoder_->state(place, rows[i]), shape_.hidden, found.mutable_data(static_cast<py::ssize_t>(i), place, 0));
    return found;
  }

  KvCache& cache() { return decoder_->cache(); }
  const Decoder& decoder() const { return *decoder_; }

 private:
  static std::vector<Part> batch_of(const Parts& parts) {
    std::vector<Part> batch;
    for (const auto& [sequence, count, wanted, parents] : parts) batch.push_back({sequence, count, wanted, parents});
    return batch;
  }

  py::dict tensors_;
  std::shared_ptr<ThreadPool> pool_;
  DecoderShape shape_;
  std::unique_ptr<Decoder> decoder_;
};

// Operations, one row or matrix at a time; vectors come padded to 16 floats, weights packed.

Array<float> rms_norm(const Array<float>& x, const Array<float>& weight, float eps, int n, const std::string& isa) {
  Array<float> y({x.shape(0), x.shape(1)});
  for (py::ssize_t r = 0; r < x.shape(0); ++r) kernels_named(isa)->rms_norm(x.data(r, 0), weight.data(), eps, n, y.mutable_data(r, 0));
  return y;
}

Array<float> silu_mul(const Array<float>& gate, const Array<float>& up, const std::string& isa) {
  Array<float> y({gate.shape(0), gate.shape(1)});
  for (py::ssize_t r = 0; r < gate.shape(0); ++r)
    kernels_named(isa)->silu_mul(gate.data(r, 0), up.data(r, 0), static_cast<int>(gate.shape(1)), y.mutable_data(r, 0));
  return y;
}

// A vector that may be missing; null then.
using Vector = std::optional<Array<float>>;
const float* data(const Vector& vector) { return vector ? vector->data() : nullptr; }

template <class Code>
py::tuple quantize(const Array<float>& x, const Vector& inverse_smoother, int hadamard, const std::string& isa) {
  const int n = static_cast<int>(x.shape(1));
  Array<Code> q({x.shape(0), x.shape(1)});
  Array<float> scales(x.shape(0));
  std::vector<float> scratch(static_cast<size_t>(n));
  const Kernels* kernels = kernels_named(isa);
  for (py::ssize_t r = 0; r < x.shape(0); ++r) {
    RowScale scale;
    const float *from = x.data(r, 0), *smoother = data(inverse_smoother);
    if constexpr (sizeof(Code) == 1) scale = kernels->quantize8(from, smoother, hadamard, n, scratch.data(), q.mutable_data(r, 0));
    else scale = kernels->quantize16(from, smoother, hadamard, n, scratch.data(), q.mutable_data(r, 0));
    scales.mutable_at(r) = scale.scale;
  }
  return py::make_tuple(q, scales);
}

// x: [rows, padded k] codes, or floats where `scales` is None; weight: packed. Returns [rows, padded n] float32.
// Without a pool the calling thread does it alone.
template <class Input>
Array<float> linear(const Array<Input>& x, const Vector& scales, const py::array& weight, const Vector& weight_scale,
                    const Vector& bias, int k, const std::string& isa, ThreadPool* pool) {
  const Kernels* kernels = kernels_named(isa);
  const int rows = static_cast<int>(x.shape(0)), stride = static_cast<int>(x.shape(1)), blocks = static_cast<int>(weight.shape(0));
  const Weight packed{weight.data(), data(weight_scale), data(bias), k};
  Array<float> y({static_cast<py::ssize_t>(rows), static_cast<py::ssize_t>(blocks) * kBlock});
  const Output out{y.mutable_data(), blocks * kBlock, Epilogue::kStore};
  const Input* from = x.data();
  std::vector<RowScale> row_scales;
  if constexpr (!std::is_same_v<Input, float>)
    for (int r = 0; r < rows; ++r) {
      const Input* row = from + static_cast<int64_t>(r) * stride;
      row_scales.push_back({data(scales)[r], std::accumulate(row, row + k, int32_t{0})});
    }
  const auto part = [&](int begin, int end) {
    if constexpr (std::is_same_v<Input, float>) kernels->linear_bf16(packed, from, stride, rows, begin, end, out);
    else if constexpr (sizeof(Input) == 1) kernels->linear_w8a8(packed, from, stride, row_scales.data(), rows, begin, end, out);
    else kernels->linear_w8a16(packed, from, stride, row_scales.data(), rows, begin, end, out);
  };
  {
    py::gil_scoped_release release;
    if (!pool) part(0, blocks);
    else pool->run([&](int thread) { std::apply(part, share(blocks, thread, pool->size())); });
  }
  return y;
}

// Every thread of the pool reads its part of the array.
uint64_t sum_words_of(const Array<uint64_t>& words, ThreadPool& pool) {
  const uint64_t* from = words.data();
  const int64_t size = words.size();
  std::vector<uint64_t> sums(static_cast<size_t>(pool.size()));
  py::gil_scoped_release release;
  pool.run([&](int thread) {
    sums[static_cast<size_t>(thread)] = sum_words(from, size * thread / pool.size(), size * (thread + 1) / pool.size());
  });
  return std::accumulate(sums.begin(), sums.end(), uint64_t{0});
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native kernels and the native decoder; use quasar_trt.plugins.native and quasar_trt.engines.cpu.";
  m.def("isa_names", &isa_names);
  m.def("rms_norm", &rms_norm);
  m.def("silu_mul", &silu_mul);
  m.def("quantize8", &quantize<int8_t>);
  m.def("quantize16", &quantize<int16_t>);
  m.def("linear_w8a8", &linear<int8_t>);
  m.def("linear_w8a16", &linear<int16_t>);
  m.def("linear_bf16", &linear<float>);
  py::class_<ThreadPool, std::shared_ptr<ThreadPool>>(m, "ThreadPool").def(py::init<int>());
  m.def("sum_words", &sum_words_of);
  py::class_<PyDecoder>(m, "Decoder")
      .def(py::init<const py::dict&, py::dict, std::shared_ptr<ThreadPool>, const std::string&, const std::optional<py::dict>&>())
      .def("step", &PyDecoder::step)
      .def("step_rows", &PyDecoder::step_rows)
      .def("keep_states", &PyDecoder::keep_states)
      .def("states", &PyDecoder::states)
      .def("open", [](PyDecoder& d) { return d.cache().open(); })
      .def("fork", [](PyDecoder& d, int sequence) { return d.cache().fork(sequence); })
      .def("close", [](PyDecoder& d, int sequence) { d.cache().close(sequence); })
      .def("length", [](PyDecoder& d, int sequence) { return d.cache().length(sequence); })
      .def("truncate", [](PyDecoder& d, int sequence, int length) { d.cache().truncate(sequence, length); })
      .def("compact", [](PyDecoder& d, int sequence, int length, const std::vector<int>& path) { d.cache().compact(sequence, length, path); })
      .def("growth", [](PyDecoder& d, int sequence, int count) { return d.cache().growth(sequence, count); })
      .def("bytes_of", [](PyDecoder& d, int64_t positions) { return d.cache().bytes_of(positions); })
      .def_property_readonly("progress", [](PyDecoder& d) { return d.decoder().progress(); })
      .def_property_readonly("collective_seconds", [](PyDecoder& d) { return d.decoder().collective_seconds(); })
      .def_property_readonly("cache_bytes", [](PyDecoder& d) { return d.cache().bytes(); });
}
