"""Several processes as one learner: islands of every kind in one run, and what becomes of them."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import skerry
from adapters.ranks import BATCH, KINDS, RATE, STEPS, batch_of, loss_of, new_model
from e2e.processes import WAIT_S, Syncer, facts_of, until
from skerry.adapters.shards import Piece, box_of
from skerry.algo.fragments import Tensor, layout_of, parts, split
from skerry.core.facts import Committed
from skerry.core.state import state_of
from skerry.run.export import write_model
from skerry.store import Store

RANKS = Path(__file__).with_name("ranks.py")
EXAMPLES = Path(__file__).parents[2] / "examples"


def environment(**changes):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")}
    return kept | changes


def act(folder, scene, *islands, **changes):
    """A scene to its end, and what each rank saw."""
    words = [sys.executable, str(RANKS), str(folder), scene, *islands]
    env = environment(MASTER_ADDR="127.0.0.1", SKERRY_NODE="thread", **changes)  # a process each takes longer to start
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=WAIT_S)
    seen = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*-*.json"))}
    return done, seen


def genesis_of(folder, model):
    skerry.save_genesis(model, folder / "genesis.safetensors")
    return folder / "genesis.safetensors"


# ------------------------------------------------------------------------------------------ which elements are whose


class Named:
    """A placement, as far as a box is concerned."""

    def __init__(self, dim=None, split_factor=None):
        self.dim, self.split_factor = dim, split_factor


class Shard(Named):
    pass


class _StridedShard(Named):
    pass


class Replicate(Named):
    pass


MESHES = [
    ((3,), [Shard(0)]),
    ((8,), [Shard(0)]),  # more ranks than rows: some have nothing
    ((4,), [Shard(1)]),
    ((2,), [Shard(2)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 3), [Shard(1), Shard(1)]),
    ((3, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 2, 2), [Shard(0), _StridedShard(1, split_factor=2), Shard(1)]),
]


@pytest.mark.parametrize(("mesh", "placements"), MESHES)
@pytest.mark.parametrize("count", [1, 5])
def test_every_element_of_every_slice_is_held_by_one_rank_and_found_where_it_lies(mesh, placements, count):
    shape = (5, 7, 3)
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape) + 1
    layout = layout_of([Tensor("a", (300,)), Tensor("w", shape)])
    slots = [slot for fragment in split(layout, count) for slot in fragment.slots if slot.name == "w"]
    found = torch.zeros(shape)
    for coordinates in np.ndindex(*mesh):
        begin, size = box_of(shape, mesh, coordinates, placements)
        here = whole[tuple(slice(b, b + s) for b, s in zip(begin, size, strict=True))]
        for slot in slots:
            flat = torch.zeros(slot.padded_stop)
            for piece, at in parts(slot, Piece(shape, begin, here)):
                if not piece.is_empty:
                    piece.of(flat[at]).copy_(piece.values)
            run = flat[slot.offset : slot.offset + slot.size]
            assert not flat[: slot.offset].any()
            found.view(-1)[slot.start : slot.start + slot.size] += run
    assert torch.equal(found, whole)


def test_a_placement_whose_parts_do_not_lie_together_is_refused():
    with pytest.raises(ValueError, match="do not lie together"):
        box_of((8, 2), (2, 2), (0, 0), [_StridedShard(0, split_factor=4), Shard(0)])
    with pytest.raises(ValueError, match="only Shard and Replicate"):
        box_of((8, 2), (2,), (0,), [Named()])


def test_torch_puts_the_same_elements_together(tmp_path):
    """Two-dimensional meshes, FSDP over tensor parallelism, copies and plain tensors, on four ranks."""
    done, seen = act(tmp_path, "boxes", "grid:4")
    assert done.returncode == 0, done.stderr
    assert len(seen) == 4
    for rank in seen.values():
        assert rank["partial"].startswith("parameter 0 is placed as (Partial(sum),): only Shard and Replicate")


# ------------------------------------------------------------------------------------------ what an island is not


def test_a_group_of_processes_that_have_not_met_is_refused():
    with pytest.raises(skerry.ConfigError, match=r"torch\.distributed is not initialised"):
        skerry.Learner(nn.Linear(2, 2), None, "host:1", group=object())


def test_a_model_in_the_fsdp_of_flat_parameters_is_refused():
    model = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # to make one properly takes a GPU
    nn.Module.__init__(model)
    with pytest.raises(skerry.ModelError, match=r"FullyShardedDataParallel, .*fsdp\.fully_shard instead$"):
        skerry.Learner(model, None, "host:1")


# ------------------------------------------------------------------------------------------ in a run


def plain(kind):
    """What so many steps of one process make of the model."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS):
        loss_of(model, *batch_of(kind, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_islands_of_every_kind_make_of_a_run_what_single_processes_would(tmp_path):
    """One process, two with DDP, with FSDP2 and with tensor parallelism; every rank ends with the run's model."""
    tokens = len(KINDS) * STEPS * BATCH
    options = [
        f"--run.tokens={tokens}", "--run.learners=4", "--run.gather_s=60", "--sync.num_fragments=3",
        "--sync.sync_every=10000", "--sync.policy=fixed", "--wire.codec_up=fp32", "--wire.codec_down=fp32",
    ]  # fmt: skip
    with Syncer(tmp_path, genesis=genesis_of(tmp_path, new_model()), options=options) as syncer:
        address = f"127.0.0.1:{syncer.port}"
        done, seen = act(tmp_path, "mixed", "one:1", "ddp:2", "fsdp:2", "tp:2", SKERRY_SYNCER=address)
        assert done.returncode == 0, done.stderr
        assert syncer.wait() == 0, syncer.said
    assert len(seen) == 7
    for rank in seen.values():
        assert rank == {"is_first": True, "merged": STEPS, "lost": 0, "tokens": tokens, "progress": 1.0}
    with Store.open(tmp_path / "run", readonly=True) as store:
        state = state_of(store.records)
        write_model(store, state, tmp_path / "model.safetensors")
    totals, fragments = state.ledger.totals(), len(state.fragments)
    assert totals.merged == totals.produced == tokens * fragments
    final, first = load_file(tmp_path / "model.safetensors"), new_model().state_dict()
    alone = [plain(kind) for kind in KINDS]
    for name, values in final.items():
        mean = torch.stack([model[name] for model in alone]).mean(0)
        assert torch.equal(values, first[name]) == name.startswith("6."), "all but what is frozen has learnt"
        torch.testing.assert_close(values, mean, rtol=0, atol=1e-6)
    for file in sorted(tmp_path.glob("*-*.safetensors")):
        for name, values in load_file(file).items():
            torch.testing.assert_close(values, final[name], rtol=0, atol=1e-6, msg=f"{file.name} {name}")
    one, other = (load_file(tmp_path / f"ddp-{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(one[name], other[name]) for name in final), "all adopt the same bits"


@pytest.mark.parametrize(("kind", "state"), [("own", "host"), ("fsdp", "device")])
def test_ranks_leave_refuse_and_end_together(tmp_path, kind, state):
    options = [
        "--run.tokens=1e9", "--run.learners=1", "--sync.num_fragments=3", "--sync.sync_every=2", "--sync.quorum=1",
        "--learner.leave_timeout_s=60",
    ]  # fmt: skip
    with Syncer(tmp_path, genesis=genesis_of(tmp_path, new_model()), options=options) as syncer:
        where = {"SKERRY_SYNCER": f"127.0.0.1:{syncer.port}", "SKERRY_STATE": state}
        done, seen = act(tmp_path, "lives", f"{kind}:2", **where)
        assert done.returncode == 0, done.stderr
        totals = until(lambda: status_when_left(syncer, "told", "changed"), "the syncer to hear that they left")
    speaker, follower = seen[f"{kind}-0"], seen[f"{kind}-1"]
    assert speaker["told"] == follower["told"] == 5, "a signal to one rank is a wish of all"
    assert follower["code"] == 128 + signal.SIGTERM and "code" not in speaker
    assert totals["told"] == {"step": 5, "tokens": 5 * (3 + 4)}, "each rank says the tokens of its own batch"
    assert speaker["changed"] == follower["changed"]
    refused, why = speaker["changed"]
    assert refused == "ModelError" and why.startswith("rank 1: parameter 2.bias is another tensor since")
    failed, why = speaker["killed"]
    assert failed == "IslandError" and why.startswith("rank 1 of this learner's island is gone (")
    assert "left without handing over" not in done.stderr
    assert done.stderr.count("left: ") == 3, "each time by one rank"


def test_ranks_with_another_base_or_another_frozen_option_are_refused_when_they_meet(tmp_path):
    done, seen = act(tmp_path, "bases", "own:2", "fsdp:2", SKERRY_SYNCER="127.0.0.1:1")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        kind, why = seen[f"own-{rank}"]["refused"]
        assert kind == "ModelError" and why.startswith("the frozen parameter 6.weight of rank 1 is not that of rank 0")
        kind, why = seen[f"fsdp-{rank}"]["refused"]
        assert kind == "ConfigError" and why.startswith('frozen="any" is given on 1 of the 2 ranks of one learner')


def test_a_learner_on_one_rank_alone_is_refused_and_the_loop_is_as_it_was(tmp_path):
    done, seen = act(tmp_path, "absent", "ddp:2", SKERRY_SYNCER="127.0.0.1:1")
    assert done.returncode == 0, done.stderr
    kind, why = seen["ddp-0"]["refused"]
    assert kind == "IslandError" and "made no learner within 1 s: rank 1; make a skerry.Learner of the wrapped" in why


def status_when_left(syncer, *names):
    learners = syncer.status["learners"]
    if any(learners.get(name, {}).get("state") != "left" for name in names):
        return None
    return {name: {key: learners[name][key] for key in ("step", "tokens")} for name in names}


# ------------------------------------------------------------------------------------------ torchrun, and the examples


def torchrun(example, *words, **changes):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words]
    return subprocess.Popen(
        [*command, str(EXAMPLES / example)],
        env=environment(OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **changes),  # pytorch #135712
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def rank_of(agent, rank):
    """The process that is this rank under torchrun."""
    for entry in Path("/proc").iterdir():
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if parent == str(agent) and f"\0RANK={rank}\0".encode() in (entry / "environ").read_bytes():
                return int(entry.name)
        except (OSError, IndexError):
            continue
    return None


@pytest.mark.slow
def test_a_killed_rank_takes_its_island_down_and_not_the_run_and_torchrun_brings_it_back(tmp_path):
    """Both examples, in one run."""
    genesis = tmp_path / "genesis.safetensors"
    subprocess.run([sys.executable, str(EXAMPLES / "ddp_loop.py"), "--genesis", str(genesis)], check=True)
    options = [
        "--run.minutes=10",
        "--run.learners=2",
        "--sync.num_fragments=3",
        "--sync.sync_every=4",
        "--sync.quorum=1",
    ]
    with Syncer(tmp_path, genesis=genesis, options=options) as syncer:
        where = f"127.0.0.1:{syncer.port}"
        with (
            torchrun("ddp_loop.py", "--max-restarts=1", SKERRY_SYNCER=where, SKERRY_NAME="ddp") as ddp,
            torchrun("fsdp_loop.py", SKERRY_SYNCER=where, SKERRY_NAME="fsdp") as fsdp,
        ):
            until(lambda: syncer.status["learners"].get("ddp", {}).get("step", 0) > 3, "the first island to train")
            os.kill(rank_of(ddp.pid, 1), signal.SIGKILL)
            said = [each.communicate(timeout=WAIT_S)[0] for each in (ddp, fsdp)]
            assert [ddp.returncode, fsdp.returncode] == [0, 0], "\n".join(said)
            lives = {name: each["life"] for name, each in syncer.status["learners"].items()}
    assert lives == {"ddp": 2, "fsdp": 1}
    merged = {
        row.learner for fact in facts_of(tmp_path / "run") if isinstance(fact, Committed) for row in fact.decision.rows
    }
    assert merged == {"ddp", "fsdp"}
