"""What the import of Lightning brings along."""

import subprocess
import sys

PROGRAM = """
import sys
import tasks.parts.training.loop
assert not {"scipy.signal", "transformers"} & sys.modules.keys()
import scipy.signal
from transformers import SegformerConfig
assert scipy.signal.windows.hamming(3).tolist() and SegformerConfig().num_channels == 3
from torchmetrics import MeanMetric
assert MeanMetric()(2.0) == 2
"""


def test_packages_that_no_training_needs_are_left_out_and_can_be_imported_afterwards() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
