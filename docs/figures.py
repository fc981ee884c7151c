"""Draw the README's figure from a saved drift, with headless Chromium.

kvdrift compare smollm2-135m --prompts problems.jsonl --save drift.safetensors
python docs/figures.py drift.safetensors
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import kvdrift as kd

SIZE = (1200, 660)


def main() -> None:
    figure = kd.views.growth(kd.Drift.load(sys.argv[1]))
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("This needs Chromium: install it, for example with `apt-get install chromium`.")
    out = Path(__file__).with_name("growth.png")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "figure.html"
        figure.write_html(page, config={"displayModeBar": False})
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--hide-scrollbars",
                f"--user-data-dir={folder}/profile",
                f"--window-size={SIZE[0]},{SIZE[1]}",
                "--virtual-time-budget=10000",
                f"--screenshot={out}",
                page.as_uri(),
            ],
            check=True,
            capture_output=True,
        )
    print(f"Wrote {out}")


if __name__ == "__main__":
    main()
