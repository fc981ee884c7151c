"""How a model comes to its coverage."""

import subprocess
import sys

CODE = """
from kvdrift.models.load import load
from kvdrift.models.tiny import tiny

model = load(tiny("llama"), quiet=True)
try:
    model.coverage
except Exception as error:
    print(type(error).__name__)
import kvdrift as kd

print(kd.load(model) is model, "resid_post" in model.coverage.sites)
"""


def test_load_brings_what_finds_sites():
    """In a process of its own: in this one, something has imported it already."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["ModelError", "True", "True"]
