"""What coverage-guided fuzzing found, played again; and a long run of it (make test-long)."""

import importlib.util
import sys
from pathlib import Path

import pytest
from programs import run_program
from proxy.lean.conversation import play

TESTS = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).parent / "corpus.txt"
FRAMES = 1_000_000
RUN_S = 1_500


def corpus() -> list[bytes]:
    """One input a line, in hex: few that reach every jump between lines which fuzzing reached."""
    return [bytes.fromhex(line) for line in CORPUS.read_text(encoding="ascii").split()]


@pytest.mark.heavy
def test_every_input_of_the_corpus_leaves_the_bounds_alone() -> None:
    inputs = corpus()
    assert len(inputs) > 50
    assert sum(map(play, inputs)) > 500


@pytest.mark.heavy
def test_every_piece_of_the_corpus_may_end_anywhere() -> None:
    for data in corpus():
        for size in range(0, len(data), 7):
            play(data[:size])


@pytest.mark.long
@pytest.mark.timeout(RUN_S + 60)
def test_a_million_mutated_frames_find_nothing(tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip(f"atheris is missing: {sys.executable} -m pip install -e '.[fuzz]' (Linux)")
    for number, data in enumerate(corpus()):
        (tmp_path / str(number)).write_bytes(data)
    done = run_program(
        [sys.executable, "-m", "proxy.lean.fuzz", "--frames", str(FRAMES), str(tmp_path)],
        cwd=TESTS,
        timeout=RUN_S,
    )
    print(done.stderr[-500:])
    assert done.returncode == 0, done.stderr[-5_000:]
    assert done.stdout.startswith("done: ")
    assert int(done.stdout.split()[1]) >= FRAMES
