"""What each process of a launch is told: its command line and its environment, the same on every engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from skerry.engines.spec import Island, Launch
from skerry.python import module_argv

TORCHRUN = "torch.distributed.run"
ALONE = "skerry.engines.alone"  # torchrun on one machine, at a port that is free there


def syncer_argv(
    launch: Launch, python: str, run_dir: str, config: str, genesis: str, host: str, port: int, *more: str
) -> list[str]:
    """`config` and `genesis` are paths as the syncer's machine sees them; an empty `genesis` is the built-in model."""
    argv = module_argv("skerry", "syncer", "--run", run_dir, "--host", host, "--port", str(port), python=python)
    argv += ["--config", config, "--preset", launch.syncer.preset, "--run.learners", str(launch.config.run.learners)]
    argv += ["--genesis", genesis] if genesis else []
    for key, value in launch.overrides:
        argv += [f"--{key}", str(value)]
    return [*argv, *more]


def learner_argv(island: Island, python: str, met: Sequence[str] = (), index: int = 0) -> list[str]:
    """Of one learner on one machine. `met`: by `meeting`, where the learner has other machines, too."""
    if island.is_built_in:
        return module_argv("skerry", "learner", "--speed", f"{island.speed_of(index):g}", python=python)
    command = [python if word == "python" and at == 0 else word for at, word in enumerate(island.command)]
    if not island.is_group:
        return command
    torchrun = module_argv(TORCHRUN, *met, python=python) if met else module_argv(ALONE, python=python)
    return [*torchrun, "--nproc-per-node", str(island.workers), "--no-python", *command]


def meeting(machines: int, rank: str, host: str, port: str) -> list[str]:
    """How torchrun's processes find each other: at the first machine's. It must not be left to torchrun's own choice.

    Without a port, or as `--standalone`, it takes the c10d rendezvous, which unpickles what lies in a store that is
    open to whoever reaches the machine. With the static one its processes exchange JSON and numbers. An empty `rank`
    is for whoever says it elsewhere.
    """
    words = ["--rdzv-backend", "static", "--nnodes", str(machines), *(["--node-rank", rank] if rank else [])]
    return [*words, "--master-addr", host, "--master-port", port]


def learner_env(
    island: Island, index: int, address: str, *, key_file: str = "", token_file: str = ""
) -> dict[str, str]:
    """Beside what the machine has: who this is, whom it dials and by what it is known."""
    env = {"SKERRY_SYNCER": address, "SKERRY_NAME": island.learner(index), "PYTHONUNBUFFERED": "1"}
    env |= {"SKERRY_KEY_FILE": key_file} if key_file else {}
    env |= {"SKERRY_TOKEN_FILE": token_file} if token_file else {}
    env |= {"SKERRY_DATA": island.data} if island.data else {}
    return env | island.env


def folder_of(launch: Launch, island: Island) -> Path:
    """Where its command runs."""
    return launch.path(island.folder)
