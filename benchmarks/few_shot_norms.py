"""One configuration with several norms, tested at several shots: the README's few-shot tables.

    python -m benchmarks.few_shot_norms configs/quickstart.yaml --norms bn swbn-fro --shots 1
    python -m benchmarks.few_shot_norms configs/fewshot/cifar_fs_prototypical.yaml --root DIR --shots 1 5

Each norm is one training through the ``swbn`` command, in a process of its own; each number of shots is one test of
its best checkpoint. The norms see the same network at the start, the same training episodes and the same test
episodes. Prints a Markdown table and writes the same as JSON.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

REPOSITORY = Path(__file__).parents[1]


def main() -> None:
    """Train, test, print, write."""
    options = _options()
    name = Path(options.config).stem
    config = yaml.safe_load(Path(options.config).read_text())
    given_norm, given_args = (config["model"]["init_args"].get(key) for key in ("norm", "norm_args"))
    rows = []
    for norm in options.norms:
        settings = [f"--config={options.config}", f"--run.name={name}/{norm}", f"--run.root={options.runs}"]
        settings += [f"--seed_everything={options.seed}", f"--model.norm={norm}"]
        # The configuration's own norm keeps its options; another kind has none of them.
        keep = norm.split("-")[0] == str(given_norm).split("-")[0]
        settings.append(f"--model.norm_args={json.dumps(given_args if keep else None)}")
        settings += [f"--data.root={options.root}"] if options.root else []
        start = time.perf_counter()
        fitted = _run("fit", *settings)
        seconds = time.perf_counter() - start
        checkpoint = str(fitted["folder"])
        for shots in options.shots:
            tested = _run("test", *settings, f"--ckpt_path={checkpoint}", f"--data.test.shots={shots}")
            rows.append(_row(norm, seconds, fitted["whiteness"], tested["results"][0]))
    print(_table(rows))
    output = Path(options.output or f"{options.runs}/{name}.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"command": sys.argv, "environment": environment(), "rows": rows}, indent=2) + "\n")
    print(f"\n{', '.join(f'{k} {v}' for k, v in environment().items())}\nwritten: {output}")


def environment() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    packages = {package: version(package) for package in ("torch", "pytorch-lightning")}
    return {"device": device, "Python": platform.python_version(), **packages}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--norms", nargs="+", default=["bn", "swbn-fro"])
    parser.add_argument("--shots", nargs="+", type=int, default=[1])
    parser.add_argument("--root", help="folder of the data set's files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", default="runs", help="folder of the runs")
    parser.add_argument("--output", help="JSON file; RUNS/<config>.json by default")
    return parser.parse_args()


def _run(command: str, *settings: str) -> dict[str, Any]:
    print(f"swbn {command} {' '.join(settings)}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "cli.py"), command, *settings], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"swbn {command} ended with {done.returncode}")
    folder = Path(next(line for line in done.stdout.splitlines() if line.startswith("run folder: "))[12:])
    return {**json.loads((folder / "results.json").read_text()), "folder": folder}


def _row(norm: str, seconds: float, whiteness: list[dict[str, float]], result: dict[str, Any]) -> dict[str, Any]:
    kept = ("ways", "shots", "episodes", "accuracy", "ci95")
    ends = {
        f"{key}_{when}": whiteness[i][key] for key in ("distance", "rms") for when, i in (("start", 0), ("end", -1))
    }
    return {"norm": norm, **{key: result[key] for key in kept}, **ends, "fit_seconds": seconds}


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| norm | ways | shots | episodes | accuracy ± 95% | whiteness distance | RMS correlation | fit, s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| {row['norm']} | {row['ways']} | {row['shots']} | {row['episodes']:,} "
            f"| {100 * row['accuracy']:.2f} ± {100 * row['ci95']:.2f} "
            f"| {row['distance_start']:.2f} → {row['distance_end']:.2f} "
            f"| {row['rms_start']:.3f} → {row['rms_end']:.3f} | {row['fit_seconds']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
