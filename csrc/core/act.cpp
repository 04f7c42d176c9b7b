#include "core/act.h"

namespace twostep {

ActBuffer::ActBuffer(ActForm form, int width, int max_rows) {
  act_.form = form;
  act_.width = width;
  act_.groups = (width + kGroup - 1) / kGroup;
  const size_t slots = static_cast<size_t>(max_rows) * act_.groups;
  if (form == ActForm::Q8) {
    memory_ = Memory(slots * (kGroup + 20) + 192);
    act_.q = memory_.as<int8_t>();
    act_.scale = reinterpret_cast<float*>(act_.q + (slots * kGroup + 63) / 64 * 64);
    act_.sum = act_.scale + slots;
    act_.zero8 = reinterpret_cast<int32_t*>(act_.sum + slots);
    act_.zero128 = act_.zero8 + slots;
    act_.zero8_low = act_.zero128 + slots;
  } else if (form == ActForm::BF16) {
    memory_ = Memory(slots * kGroup * 2 + 64);
    act_.bf16 = memory_.as<uint16_t>();
  } else {
    memory_ = Memory(slots * kGroup * 4 + 64);
    act_.f32 = memory_.as<float>();
  }
}

}  // namespace twostep
