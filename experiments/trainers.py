"""Other people's trainers on a GPU, in runs that lose a process: python experiments/trainers.py hf|fsdp [--small]

hf    two learners with Hugging Face's Trainer (examples/hf_trainer.py) and a causal LM of 110M parameters made from its
      configuration; one of them is killed. from_pretrained loads what is exported.
fsdp  a learner of two FSDP2 ranks on the CPU, by gloo (examples/fsdp_loop.py), beside one of a single process on the
      GPU; a rank is killed.

`skerry launch` runs them on this machine, and its supervisor starts again what was killed. With --small the LM has
0.1M parameters and nothing needs a GPU. Results stand in docs/LOG.md.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional

import skerry
from engines import EXAMPLES, is_gone, life_of, processes, returned, rows, told, until
from engines import skerry as command
from skerry.proof.chaos import report

HF = """
[[islands]]
name = "trainer"
count = 2
command = ["{python}", "{me}", "hf", "--learner"{small}]
"""
FSDP = """
[[islands]]
name = "sharded"
command = ["{python}", "{examples}/fsdp_loop.py"]
workers = 2
restart = "always"
env = {{ CUDA_VISIBLE_DEVICES = "" }}

[[islands]]
name = "alone"
command = ["{python}", "{me}", "fsdp", "--learner"]
"""
RUN = """
[run]
name = "{kind}"
steps = {steps}

[sync]
quorum = 1

[syncer]
genesis = "genesis.safetensors"
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["hf", "fsdp"])
    parser.add_argument("--small", action="store_true", help="a small language model")
    parser.add_argument("--steps", type=int, default=200, help="of each learner, on average")
    parser.add_argument("--learner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.learner:
        return hf_trainer(options.small).main() if options.kind == "hf" else alone()
    with tempfile.TemporaryDirectory() as folder:
        run_of(Path(folder), options)


# ---------------------------------------------------------------------------------------------- what trains


def hf_trainer(is_small):
    """The example, with a model that people would call one."""
    import hf_trainer as example

    if not is_small:
        example.LENGTH, example.small = 512, lm
    return example


def lm():
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=512, **shape))


def alone():
    """The model of the sharded island, whole, in one process on the device."""
    import fsdp_loop as example

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    model = example.next_byte().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = b"".join(p.read_bytes() for p in sorted(Path(torch.__file__).parent.glob("_*.py")))
    data = torch.tensor(list(text), device=device)
    with skerry.Learner(model, optimizer) as learner:
        while True:
            window = data[torch.randint(len(data) - 9, (128, 1), device=device) + torch.arange(9, device=device)]
            loss = functional.cross_entropy(model(window[:, :8]), window[:, 8])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)  # no faster by far than the two ranks
            if not learner.step(tokens=window.shape[0]):
                break


# ---------------------------------------------------------------------------------------------- what is done to it


def run_of(folder, options):
    kind, run = options.kind, folder / "run"
    words = {"kind": kind, "steps": options.steps, "python": sys.executable, "me": Path(__file__).resolve()}
    words |= {"examples": EXAMPLES, "small": ', "--small"' if options.small else ""}
    folder.joinpath("run.toml").write_text((RUN + {"hf": HF, "fsdp": FSDP}[kind]).format(**words))
    genesis(folder, options)
    command("launch", folder / "run.toml", "--run", run, "--http-port", "off", "--detach")
    names = {"hf": ["trainer-0", "trainer-1"], "fsdp": ["sharded-0", "alone-0"]}[kind]
    until(lambda: {row.learner for row in rows(run)} == set(names) == set(told(run)["learners"]), "all to contribute")
    victim, which = {"hf": ("trainer-1", {}), "fsdp": ("sharded-0", {"RANK": "1"})}[kind]
    life, at = life_of(run, victim), time.monotonic()
    os.kill(max(processes(folder, SKERRY_NAME=victim, **which)), signal.SIGKILL)
    until(lambda: returned(run, victim, life), f"{victim} to return")
    print(f"{victim} contributed again {time.monotonic() - at:.1f} s after it was killed", flush=True)
    until(lambda: told(run)["phase"] == "closed", "the run to close")
    until(lambda: is_gone(run), "all processes to be gone")
    print(told_of(run))
    if kind == "hf":
        command("export", run, "--folder", folder / "model", "--config-from", folder / "config")
        print(f"loss of the model: {loss(folder / 'config'):.3f} at first, {loss(folder / 'model'):.3f} as exported")


def genesis(folder, options):
    words = [sys.executable, EXAMPLES / "fsdp_loop.py", "--genesis", folder / "genesis.safetensors"]
    if options.kind == "fsdp":
        subprocess.run(words, check=True)
    else:
        model = hf_trainer(options.small).small()
        model.save_pretrained(folder / "config")
        skerry.save_genesis(model, folder / "genesis.safetensors")


def told_of(run):
    tally, audit = report.read(run)
    found = report.report(tally, told(run), {}, {})
    merged = {name: sum(row.learner == name for row in rows(run)) for name in sorted(told(run)["learners"])}
    return {
        "parameters": tally.parameters, "contributions": merged, "merges": len(tally.merges),
        "ledger_balance": found["ledger_balance"], "violations": len(audit.violations), "checks": audit.checks,
    }  # fmt: skip


def loss(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    length = model.config.max_position_embeddings
    text = b"".join(p.read_bytes() for p in sorted(Path(torch.__file__).parent.glob("_*.py")))
    batch = torch.tensor(list(text[: 16 * length])).view(16, length)
    with torch.no_grad():
        return model(batch, labels=batch).loss.item()


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLES))
    main()
