"""A run that trains nothing: what workers call in tests, in processes of their own, and studies to hand them."""

import atexit
import os
import signal
import time
from pathlib import Path

import msgspec

from skerry.proof.lab.study import Point, Result, read

HEAD = """
name = "{name}"
about = "what is tried"
seeds = [0, 1, 2]
baseline = "{baseline}"
[common]
run = {{ learners = 4, tokens = 1000 }}
"""


def study_of(folder, *variants, name="trial", baseline="", more=""):
    """A study whose variants differ by outer.lr."""
    tables = [f"[variants.{variant}]\nouter.lr = {0.1 + n / 100:g}\n" for n, variant in enumerate(variants)]
    file = folder / f"{name}.toml"
    file.write_text(HEAD.format(name=name, baseline=baseline) + "\n".join([*tables, more]))
    return read(file)


def result_of(job, **found):
    known = {
        "loss": 2.0 + job.seed / 10,
        "loss_before_close": 2.5,
        "diverged": False,
        "points": (Point(progress=0.5, tokens=500, bytes=80_000, loss=3.0),),
        "parameters": 1000,
        "tokens": 900,
        "tokens_discarded": 100,
        "steps": 10,
        "merges": 5,
        "contributors": 3.5,
        "bytes_up": 120_000,
        "bytes_down": 80_000,
        "seconds": 12.0,
        "device": "pencil",
        "versions": {"python": "3.11.7", "torch": "2.6.0", "skerry": "0.1.0"},
    }
    return Result(
        key=job.key,
        study=job.study,
        variant=job.variant,
        seed=job.seed,
        config=msgspec.to_builtins(job.config),
        setting=msgspec.to_builtins(job.setting),
        **known | found,
    )


def save_of(job):
    return Path(job.folder) / f"{job.key}.safetensors"


def run(job, device, told, stint):
    """Well for most variants; some are named for what happens to them."""
    told(0.25)
    print("a word on standard output")
    match job.variant:
        case "raises":
            raise ValueError(f"no text for seed {job.seed}\nand more")
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exits":
            os._exit(3)
        case "endless":
            signal.pause()
        case "tidies":
            atexit.register(Path("tidy").touch)
        case "slow":
            time.sleep(0.3)
        case "long":
            stint.file.touch()
            return None
        case "odd":
            return result_of(job, loss="low")
        case "reads":
            return result_of(job, device=Path(job.config.data.path).read_text(), steps=os.getpid())
    return result_of(job, device=device, steps=os.getpid())
