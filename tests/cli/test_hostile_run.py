"""A learner joins runs of strangers: what a syncer says reads, writes and runs nothing on the learner's machine."""

from functools import partial

import pytest

from cli.called import called
from e2e.processes import OPTIONS, Syncer
from skerry import config as configs
from skerry.errors import Refusal


def test_a_syncer_does_not_choose_what_a_learner_reads(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.delenv("SKERRY_DATA", raising=False)
    folder, call = tmp_path, partial(called, capsys)
    (folder / "private").mkdir()
    (folder / "private" / "diary.txt").write_text("nobody is to read this\n" * 1000)
    options = [*OPTIONS, f"--data.path={folder / 'private'}"]
    with Syncer(folder, options=options) as syncer:
        code, _, err = call("learner", "--syncer", f"127.0.0.1:{syncer.port}")
        assert code == 2 and f"the run trains on data.path = '{folder / 'private'}'" in err and "--data PATH" in err
        code, _, err = call("learner", "--syncer", f"127.0.0.1:{syncer.port}", "--data", str(folder / "nosuch"))
        assert code == 2 and "nosuch does not exist" in err, "its own is taken, and nothing else"


def test_a_run_larger_than_the_machine_is_refused_before_any_of_it_is_made():
    pytest.importorskip("torch")
    from skerry.train.loop import check_size

    run = configs.Run(steps=1)
    check_size(configs.Config(run=run), is_trained=True)
    for wrong in (
        configs.Config(run=run, model=configs.Model(layers=1000, width=10**5 - 16, heads=2)),
        configs.Config(run=run, data=configs.Data(batch=10**6), model=configs.Model(context=10**6)),
        configs.Config(run=run, model=configs.Model(vocabulary=10**7, width=96000, heads=2)),
    ):
        configs.validate(wrong)
        with pytest.raises(Refusal, match="of memory at least"):
            check_size(wrong, is_trained=True)


def test_a_model_that_is_evaluated_is_not_made_where_it_has_no_room():
    pytest.importorskip("torch")
    from skerry.train.held_out import HeldOut

    large = configs.Config(model=configs.Model(layers=1000, width=10**5 - 16, heads=2))
    with pytest.raises(Refusal, match=r"the run's model needs .* of memory at least, .*: take a larger machine$"):
        HeldOut(large, None, "cpu")
