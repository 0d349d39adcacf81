"""What seeds draw: every codec of the product, in worlds of integers and of tensors."""

from typing import get_args

from skerry.config import Codec
from skerry.proof.sim.algebra import BYTES, GRID
from skerry.proof.sim.scenario import draw

CODECS = set(get_args(Codec))


def test_the_simulators_algebra_has_every_codec_the_product_has():
    assert set(BYTES) == set(GRID) == CODECS
    by_bytes = sorted(CODECS, key=lambda codec: -BYTES[codec])
    assert by_bytes == sorted(CODECS, key=lambda codec: GRID[codec]), "fewer bytes, a coarser grid"


def test_seeds_draw_every_codec_both_ways():
    wires = [draw(seed).config.wire for seed in range(100)]
    assert {wire.codec_up for wire in wires} == {wire.codec_down for wire in wires} == CODECS
