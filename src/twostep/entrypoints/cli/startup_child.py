"""The process that ``twostep bench startup`` starts: one engine, one token, one JSON line."""

from __future__ import annotations

import json
import resource
import sys
import time

PROMPT = "The capital of France is"


def main(message: str) -> None:
    """``message`` is JSON: ``path`` and the ``options`` of ``LLM``. Times of time.monotonic()."""
    entered = time.monotonic()
    from twostep.contracts.sampling import SamplingParams
    from twostep.entrypoints.llm import LLM

    imported = time.monotonic()
    asked = json.loads(message)
    with LLM(asked["path"], **asked["options"]) as llm:
        ready = time.monotonic()
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        llm.generate(PROMPT, params, use_tqdm=False)
        first_token = time.monotonic()
        loading = ready - imported - sum(llm.boot.seconds.values())
        report = {
            "entered": entered,
            "first_token": first_token,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "phases": {
                "import": imported - entered,
                **llm.boot.seconds,
                "front end": loading,
                "first token": first_token - ready,
            },
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
