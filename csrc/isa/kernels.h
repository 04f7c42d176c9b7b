// The kernel table: one for each instruction set, chosen once at run time.
//
// Every family of kernels declares its struct of function pointers in a header of its own
// (isa/linear.h, isa/attention.h, isa/rows.h, isa/sample.h), writes the code once as a template in
// isa/<family>.inc over the vector type `V` of isa/<isa>/vec.h, and instantiates it in
// isa/<isa>/<family>.cpp, which is compiled with that instruction set's flags and exports one
// `const <Family>Kernels*`. Nothing of the standard library with inline code may be used in those
// units beyond <cstdint>, <cstddef>, <cstring>, <cmath>: a copy compiled for a wider instruction
// set could be linked in for everybody. isa/peak.h is written out for each: it measures instructions.
#pragma once
#include <string>
#include <vector>

namespace twostep {

struct LinearKernels;
struct AttentionKernels;
struct RowKernels;
struct SampleKernels;
struct PeakKernels;

struct KernelTable {
  const char* isa;
  const LinearKernels* linear;
  const AttentionKernels* attention;
  const RowKernels* rows;
  const SampleKernels* sample;
  const PeakKernels* peak;
};

struct CpuInfo {
  std::vector<std::string> features;    // what the processor and the system support
  std::vector<std::string> isas;        // tables this machine can run, best first
  std::string isa;                      // chosen
  std::string reason;                   // why
};

// Asks the processor (cpuid, xgetbv) or, on ARM, the system. `forced` (TWOSTEP_CPU_ISA) names a table; empty picks the best.
// Throws std::invalid_argument if the name is unknown or this machine can't run it.
CpuInfo detect_cpu(const std::string& forced);
const KernelTable& kernel_table(const std::string& isa);

}  // namespace twostep
