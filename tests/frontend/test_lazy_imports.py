"""Start-up: the front end loads the heavy libraries only when they are needed."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_front_end_loads_neither_jinja_nor_tokenizers() -> None:
    code = (
        "import sys\n"
        "import twostep.frontend.chat_prompt, twostep.frontend.output_processor\n"
        "print(sorted({'jinja2', 'tokenizers', 'torch', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
