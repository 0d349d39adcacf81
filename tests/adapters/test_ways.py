"""Fragments between a model and cells whose memory is kept: what was made once for one fragment serves no other."""

import mmap

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from skerry.adapters import ways  # noqa: E402
from skerry.adapters.torch import TorchParameters, layout_of_model, trainable  # noqa: E402
from skerry.adapters.ways import CudaWay, Flat, NoWay  # noqa: E402
from skerry.algo.fragments import gather, split  # noqa: E402
from skerry.node.cells import float_cells, memory_bytes  # noqa: E402

CUDA = pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]


class Kept(NoWay):
    """Hands out the same row of a cell each time, as a GPU's does."""

    def __init__(self):
        self.flats = {}

    def room(self, cell, size):
        key = (cell.word.ctypes.data, size)
        return self.flats.setdefault(key, Flat(torch.from_numpy(cell.load(size))))

    def down(self, cell, size, mark):
        return self.room(cell, size)


def laid(size, each_way):
    """Cells on pages of their own, as those that a GPU's memory is registered with are."""
    return float_cells(mmap.mmap(-1, memory_bytes(size, 2 * each_way)), size, each_way, each_way)


def odd():
    """Sizes that leave gaps in fragments."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(9, 31), nn.BatchNorm1d(31), nn.Linear(31, 40), nn.Linear(40, 3, bias=False))


@pytest.fixture(params=DEVICES)
def attached(request, monkeypatch):
    """A model, its fragments, its carrier and two cells each way of the largest's size."""
    monkeypatch.setattr(ways, "NUMBERS", 4)  # so that marks go past them
    model = odd().to(request.param)
    parameters = TorchParameters(model, None)
    fragments = split(layout_of_model(model), 4)
    size = max(fragment.size for fragment in fragments)
    cells = laid(size, 2)
    if request.param == "cpu":
        parameters._ways[torch.device("cpu")] = Kept()
    parameters.meet(cells)
    return model, fragments, parameters, cells


def expected(model, fragment):
    return gather(fragment, {name: p.detach().cpu().numpy() for name, p in trainable(model).items()})


def settle():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def test_every_fragment_is_read_whole_through_one_cell(attached):
    model, fragments, parameters, cells = attached
    assert any(sum(slot.size for slot in f.slots) < f.size for f in fragments), "no fragment has a gap"
    for mark, fragment in enumerate([*fragments, *reversed(fragments), *fragments], 1):
        cells.up[0].values[:] = np.nan
        parameters.read(fragment, cells.up[0], mark)
        settle()
        assert cells.up[0].is_marked(mark)
        np.testing.assert_array_equal(cells.up[0].load(fragment.size), expected(model, fragment))


def test_what_comes_down_is_added_and_written_where_it_belongs(attached):
    model, fragments, parameters, cells = attached
    for mark, fragment in enumerate(fragments * 3, 1):
        before, cell = expected(model, fragment), cells.down[mark % 2]
        change = np.arange(fragment.size, dtype=np.float32)
        change[before == 0] = 0.0  # gaps, and a bias that stays
        cell.store(change)
        parameters.add(fragment, cell, mark)
        settle()
        assert cell.is_marked(mark)
        np.testing.assert_array_equal(expected(model, fragment), before + change)
        cell.store(before)
        parameters.write(fragment, cell, mark + 100)
        settle()
        np.testing.assert_array_equal(expected(model, fragment), before)


def test_a_parameter_that_was_given_other_memory_is_read_there(attached):
    model, fragments, parameters, cells = attached
    for fragment in fragments:
        parameters.read(fragment, cells.up[0], 1)
        parameters.add(fragment, cells.down[0], 1)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() + 1
    for mark, fragment in enumerate(fragments, 2):
        parameters.prepare([fragment])
        parameters.read(fragment, cells.up[0], mark)
        settle()
        np.testing.assert_array_equal(cells.up[0].load(fragment.size), expected(model, fragment))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cells_of_an_earlier_life_are_let_go():
    way = CudaWay(torch.device("cuda"))
    lives = [laid(64, 1) for _ in range(3)]
    for cells in lives:
        way.meet((*cells.up, *cells.down))
        assert {id(stage.cell) for stage in way._stages.values()} == {id(cells.up[0]), id(cells.down[0])}
