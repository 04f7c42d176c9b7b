"""Make the files that ``benchmarks.compare`` compares: ``python -m benchmarks.make_models``.

    python -m benchmarks.make_models --models-dir DIR --llama-bin DIR smol
    python -m benchmarks.make_models --models-dir DIR llama-3.2-1b:Q4_0 llama-3.1-8b:Q4_K

``smol`` makes the four files and the Hugging Face folder of SmolLM2-135M-Instruct: Q4_1 is the file
of ``twostep pull smollm2-135m`` itself, the others are requantised from it by ``llama-quantize
--allow-requantize``. Any other word is SHAPE:TYPE, TYPE one of Q4_0, Q4_K, Q8_0, BF16 (GGUF) or hf:
random weights of that shape, written tensor by tensor.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from benchmarks import hf_folder, random_model
from benchmarks.models import SHAPES, gguf_path, hf_path
from benchmarks.process import output_of

SMOL = "smollm2-135m"


def main() -> int:
    """Make what is asked for; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="+", metavar="smol | SHAPE:TYPE")
    parser.add_argument("--models-dir", type=Path, required=True)
    parser.add_argument("--llama-bin", type=Path, help="what setup_llama_cpp.sh prints")
    args = parser.parse_args()
    args.models_dir.mkdir(parents=True, exist_ok=True)
    for what in args.what:
        if what == "smol":
            if args.llama_bin is None:
                parser.error("smol needs --llama-bin")
            make_smol(args.models_dir, args.llama_bin)
            continue
        shape, _, kind = what.partition(":")
        kinds = (*random_model.MATRIX_TYPES, "hf")
        if shape not in SHAPES or shape == "smol" or kind not in kinds:
            parser.error(f"{what}: not smol nor SHAPE:TYPE ({', '.join(SHAPES)}; {kinds})")
        make_random(args.models_dir, shape, kind)
    return 0


def make_smol(folder: Path, llama_bin: Path) -> None:
    """The four GGUF files and the Hugging Face folder."""
    # Our own heavy modules come late: --help is quick.
    from twostep.entrypoints.progress import reporter_for
    from twostep.entrypoints.resolve import resolve

    source = gguf_path(folder, "smol", "Q4_1")
    if not source.exists():
        put(source, lambda path: shutil.copyfile(resolve(SMOL, reporter_for()).path, path))
    environment = {"LD_LIBRARY_PATH": str(llama_bin)}
    for kind in ("Q4_0", "Q8_0", "BF16"):

        def quantize(path: Path, kind: str = kind) -> None:
            tool = str(llama_bin / "llama-quantize")
            output_of([tool, "--allow-requantize", str(source), str(path), kind], environment)

        put(gguf_path(folder, "smol", kind), quantize)
    put(hf_path(folder, "smol"), lambda path: hf_folder.from_gguf(source, path))


def make_random(folder: Path, shape: str, kind: str) -> None:
    """One file or folder of random weights."""
    if kind == "hf":
        put(hf_path(folder, shape), lambda path: random_model.write_hf(path, SHAPES[shape]))
    else:
        put(
            gguf_path(folder, shape, kind),
            lambda path: random_model.write_gguf(path, SHAPES[shape], kind, name=shape),
        )


def put(path: Path, make: object) -> None:
    """Call ``make`` with a temporary path beside ``path``, then give it its name."""
    assert callable(make)
    if path.exists():
        print(f"{path} is there already", file=sys.stderr)
        return
    partial = path.with_name(f".partial-{path.name}")
    if partial.is_dir():
        shutil.rmtree(partial)
    make(partial)
    os.replace(partial, path)
    print(f"made {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
