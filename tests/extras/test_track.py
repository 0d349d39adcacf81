"""TensorBoard and Weights & Biases: the examples write what `on_metrics` told them, alone and as learners of a run."""

import pytest

from e2e.processes import WAIT_S, Syncer
from extras.runs import OPTIONS, alone, life

pytestmark = [pytest.mark.extras, pytest.mark.slow, pytest.mark.timeout(300)]

NAMES = {"tokens", "loss", "progress", "merged_share", "connected", "alone_steps", "steps_per_s"}


def as_learner(folder, name):
    """The example as the only learner of a run, to its end."""
    genesis = folder / "genesis.safetensors"
    alone(folder, name, "--genesis", genesis)
    with (
        Syncer(folder, genesis=genesis, options=["--run.steps=200", *OPTIONS]) as syncer,
        life(folder, name, syncer.port, 1) as (process, _),
    ):
        assert process.wait(WAIT_S) == 0, (folder / "life-1.log").read_text()


def test_tensorboard_has_a_curve_of_each_number(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard: ./run test-extras")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    as_learner(tmp_path, "tensorboard_loop")
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {f"skerry/{name}" for name in NAMES}
    assert all(one.value > 0 for one in events.Scalars("skerry/loss"))


def test_wandb_keeps_it_offline(tmp_path):
    pytest.importorskip("wandb", reason="needs wandb: ./run test-extras")
    as_learner(tmp_path, "wandb_loop")
    (written,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"merged_share" in written.read_bytes()
