"""What the GPU kernels compute, run on the CPU by Triton's interpreter (see `interpreted`)."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_kernels_compute_their_definitions():
    done = subprocess.run([sys.executable, "-m", "tests.gpu_lowering.interpreted"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    for case, errors in report.items():
        for name, error in errors.items():
            # Prefill multiplies with 11 bits, 2**-11 = 4.9e-4; rows of no sequence are exactly 0; the rest is float32.
            limit = 0.0 if name == "tail" else 7e-4 if case.startswith("prefill") else 2e-6
            assert error <= limit, (case, name, error)
