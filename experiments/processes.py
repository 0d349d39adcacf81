"""Real processes on one GPU beside the laboratory's data-parallel: python experiments/processes.py [--seeds 0,1,2]

Eight learners of `skerry train` that share the GPU train the 10.8M model on the text of experiments/corpus.py for
as many tokens as the study `defaults`: what that ends at beside data-parallel of the same seed, and how the rounds of
each stage went. With NVIDIA's multi-process service (nvidia-cuda-mps-control -d) learners run
beside each other, without it in turn. Other words go to `skerry train`: --step-s 0.07, say.
Results stand in docs/LOG.md.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from skerry.stats import half_width

HERE = Path(__file__).parent
WORDS = [
    "--learners=8", "--preset=default", "--model=10m", f"--data={HERE / 'corpus'}", "--data.batch=16", "--step-s=0",
    "--tokens=163840000", "--data.held_out_batches=256", "--http-port=off",
]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument(
        "--at-once", type=int, default=1, help="runs beside each other; each has 8 learners and a syncer"
    )
    parser.add_argument("--out", type=Path, default=Path("processes"), help="folder of the runs")
    options, more = parser.parse_known_args()
    seeds, base, behind = [int(seed) for seed in options.seeds.split(",")], data_parallel(), []
    with ThreadPoolExecutor(options.at_once) as pool:
        runs = pool.map(lambda seed: trained(options.out / str(seed), seed, more), seeds)
        for seed, found in zip(seeds, runs, strict=True):
            behind.append(100 * (found["val_loss_end"] / base[seed] - 1))
            show(seed, found, behind[-1])
    width = half_width(behind)
    print(f"mean {sum(behind) / len(behind):+.2f} %" + (f" ± {width:.2f}" if width is not None else ""))


def trained(run, seed, more):
    command = [sys.executable, "-P", "-m", "skerry", "train", *WORDS, f"--seed={seed}", f"--out={run}", "--json", *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, f"seed {seed} ended with {done.returncode}"
    return json.loads(done.stdout)


def data_parallel():
    """Its loss in the laboratory, by seed: the study `defaults`."""
    rows = map(json.loads, HERE.joinpath("results.jsonl").read_text().splitlines())
    ours = [row for row in rows if (row["study"], row["variant"]) == ("defaults", "data-parallel")]
    return {row["seed"]: row["loss"] for row in ours}


def show(seed, found, behind):
    print(
        f"seed {seed}: loss {found['val_loss_end']:.4f}, {behind:+.2f} % of data-parallel's, {found['train_s']:.0f} s"
    )
    for name, stage in found["stages"].items():
        print(
            f"  {name:6} {stage['merges_per_s']:6.1f} merges/s of {stage['contributors_mean']:.2f},"
            f" H {stage['sync_every_asked']:.2f} asked, {stage['sync_every_reached']:.2f} reached", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
