"""Draw the pictures of the gallery from real runs, with headless Chromium.

    python docs/make_gallery.py              # all pictures, in a good hour on two cores, most of it the evaluation
    python docs/make_gallery.py tokens       # only these; finished runs are kept in --runs and used again

Needs Chromium (for example `apt-get install chromium`) and, once, the weights of the preset.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import kvdrift as kd
from kvdrift.demo_prompts import DEMO_PROMPTS

MODEL = "smollm2-135m"
OUT = Path(__file__).with_name("gallery")
QUESTIONS = [prompt.removeprefix("Question: ").removesuffix("\nAnswer:") for prompt in DEMO_PROMPTS]
WIDTH = 1000
LAYERS = range(0, 30, 3)


class Runs:
    """Each run, made once and kept in a folder."""

    def __init__(self, folder: Path, gsm8k: Path | None) -> None:
        self.folder, self.gsm8k = folder, gsm8k

    @cached_property
    def model(self) -> Any:
        return kd.load(MODEL, dtype="bfloat16", quiet=True)

    def kept(self, name: str, kind: Any, make: Callable[[], Any]) -> Any:
        file = self.folder / f"{name}.safetensors"
        if file.exists():
            return kind.load(file)
        result = make()
        result.save(file)
        return result

    def drift(self) -> kd.Drift:
        return self.kept(
            "drift",
            kd.Drift,
            lambda: kd.compare(self.model, QUESTIONS[:2], chat=True, max_new_tokens=24, floor=2),
        )

    def patch(self) -> kd.PatchResult:
        return self.kept(
            "patch",
            kd.PatchResult,
            lambda: kd.patch(self.model, QUESTIONS[:2], "kv", chat=True, max_new_tokens=32, placebos=1),
        )

    def sweep(self) -> kd.Sweep:
        return self.kept(
            "sweep",
            kd.Sweep,
            lambda: kd.sweep(
                self.model,
                list(DEMO_PROMPTS[:1]),
                sites=("resid_post", "k", "v", "kv"),
                layers=LAYERS,
                max_new_tokens=8,
            ),
        )

    def factorial(self) -> kd.Factorial:
        return self.kept(
            "factorial", kd.Factorial, lambda: kd.factorial(self.model, list(DEMO_PROMPTS[:2]), max_new_tokens=12)
        )

    def ladder(self) -> kd.Ladder:
        arms = ("float64", "float32", "head-float32", "rounding-floor", "wide-sums", "fixed-shape")
        return self.kept(
            "ladder",
            kd.Ladder,
            lambda: kd.falsify(self.model, list(DEMO_PROMPTS[:2]), arms=arms, max_new_tokens=6),
        )

    def architecture(self) -> kd.experiments.PaperArchitecture:
        folder = self.folder / "architecture"
        if folder.exists():
            return kd.experiments.PaperArchitecture.load(folder)
        result = kd.experiments.paper_architecture(self.model, list(DEMO_PROMPTS[:2]), max_new_tokens=6)
        result.save(folder)
        return result

    def evaluation(self) -> kd.Evaluation:
        """The run of docs/evaluation.md."""
        return self.kept(
            "evaluation",
            kd.Evaluation,
            lambda: kd.evaluate(
                self.model,
                kd.GSM8K(self.gsm8k, gold="answer"),
                strategies=["greedy", "top-k 50 at 0.7", "top-p 0.9 at 0.7"],
                limit=20,
                max_new_tokens=128,
                null=9,
                store=self.folder / "evaluation",
            ),
        )


PICTURES: dict[str, Callable[[Runs], Any]] = {
    "growth": lambda runs: kd.views.growth(runs.drift()),
    "layer_step": lambda runs: kd.views.layer_step(runs.drift()),
    "tokens": lambda runs: kd.views.tokens(runs.drift()),
    "kv_heads": lambda runs: kd.views.kv_heads(runs.drift()),
    "kv_positions": lambda runs: kd.views.kv_positions(runs.drift()),
    "recovery": lambda runs: kd.views.recovery(runs.sweep()),
    "trajectories": lambda runs: kd.views.trajectories(runs.patch()),
    "factorial": lambda runs: kd.views.factorial(runs.factorial()),
    "ladder": lambda runs: kd.views.ladder(runs.ladder()),
    "architectures": lambda runs: kd.views.architectures(runs.architecture()),
    "agreement": lambda runs: kd.views.agreement(runs.evaluation()),
    "answers": lambda runs: kd.views.answers(runs.evaluation()),
    "accuracy": lambda runs: kd.views.accuracy(runs.evaluation()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of the gallery.")
    parser.add_argument("names", nargs="*", help=f"Some of: {', '.join(PICTURES)}. All by default.")
    parser.add_argument("--runs", type=Path, default=Path("gallery-runs"), help="Where finished runs are kept.")
    parser.add_argument("--gsm8k", type=Path, help="GSM8K's test split as JSON lines; fetched if left out.")
    options = parser.parse_args()
    unknown = set(options.names) - set(PICTURES)
    if unknown:
        parser.error(f"no picture is called {', '.join(sorted(unknown))}; choose from {', '.join(PICTURES)}")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("This needs Chromium: install it, for example with `apt-get install chromium`.")
    options.runs.mkdir(parents=True, exist_ok=True)
    OUT.mkdir(exist_ok=True)
    runs = Runs(options.runs, options.gsm8k)
    for name in options.names or PICTURES:
        shoot(browser, PICTURES[name](runs), OUT / f"{name}.png")


def shoot(browser: str, figure: Any, out: Path) -> None:
    """One figure as a PNG."""
    height = int(figure.layout.height or 620)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "figure.html"
        figure.write_html(page, config={"displayModeBar": False}, default_width=f"{WIDTH - 16}px")
        subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
                "--hide-scrollbars", f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{height + 16}",
                "--virtual-time-budget=10000", f"--screenshot={out}", page.as_uri(),
            ],
            check=True,
            capture_output=True,
        )  # fmt: skip
    print(f"{out}: {out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
