"""skerry bench syncer --hostile: who floods gets in, with a token and with keys, and learners merge beside it."""

import contextlib

import pytest

from e2e.processes import Syncer
from skerry.proof.bench import hostile
from skerry.proof.bench.floods import measure
from skerry.proof.bench.hostile import Harm
from skerry.proof.bench.syncer import Load, key_files, prepared


@pytest.mark.parametrize("tls", [False, True])
def test_learners_merge_with_a_flood_and_without_in_one_run(tls):
    load = Load(learners=2, step_s=0.05, sync_every=2, fragments=3, parameters=10_000, seconds=0.5, tls=tls)
    found = measure(prepared(load, hostile=2), 2, lambda line: None, kinds=("reports", "guesses"))
    assert [kind.kind for kind in found.kinds] == ["reports", "guesses"]
    for kind in found.kinds:
        assert len(kind.calm) == len(kind.flooded) == 2 and kind.ratio > 0


def harm(port, kind, keys):
    return Harm(port, kind, 1, "", tuple(map(str, keys)), 100, 1, 1, "fp32", 400)


def test_who_floods_a_run_with_keys_is_let_in_with_its_own_and_not_with_one_of_another_run(tmp_path):
    with Syncer(tmp_path, "--keys") as syncer, contextlib.ExitStack() as stack:
        ours, theirs = (key_files(folder, ["hostile-0"]) for folder in (syncer.run_dir, tmp_path / "another"))
        control, bulk = hostile._Peer(harm(syncer.port, "ask", ours), 0).joined(stack, 1)
        assert control.version() == "TLSv1.3" and len(bulk) == 1
        with pytest.raises(OSError):
            hostile._Peer(harm(syncer.port, "guesses", theirs), 0).joined(stack, 1)
