#include <cstring>

#include "bindings/bindings.h"
#include "core/memory.h"
#include "isa/linear.h"
#include "ops/attention_cache.h"
#include "parallel/stream.h"
#include "parallel/time_slice.h"

namespace twostep {

namespace {

std::shared_ptr<Device> make_device(const std::string& forced_isa) {
  auto device = std::make_shared<Device>();
  device->info = detect_cpu(forced_isa);
  device->table = &kernel_table(device->info.isa);
  for (int f = 0; f < kNumActForms; f++) {
    device->max_tile_rows[f] = device->table->linear->max_tile_rows[f];
  }
  return device;
}

std::vector<int32_t> to_vector(const Int32Array& a) { return {a.data(), a.data() + a.size()}; }

// The host's block table [rows, max_blocks], looked up once: asking numpy for it in every step took
// longer than making the step.
struct BlockTableView {
  Int32Matrix table;
};

using Ids = std::vector<int32_t>;  // any sequence of integers; a list is the fastest

// Copies what it needs of the block table, so that the host may change it at once.
std::shared_ptr<Step> make_step(const Device& device, int num_tokens, Ids query_start_loc, Ids seq_lens,
                                Ids rows, Ids logits_indices, Ids logits_reqs,
                                const BlockTableView& view, int block_size) {
  const Int32Matrix& block_table = view.table;
  auto step = std::make_shared<Step>();
  step->num_tokens = num_tokens;
  step->num_reqs = static_cast<int>(seq_lens.size());
  step->query_start_loc = std::move(query_start_loc);
  step->seq_lens = std::move(seq_lens);
  step->rows = std::move(rows);
  step->logits_indices = std::move(logits_indices);
  step->logits_reqs = std::move(logits_reqs);
  step->block_starts.reserve(step->num_reqs + 1);
  step->block_starts.push_back(0);
  for (int r = 0; r < step->num_reqs; r++) {
    const int row = step->rows.at(r), count = (step->seq_lens[r] + block_size - 1) / block_size;
    if (row < 0 || static_cast<size_t>(row) >= block_table.shape(0) ||
        static_cast<size_t>(count) > block_table.shape(1)) {
      throw std::invalid_argument("step: row or sequence length outside the block table");
    }
    const int32_t* ids = block_table.data() + static_cast<size_t>(row) * block_table.shape(1);
    step->block_ids.insert(step->block_ids.end(), ids, ids + count);
    step->block_starts.push_back(static_cast<int32_t>(step->block_ids.size()));
  }
  for (const int32_t i : step->logits_indices) {
    if (i < 0 || i >= num_tokens) throw std::invalid_argument("step: logits index out of range");
  }
  for (const int32_t r : step->logits_reqs) {
    if (r < 0 || r >= step->num_reqs) throw std::invalid_argument("step: logits request out of range");
  }
  step->derive(device.max_tile_rows);
  return step;
}

}  // namespace

void bind_core(nb::module_& m) {
  nb::enum_<ActForm>(m, "ActForm")
      .value("Q8", ActForm::Q8)
      .value("BF16", ActForm::BF16)
      .value("F32", ActForm::F32);
  nb::enum_<RowSet>(m, "RowSet").value("Tokens", RowSet::Tokens).value("Logits", RowSet::Logits);

  nb::class_<Device>(m, "Device")
      .def_prop_ro("isa", [](const Device& d) { return d.info.isa; })
      .def_prop_ro("reason", [](const Device& d) { return d.info.reason; })
      .def("max_tile_rows", [](const Device& d, ActForm f) { return d.max_tile_rows[static_cast<int>(f)]; });
  m.def("make_device", &make_device, nb::arg("isa") = "",
        "The kernels to use: the best this machine runs, or those of the named instruction set.");
  m.def("cpu_info", [](const std::string& forced) {
    const CpuInfo info = detect_cpu(forced);
    nb::dict d;
    d["isa"] = info.isa;
    d["reason"] = info.reason;
    d["isas"] = info.isas;
    d["features"] = info.features;
    return d;
  }, nb::arg("isa") = "");

  nb::class_<Rows>(m, "Rows")
      .def(nb::new_([](int width, int max_rows) { return std::make_shared<Rows>(width, max_rows); }))
      .def_ro("width", &Rows::width)
      .def("numpy", [](std::shared_ptr<Rows> rows) {
        auto* keep = new std::shared_ptr<Rows>(rows);
        nb::capsule owner(keep, [](void* p) noexcept { delete static_cast<std::shared_ptr<Rows>*>(p); });
        return nb::ndarray<nb::numpy, float, nb::ndim<2>>(
            rows->data, {static_cast<size_t>(rows->max_rows), static_cast<size_t>(rows->width)}, owner);
      }, "A view [max_rows, width], float32; valid while no step runs.");

  nb::class_<ActBuffer>(m, "ActBuffer")
      .def(nb::new_([](ActForm form, int width, int max_rows) {
        return std::make_shared<ActBuffer>(form, width, max_rows);
      }))
      .def("dequantize", [](const ActBuffer& b, const Step& step, RowSet set) {
        const Act& a = b.act();
        const int n = step.num_rows(set);
        auto* data = new float[static_cast<size_t>(n) * a.width + 1];
        nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
        for (int m = 0; m < n; m++) {
          const auto& tile = step.tiles_of(set, a.form).of_row(m);
          for (int k = 0; k < a.width; k++) {
            const size_t slot = a.slot(tile.r0, tile.rows, m, k / kGroup);
            const size_t i = slot * kGroup + k % kGroup;
            data[static_cast<size_t>(m) * a.width + k] =
                a.form == ActForm::Q8 ? a.scale[slot] * a.q[i]
                : a.form == ActForm::BF16 ? bf16_to_f32(a.bf16[i]) : a.f32[i];
          }
        }
        return nb::ndarray<nb::numpy, float, nb::ndim<2>>(
            data, {static_cast<size_t>(n), static_cast<size_t>(a.width)}, owner);
      }, "The values as float32 [rows of the step, width]; for tests.");

  nb::class_<TokenTable>(m, "TokenTable")
      .def(nb::new_([](int num_rows, int max_len) { return std::make_shared<TokenTable>(num_rows, max_len); }))
      .def("row", [](const TokenTable& t, int row, int count) {
        t.check(row, 0, count);
        return std::vector<int32_t>(t.row(row), t.row(row) + count);
      }, "The first `count` tokens of a row; for tests and debugging.");

  nb::class_<Step>(m, "Step")
      .def_ro("num_tokens", &Step::num_tokens)
      .def_ro("num_logits", &Step::num_logits)
      .def("keep_cached", [](Step& step, int request, int num_cached) {
        if (request < 0 || request >= step.num_reqs) throw std::out_of_range("step: no such request");
        step.cached_lens.resize(step.num_reqs, 0);
        step.cached_lens[request] = num_cached;
      }, nb::arg("request"), nb::arg("num_cached"),
         "Positions of the request below num_cached are in the KV cache and are not written again.")
      .def("stage_tokens", [](Step& step, std::shared_ptr<TokenTable> table, int row, int start, Int32Array ids) {
        table->check(row, start, static_cast<int>(ids.size()));
        step.staged.emplace_back([table, row, start, copy = to_vector(ids)] {
          std::memcpy(table->row(row) + start, copy.data(), copy.size() * sizeof(int32_t));
        });
      }, nb::arg("table"), nb::arg("row"), nb::arg("start"), nb::arg("ids"));
  nb::class_<BlockTableView>(m, "BlockTableView",
                             "A numpy block table, int32 [rows, max_blocks], that the host goes on writing.")
      .def(nb::init<Int32Matrix>(), nb::arg("table"));
  nb::implicitly_convertible<Int32Matrix, BlockTableView>();
  m.def("make_step", &make_step, nb::arg("device"), nb::arg("num_tokens"), nb::arg("query_start_loc"),
        nb::arg("seq_lens"), nb::arg("rows"), nb::arg("logits_indices"), nb::arg("logits_reqs"),
        nb::arg("block_table"), nb::arg("block_size"));

  nb::class_<Plan>(m, "Plan")
      .def(nb::new_([] { return std::make_shared<Plan>(); }))
      .def("__len__", [](const Plan& p) { return p.ops().size(); })
      .def("slice", &Plan::slice, nb::arg("first"), nb::arg("last"),
           "Ops first .. last - 1 as a plan of their own.")
      .def("op_names", [](const Plan& p) {
        std::vector<std::string> names;
        for (const auto& op : p.ops()) names.emplace_back(op->name());
        return names;
      });

  nb::class_<Stream>(m, "Stream")
      .def(nb::init<int, bool>(), nb::arg("num_threads"), nb::arg("caller_joins") = true)
      .def("launch", [](Stream& s, std::shared_ptr<Plan> plan, std::shared_ptr<Step> step) {
        return s.launch(*plan, std::move(step));
      }, nb::keep_alive<1, 2>())
      .def("wait", &Stream::wait, nb::call_guard<nb::gil_scoped_release>())
      .def("done", &Stream::done)
      .def("tend_when_idle", [](Stream& s, std::shared_ptr<KVCache> cache, std::shared_ptr<Arena> arena) {
        s.set_idle_work([cache, arena](bool rested) {
          if (cache->touch_ahead()) return true;
          // Up to 25 ms each: not between steps, nor where a process that answers once would wait for it.
          return rested && ((arena && arena->promote()) || cache->promote());
        });
      }, nb::arg("cache"), nb::arg("arena").none() = nb::none(),
         "Threads without work take the cache's next memory from the system, and put what came in small pages, the "
         "weights in the arena first, on huge ones.")
      .def_prop_ro("num_threads", &Stream::num_threads)
      .def_prop_ro("last_ticket", &Stream::last_ticket)
      .def("set_timing", &Stream::set_timing)
      .def("take_spans", [](Stream& s, uint64_t first, uint64_t last) {
        nb::list spans;
        for (const auto& span : s.take_spans(first, last)) {
          spans.append(nb::make_tuple(span.ticket, span.start / 1e9, span.end / 1e9));
        }
        return spans;
      }, nb::arg("first"), nb::arg("last"),
         "(ticket, start, end) of launches first..last, in seconds of time.monotonic; and forgets them.")
      .def("set_profile", &Stream::set_profile)
      .def("profile", [](Stream& s) {
        nb::dict d;
        for (const auto& row : s.profile()) d[row.name.c_str()] = nb::make_tuple(row.nanoseconds, row.runs);
        return d;
      });
  m.def("take_long_slices", &take_long_slices,
        "Whoever wakes up runs before the calling thread, as before the threads of a Stream.");
}

}  // namespace twostep
