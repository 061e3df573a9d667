"""Coverage-guided fuzzing of the lean transport's core with atheris (libFuzzer).

    PYTHONPATH=tests python -m proxy.lean.fuzz --frames 1000000 CORPUS [libFuzzer's options]

CORPUS is a folder; what reaches new code is added to it.  Ends with 0 once so many mutated frames
were sent; an exception, a hang of 10 s or 1 GiB of memory ends it earlier, with the input.
"""

import os
import sys

import atheris

with atheris.instrument_imports(include=["popmq.proxy.transport.lean", "hpack"]):
    from proxy.lean.conversation import play

LIMITS = ("-timeout=10", "-rss_limit_mb=1024", "-max_len=2048", "-print_final_stats=0")


class Fuzz:
    def __init__(self, frames: int) -> None:
        self._left = self._wanted = frames
        self._inputs = 0

    def one(self, data: bytes) -> None:
        self._inputs += 1
        self._left -= play(data)
        if self._left <= 0:
            print(f"done: {self._wanted - self._left} frames in {self._inputs} inputs", flush=True)
            os._exit(0)  # libFuzzer knows no such end


def main() -> None:
    assert sys.argv[1] == "--frames", __doc__
    atheris.Setup([sys.argv[0], *LIMITS, *sys.argv[3:]], Fuzz(int(sys.argv[2])).one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
