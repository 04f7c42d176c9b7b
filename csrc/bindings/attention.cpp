#include "ops/attention.h"

#include <stdexcept>

#include "bindings/bindings.h"

namespace twostep {

namespace {

struct KVTypeName {
  const char* name;
  KVType type;
};
constexpr KVTypeName kKVTypes[] = {{"bf16", KVType::BF16}, {"fp16", KVType::F16}, {"fp32", KVType::F32}};

KVType kv_type(const std::string& name) {
  for (const auto& t : kKVTypes) {
    if (name == t.name) return t.type;
  }
  throw std::invalid_argument("KV cache: dtype is '" + name + "', must be bf16, fp16 or fp32");
}

const char* kv_type_name(KVType type) {
  for (const auto& t : kKVTypes) {
    if (type == t.type) return t.name;
  }
  return "?";
}

std::shared_ptr<RopeTable> make_rope_table(FloatMatrix cos, FloatMatrix sin) {
  if (cos.shape(0) != sin.shape(0) || cos.shape(1) != sin.shape(1)) {
    throw std::invalid_argument("rope table: cos and sin differ in shape");
  }
  return std::make_shared<RopeTable>(cos.data(), sin.data(), static_cast<int>(cos.shape(0)),
                                     static_cast<int>(cos.shape(1)));
}

// (offset in the cache, bytes) of what an op's chunks will read of it, for tests.
nb::list read_ahead(const KVCache& cache, const Plan& plan, size_t op, const Step& step) {
  const Op& reader = *plan.ops().at(op);
  ReadAhead ahead;
  if (reader.reads_cache()) reader.add_cached(step, 0, reader.num_chunks(step), ahead);
  const char* start = static_cast<const char*>(cache.k_blocks(0, 0));
  nb::list found;
  for (const Stretch& s : ahead.stretches()) found.append(nb::make_tuple(s.begin - start, s.end - s.begin));
  return found;
}

void bind_cache(nb::module_& m) {
  nb::class_<KVCache>(m, "KVCache", "Pools of KV blocks of all layers; zeroed, lazy.")
      .def(nb::new_([](const Device& d, int num_layers, int num_kv_heads, int head_dim, int num_blocks,
                       int block_size, const std::string& dtype) {
        return std::make_shared<KVCache>(*d.table, num_layers, num_kv_heads, head_dim, num_blocks,
                                         block_size, kv_type(dtype));
      }), nb::arg("device"), nb::arg("num_layers"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
          nb::arg("num_blocks"), nb::arg("block_size") = kBlockSize, nb::arg("dtype") = "bf16")
      .def_prop_ro("nbytes", &KVCache::nbytes)
      .def("read_ahead", &read_ahead, nb::arg("plan"), nb::arg("op"), nb::arg("step"),
           "[(offset, bytes)] that products in front of this op fetch for it.")
      .def_prop_ro("touched_bytes", &KVCache::touched_bytes, "What idle threads took from the system ahead.")
      .def_prop_ro("dtype", [](const KVCache& c) { return kv_type_name(c.type); })
      .def_ro("num_layers", &KVCache::num_layers)
      .def_ro("num_kv_heads", &KVCache::num_kv_heads)
      .def_ro("head_dim", &KVCache::head_dim)
      .def_ro("num_blocks", &KVCache::num_blocks);
  m.def("default_kv_dtype", [](const Device& d) { return kv_type_name(d.table->attention->default_kv_type); },
        nb::arg("device"), "The KV dtype that this instruction set reads fastest.");

  nb::class_<RopeTable>(m, "RopeTable", "cos and sin, float32 [max_position, rotary_dim / 2]; copied.")
      .def(nb::new_(&make_rope_table), nb::arg("cos"), nb::arg("sin"))
      .def_ro("max_position", &RopeTable::max_position)
      .def_prop_ro("rotary_dim", [](const RopeTable& t) { return 2 * t.half; });
}

}  // namespace

void bind_attention(nb::module_& m) {
  bind_cache(m);
  nb::class_<Rope>(m, "Rope", "How a layer's q and k are rotated and its KV is written; see add_rope_cache.");
  m.def("add_rope_cache",
        [](Plan& plan, const Device& d, std::shared_ptr<KVCache> cache, int layer,
           std::shared_ptr<Rows> qkv, std::shared_ptr<Rows> q_out, std::shared_ptr<RopeTable> table,
           int num_heads, float scale, float softcap, bool interleaved,
           std::shared_ptr<Vector> q_norm, std::shared_ptr<Vector> k_norm, float norm_eps, bool may_sample) {
          RopeSpec spec{num_heads, scale, softcap, std::move(table), interleaved, q_norm, k_norm, norm_eps,
                        may_sample};
          auto rope = std::make_shared<Rope>(*d.table, std::move(cache), layer, std::move(qkv), std::move(spec));
          plan.add(make_rope_cache(rope, std::move(q_out)));
          return rope;
        },
        nb::arg("plan"), nb::arg("device"), nb::arg("cache"), nb::arg("layer"), nb::arg("qkv"),
        nb::arg("q_out").none(), nb::arg("rope"), nb::kw_only(), nb::arg("num_heads"), nb::arg("scale"),
        nb::arg("softcap") = 0.0f, nb::arg("interleaved") = false, nb::arg("q_norm").none() = nb::none(),
        nb::arg("k_norm").none() = nb::none(), nb::arg("norm_eps") = 0.0f, nb::arg("may_sample") = false,
        "qkv [T, (num_heads + 2 * num_kv_heads) * head_dim] -> q_out [T, num_heads * head_dim]: norm\n"
        "each head of q and k where a weight is given, rotate, write k and v into the cache. q_out holds\n"
        "q times the attention scale, in the unit that add_attention's softmax works in. Without q_out,\n"
        "queries, and all of a step in which every request has one token, are left to the add_attention\n"
        "that is given what this returns as its rope. may_sample: that may be of the sampled tokens only.");
  m.def("add_attention",
        [](Plan& plan, const Device& d, std::shared_ptr<KVCache> cache, int layer,
           std::shared_ptr<Rows> q, int num_heads, int num_threads, std::shared_ptr<Rope> rope,
           int sliding_window, float softcap, bool causal, RowSet queries, std::shared_ptr<Rows> rows,
           std::vector<std::shared_ptr<ActBuffer>> acts) {
          add_attention(plan, *d.table, std::move(cache), layer, std::move(q), std::move(rope),
                        {num_heads, sliding_window, softcap, num_threads, causal, queries}, std::move(rows),
                        std::move(acts));
        },
        nb::arg("plan"), nb::arg("device"), nb::arg("cache"), nb::arg("layer"), nb::arg("q").none(),
        nb::kw_only(), nb::arg("num_heads"), nb::arg("num_threads"),
        nb::arg("rope").none() = nb::none(), nb::arg("sliding_window") = 0, nb::arg("softcap") = 0.0f,
        nb::arg("causal") = true, nb::arg("queries") = RowSet::Tokens,
        nb::arg("rows").none() = nb::none(), nb::arg("acts") = nb::list(),
        "Attention of q (as add_rope_cache leaves it, or None and rope) over the cache, into float32 rows and/or\n"
        "activations [T, num_heads * head_dim], or [S, ...] if the queries are the logits rows. num_threads is\n"
        "the stream's. Without the causal mask a text must be in one step.");
}

}  // namespace twostep
