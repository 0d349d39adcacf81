"""Islands for tests: `python ranks.py FOLDER SCENE ISLAND...` imports torch once and forks a process for each rank.

An island is KIND:SIZE. Every rank runs the scene and leaves what it saw in FOLDER/KIND-RANK.json; the model that it
ends with, put together from its shards, lies beside that. The ranks of an island meet through a file.
"""

import itertools
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import skerry
from skerry import algo
from skerry.adapters import ranks
from skerry.adapters.island import island_of
from skerry.adapters.torch import TorchParameters, layout_of_model
from skerry.algo.fragments import gather, split
from skerry.node.cells import FloatCell

STEPS, BATCH, RATE = 6, 8, 0.1
KINDS = ("one", "ddp", "fsdp", "tp")


def new_model():
    """Uneven on two ranks wherever that may be; of the last bias the second has nothing. One layer is not trained."""
    torch.manual_seed(5)
    frozen = nn.Linear(5, 5).requires_grad_(False)
    body = [nn.Linear(14, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), frozen, nn.Linear(5, 1)]
    return nn.Sequential(nn.Embedding(11, 7), nn.Flatten(), *body)


def batch_of(kind, step):
    draw = torch.Generator().manual_seed(100 * KINDS.index(kind) + step)
    return torch.randint(11, (BATCH, 2), generator=draw), torch.randn(BATCH, 1, generator=draw)


def loss_of(model, inputs, targets):
    return (model(inputs) - targets).square().mean()


def shared(kind, model):
    """The model as an island of this kind has it."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        for module in (model[0], model[2], model):
            fully_shard(module)
    if kind == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(model, mesh, {"2": ColwiseParallel(), "4": RowwiseParallel()})
    return model


def whole(parameter):
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def save(folder, kind, rank, model):
    model = getattr(model, "module", model)
    save_file({name: whole(p) for name, p in model.named_parameters()}, folder / f"{kind}-{rank}.safetensors")


def own_part(kind, inputs, targets):
    """Data parallel ranks share a batch out; tensor parallel ones take all of it."""
    if kind in ("one", "tp"):
        return inputs, targets
    rank, size = dist.get_rank(), dist.get_world_size()
    return inputs[rank::size], targets[rank::size]


# ------------------------------------------------------------------------------------------ scenes


def until_closing(folder):
    while json.loads((folder / "run" / "status.json").read_bytes())["progress"] < 1:
        time.sleep(0.02)


def mixed(folder, kind, seen):
    """So many steps on batches of its own, and the close; nothing is merged before that."""
    model = shared(kind, new_model())
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.zero_()  # it gets the run's
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    learner = skerry.Learner(model, optimizer, name=kind)
    seen["is_first"] = torch.equal(whole(next(model.parameters())), whole(next(new_model().parameters())))
    for step in range(STEPS):
        inputs, targets = own_part(kind, *batch_of(kind, step))
        loss_of(model, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert learner.step(tokens=len(inputs) // 2 if kind == "tp" else len(inputs))
    if kind == "fsdp":
        with torch.no_grad():
            model(inputs)  # which leaves whole tensors in the root's modules
    until_closing(folder)
    handover = learner.close()
    seen["merged"], seen["lost"] = handover.steps_merged, handover.steps_lost
    seen["tokens"], seen["progress"] = learner.config.run.tokens, learner.progress
    save(folder, kind, dist.get_rank() if dist.is_initialized() else 0, model)


def lives(folder, kind, seen):
    """A rank that is told to leave; a model that is changed on one rank; a rank that is killed.

    In an island of kind "own" the loop averages gradients itself.
    """
    rank, steps = dist.get_rank(), itertools.count()

    def train(learner, model, optimizer, change):
        """Until the learner leaves, or says what is wrong; from the fifth step on something is done on rank 1."""
        linear = getattr(model, "module", model)[2]
        for taken in range(1, 1000):
            loss_of(model, *batch_of("one", next(steps))).backward()
            if kind == "own":
                for parameter in optimizer.param_groups[0]["params"]:
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            bias = linear.bias
            if taken >= 5 and rank == 1:
                change(linear)
            if not learner.step(tokens=3 + rank, loss=1.0 + rank):
                return taken
            linear.bias = bias  # or backward would wait for ever
        raise AssertionError("it never left")

    def leave(_):
        os.kill(os.getpid(), signal.SIGTERM)

    def replace(linear):
        linear.bias = nn.Parameter(torch.zeros(6))

    def die(_):
        (folder / f"{kind}-{rank}.json").write_text(json.dumps(seen))
        os.kill(os.getpid(), signal.SIGKILL)

    for name, change in (("told", leave), ("changed", replace), ("killed", die)):
        model = shared(kind, new_model())
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, RATE / 100, momentum=0.9)
        group = dist.group.WORLD if kind == "own" else None
        try:
            with skerry.Learner(model, optimizer, name=name, group=group) as learner:
                seen[name] = train(learner, model, optimizer, change)
                seen["is_running"] = learner.is_running
        except SystemExit as end:  # as the signal would have ended it
            seen["code"] = end.code
        except skerry.SkerryError as error:
            seen[name] = [type(error).__name__, str(error)]


def bases(folder, kind, seen):
    """One rank has other values in what is not trained, or compares none of it."""
    model, is_odd = new_model(), dist.get_rank() == 1
    if kind == "own" and is_odd:
        with torch.no_grad():
            model[6].weight.fill_(9)
    frozen = "any" if kind == "fsdp" and is_odd else "same"
    try:
        skerry.Learner(shared(kind, model), None, frozen=frozen, group=dist.group.WORLD if kind == "own" else None)
    except skerry.SkerryError as error:
        seen["refused"] = [type(error).__name__, str(error)]


def absent(folder, kind, seen):
    """Rank 0 alone makes a learner."""
    ranks.MEET_S_MAX, ended = 1.0, folder / "ended"
    model = shared(kind, new_model())
    if dist.get_rank() == 0:
        try:
            skerry.Learner(model)
        except skerry.SkerryError as error:
            seen["refused"] = [type(error).__name__, str(error)]
        ended.touch()
    while not ended.exists():
        time.sleep(0.02)
    loss_of(model, *batch_of("one", 0)).backward()  # the loop's own collectives are as they were


def boxes(folder, kind, seen):
    """Every element is read of one rank, and what is added is added on all, as torch's own whole tensors have it."""
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    lines = [init_device_mesh("cpu", (4,)), plane]
    placements = [
        (lines[0], [Shard(0)]),
        (lines[0], [Shard(1)]),
        (lines[1], [Shard(0), Shard(1)]),
        (lines[1], [Shard(1), Shard(1)]),
        (lines[1], [Replicate(), Shard(0)]),
        (lines[1], [Shard(1), Replicate()]),
        (lines[1], [Replicate(), Replicate()]),
    ]
    model = nn.ParameterDict({f"{at:02}": distributed(at, mesh, where) for at, (mesh, where) in enumerate(placements)})
    model["plain"] = nn.Parameter(torch.arange(13.0))
    both = nn.Sequential(nn.Linear(9, 10), nn.Tanh(), nn.Linear(10, 5))
    parallelize_module(both, plane["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(both, mesh=plane["dp"])
    model = nn.ModuleList([nn.ParameterList(model.values()), both])
    island = island_of(model, list(model.parameters()), None)
    parameters, layout = TorchParameters(model, None, island=island), layout_of_model(model)
    for count in (1, 3, 7):
        for fragment in split(layout, count):
            before = {name: whole(p).numpy() for name, p in model.named_parameters()}
            cell = FloatCell(np.full(fragment.size, np.nan, np.float32), np.zeros(1, np.int64))
            parameters.read(fragment, cell, 1)
            if island.is_speaker:
                np.testing.assert_array_equal(cell.values, gather(fragment, before))
            cell.values[:] = np.arange(fragment.size) / 7
            parameters.add(fragment, cell, 2)
            after = {name: whole(p).numpy() for name, p in model.named_parameters()}
            at = np.concatenate([np.arange(slot.offset, slot.offset + slot.size) for slot in fragment.slots])
            sums = gather(fragment, before) + (np.arange(fragment.size) / 7).astype(np.float32)
            np.testing.assert_array_equal(gather(fragment, after)[at], sums[at])
            rest = {name: values for name, values in after.items() if name not in {s.name for s in fragment.slots}}
            assert all((values == before[name]).all() for name, values in rest.items())
    rounded = nn.ParameterList([nn.Parameter(distributed(1, plane, [Shard(1), Shard(0)]).detach().bfloat16())])
    parameters, (fragment,) = TorchParameters(rounded, None, island=island), split(layout_of_model(rounded), 1)
    cell = FloatCell(np.full(fragment.size, 1e-4, np.float32), np.zeros(1, np.int64))
    before = gather(fragment, {"0": whole(rounded[0]).float().numpy()})
    parameters.add(fragment, cell, 1)
    parameters.read(fragment, cell, 2)
    if island.is_speaker:  # what a shard of fewer bits cannot hold is kept beside it
        np.testing.assert_array_equal(cell.values[:90], before[:90] + np.float32(1e-4))
    odd = nn.ParameterList([DTensor.from_local(torch.ones(3), lines[0], [Partial()])])
    try:
        TorchParameters(odd, None, island=island)
    except skerry.ModelError as error:
        seen["partial"] = str(error)


def distributed(seed, mesh, placements):
    draw = torch.Generator().manual_seed(seed)
    return nn.Parameter(distribute_tensor(torch.randn(5, 6, 3, generator=draw), mesh, placements))


# ------------------------------------------------------------------------------------------ processes


def run_rank(folder, scene, kind, rank, size):
    torch.set_num_threads(1)
    if kind != "one":
        dist.init_process_group("gloo", f"file://{folder}/{kind}.meet", rank=rank, world_size=size)
    seen = {}
    globals()[scene](folder, kind, seen)
    (folder / f"{kind}-{rank}.json").write_text(json.dumps(seen))


def main(folder, scene, *islands):
    pids = []
    algo.warm_up()  # once, for the nodes of all
    for kind, size in (word.split(":") for word in islands):
        for rank in range(int(size)):
            if not (pid := os.fork()):
                code = 1
                try:
                    run_rank(Path(folder), scene, kind, rank, int(size))
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            pids.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))


if __name__ == "__main__":
    main(*sys.argv[1:])
