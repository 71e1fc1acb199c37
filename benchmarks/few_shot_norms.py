"""One configuration with several norms, tested at several shots: the README's few-shot tables.

    python -m benchmarks.few_shot_norms configs/quickstart.yaml --norms bn swbn-fro --shots 1
    python -m benchmarks.few_shot_norms configs/fewshot/cifar_fs_prototypical.yaml --root DIR --shots 1 5

Each norm is one training through the ``swbn`` command, in a process of its own; each number of shots is one test of
its best checkpoint. The norms see the same network at the start, the same training episodes and the same test
episodes. Prints a Markdown table and writes the same as JSON, row by row.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.environment import environment, environment_line

REPOSITORY = Path(__file__).parents[1]


def main() -> None:
    """Train, test, print, write."""
    options = _options()
    name = Path(options.config).stem
    config = yaml.safe_load(Path(options.config).read_text())
    given_norm, given_args = (config["model"]["init_args"].get(key) for key in ("norm", "norm_args"))
    given = {given_norm: given_args, **{norm: json.loads(text) for norm, text in options.norm_args}}
    output = Path(options.output or f"{options.runs}/{name}.json")
    rows: list[dict[str, Any]] = []
    for norm in options.norms:
        settings = [f"--config={options.config}", f"--run.name={name}/{norm}", f"--run.root={options.runs}"]
        settings += [f"--seed_everything={options.seed}", f"--model.norm={norm}"]
        settings.append(f"--model.norm_args={json.dumps(given.get(norm))}")
        settings += [f"--data.root={options.root}"] if options.root else []
        start = time.perf_counter()
        fitted = _run("fit", *settings)
        seconds = time.perf_counter() - start
        for shots in options.shots:
            tested = _run("test", *settings, f"--ckpt_path={fitted['folder']}", f"--data.test.shots={shots}")
            rows.append(_row(norm, seconds, tested["results"][0]))
            output.parent.mkdir(parents=True, exist_ok=True)
            content = {"command": sys.argv, "environment": environment("pytorch-lightning"), "rows": rows}
            output.write_text(json.dumps(content, indent=2) + "\n")
    print(_table(rows))
    print(f"\n{environment_line('pytorch-lightning')}\nwritten: {output}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--norms", nargs="+", default=["bn", "swbn-fro"])
    parser.add_argument(
        "--norm-args",
        nargs=2,
        action="append",
        default=[],
        metavar=("NORM", "JSON"),
        help="options of a norm, as: swbn-kl '{\"step_size\": 0.002}'; the configuration's own norm has its own",
    )
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


def _row(norm: str, seconds: float, result: dict[str, Any]) -> dict[str, Any]:
    kept = ("ways", "shots", "episodes", "accuracy", "ci95", "distance", "rms")
    return {"norm": norm, **{key: result[key] for key in kept if key in result}, "fit_seconds": seconds}


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| norm | ways | shots | episodes | accuracy ± 95% | whiteness distance | RMS correlation | fit, s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| {row['norm']} | {row['ways']} | {row['shots']} | {row['episodes']:,} "
            f"| {100 * row['accuracy']:.2f} ± {100 * row['ci95']:.2f} "
            f"| {_course(row, 'distance', 2)} | {_course(row, 'rms', 3)} | {row['fit_seconds']:.0f} |"
        )
    return "\n".join(lines)


def _course(row: dict[str, Any], key: str, digits: int) -> str:
    return " → ".join(f"{value:.{digits}f}" for value in row[key]) if key in row else "–"


if __name__ == "__main__":
    main()
