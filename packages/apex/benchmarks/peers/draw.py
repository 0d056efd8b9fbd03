"""Draws recall against calls, as `lyceum bench apex --case recall` wrote it: `python draw.py recall.json recall.svg`.

Lines are means over seeds, bands their range.
"""

import json
import sys
from pathlib import Path

import matplotlib  # pants: no-infer-dep
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot  # pants: no-infer-dep


def main(source: str, target: str) -> None:
    results = json.loads(Path(source).read_text())
    tops = list(next(iter(results["curves"].values())))
    figure, panels = pyplot.subplots(1, len(tops), figsize=(9, 4.4), sharex=True, layout="constrained")
    for panel, top in zip(panels, tops):
        for name, curves in results["curves"].items():
            runs = np.array(curves[top])
            calls = results["every"] * np.arange(runs.shape[1])
            (line,) = panel.plot(calls, runs.mean(axis=0), label=name)
            panel.fill_between(calls, runs.min(axis=0), runs.max(axis=0), alpha=0.2, color=line.get_color())
        panel.set(xlabel="products scored", ylabel=f"recall of the best {int(top):,}", ylim=(0, 1))
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, ncols=3, loc="outside lower center")
    pyplot.rcParams["svg.hashsalt"] = "recall"  # the same ids each time
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
