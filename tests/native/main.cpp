// native_tests --list: the instruction sets that run here, best first.
// native_tests FAMILY...: the kernels of one instruction set (the best, or TWOSTEP_CPU_ISA) against
// those in plain C++. Needs no Python, so it runs under an emulator as well.
// Exit status: 0 all hold, 1 some fail, 2 called wrongly or the instruction set cannot run here.
#include <cstdlib>
#include <stdexcept>

#include "check.h"

namespace {

using namespace twostep;

struct Family {
  const char* name;
  void (*run)(const test::Kernels&, test::Report&);
};
constexpr Family kFamilies[] = {{"linear", test::test_linear},
                                {"attention", test::test_attention},
                                {"rows", test::test_rows},
                                {"sample", test::test_sample}};

const Family* find(const std::string& name) {
  for (const Family& family : kFamilies) {
    if (name == family.name) return &family;
  }
  return nullptr;
}

int list() {
  for (const auto& isa : detect_cpu("").isas) std::printf("%s\n", isa.c_str());
  return 0;
}

int run(const CpuInfo& cpu, int count, char** names) {
  const test::Kernels kernels{kernel_table(cpu.isa), kernel_table("scalar")};
  test::Report report;
  for (int i = 0; i < count; i++) {
    const Family* family = find(names[i]);
    if (!family) {
      std::fprintf(stderr, "native_tests: no family '%s'\n", names[i]);
      return 2;
    }
    family->run(kernels, report);
  }
  std::printf("%s: %d checks, %d failed\n", cpu.isa.c_str(), report.checks(), report.failures());
  return report.failures() > 0 || report.checks() == 0;
}

}  // namespace

int main(int argc, char** argv) {
  const char* forced = std::getenv("TWOSTEP_CPU_ISA");
  try {
    if (argc == 2 && std::string(argv[1]) == "--list") return list();
    if (argc > 1) return run(detect_cpu(forced ? forced : ""), argc - 1, argv + 1);
    std::fprintf(stderr, "usage: native_tests --list | FAMILY...\n");
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "native_tests: %s\n", error.what());
  }
  return 2;
}
