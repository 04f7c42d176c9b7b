"""Cycles of the kernels' inner loops as llvm-mca sees them, for processors that are not at hand.

    g++ <the flags of CMakeLists.txt> -Icsrc -S -o linear.s csrc/isa/avx512/linear.cpp
    python benchmarks/kernels/inner_loops.py linear.s --match 'int8_panels|bf16_panels'

One line for each innermost loop with dot products in it: instructions, dot products, broadcasts
that are instructions of their own, stores and loads of spilled registers, cycles of one pass. The
scheduling models know some instructions badly (LLVM 19 gives vpdpbusd two cycles on Zen 4, where
one was measured): compare kernels with each other, not with a clock.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

DOTS = ("vpdpbusd", "vdpbf16ps", "vpmaddubsw", "vfmadd")


def functions(assembly: str) -> Iterator[tuple[str, list[str]]]:
    """(mangled name, lines) of each function."""
    name, body = None, list[str]()
    for line in assembly.splitlines():
        if start := re.match(r"(_Z\w+):", line):
            name, body = start.group(1), []
        elif ".cfi_endproc" in line and name:
            yield name, body
            name = None
        elif name:
            body.append(line)


def innermost_loops(body: list[str]) -> Iterator[list[str]]:
    """Instructions from a label to the jump back to it, where no other such pair lies inside."""
    labels, pairs = dict[str, int](), list[tuple[int, int]]()
    for at, line in enumerate(body):
        if label := re.match(r"(\.L\w+):", line):
            labels[label.group(1)] = at
        jump = re.match(r"\s+j\w+\s+(\.L\w+)", line)
        if jump and jump.group(1) in labels:
            pairs.append((labels[jump.group(1)], at))
    for first, last in pairs:
        if not any(f >= first and t <= last and (f, t) != (first, last) for f, t in pairs):
            yield [line for line in body[first : last + 1] if re.match(r"\s+[a-z]", line)]


def cycles(mca: str, cpu: str, loop: list[str]) -> float:
    """Of one pass, in the steady state."""
    passes = 100
    command = [mca, f"-mcpu={cpu}", f"-iterations={passes}", "--instruction-info=0"]
    run = subprocess.run(command, input="\n".join(loop), capture_output=True, text=True, check=True)
    total = re.search(r"Total Cycles:\s+(\d+)", run.stdout)
    assert total is not None
    return int(total.group(1)) / passes


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("assembly", type=Path)
    parser.add_argument("--match", default="panels", help="regular expression on demangled names")
    parser.add_argument("--cpus", default="znver4,sapphirerapids")
    parser.add_argument("--llvm-mca", default="llvm-mca")
    args = parser.parse_args()
    cpus = args.cpus.split(",")
    print("instr  dots  bcast  stack  ", *(f"{cpu:>15}" for cpu in cpus), " function")
    for mangled, body in functions(args.assembly.read_text()):
        name = subprocess.run(["c++filt", mangled], capture_output=True, text=True).stdout.strip()
        if not re.search(args.match, name):
            continue
        for loop in innermost_loops(body):
            dots = sum(any(dot in line for dot in DOTS) for line in loop)
            if dots < 4:
                continue
            broadcasts = sum(bool(re.search(r"v\w*broadcast", line)) for line in loop)
            stack = sum("(%rsp)" in line and "zmm" in line for line in loop)
            estimates = (f"{cycles(args.llvm_mca, cpu, loop):15.1f}" for cpu in cpus)
            print(f"{len(loop):5} {dots:5} {broadcasts:6} {stack:6}  ", *estimates, "", name)


if __name__ == "__main__":
    main()
