"""When requests of an open load arrive: the mean rate holds, and the shape is what was asked for."""

from itertools import islice, pairwise
from statistics import fmean, pstdev

import pytest

from services.bench.errors import BenchError
from services.bench.plan.arrivals import Gamma, OnOff, arrivals


def gaps(source: Gamma | OnOff, seed: int = 3, count: int = 20_000) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *islice(source.times(seed), count)])]


@pytest.mark.parametrize("variation", [0.5, 1.0, 2.0, 4.0])
def test_gaps_have_the_mean_and_the_deviation_that_were_asked_for(variation: float) -> None:
    found = gaps(Gamma(5.0, variation))
    assert fmean(found) == pytest.approx(0.2, rel=0.1)
    assert pstdev(found) == pytest.approx(0.2 * variation, rel=0.1)


def test_a_metronome() -> None:
    assert list(islice(Gamma(4.0, 0.0).times(0), 4)) == [0.25, 0.5, 0.75, 1.0]


def test_bursts_arrive_while_it_is_on_and_keep_the_rate() -> None:
    times = list(islice(OnOff(10.0, on_s=2.0, off_s=8.0).times(1), 20_000))
    assert times == sorted(times)
    assert all(at_s % 10.0 <= 2.0 for at_s in times)
    assert len(times) / times[-1] == pytest.approx(10.0, rel=0.05)
    inside = [at_s % 10.0 for at_s in times]
    assert fmean(inside) == pytest.approx(1.0, rel=0.05)  # all of the 2 s are used


@pytest.mark.parametrize("source", [Gamma(5.0), Gamma(5.0, 3.0), OnOff(5.0, 1.0, 1.0)])
def test_the_seed_decides(source: Gamma | OnOff) -> None:
    assert gaps(source, seed=1, count=20) == gaps(source, seed=1, count=20)
    assert gaps(source, seed=1, count=20) != gaps(source, seed=2, count=20)


def test_what_the_flag_means() -> None:
    assert arrivals(2.0, None) == Gamma(2.0, 1.0)
    assert arrivals(2.0, "0") == Gamma(2.0, 0.0)
    assert arrivals(2.0, "4.5") == Gamma(2.0, 4.5)
    assert arrivals(2.0, " 2 / 0.5 ") == OnOff(2.0, 2.0, 0.5)


@pytest.mark.parametrize("text", ["", "x", "-1", "nan", "inf", "0/3", "2/", "1/2/3"])
def test_what_the_flag_does_not_mean(text: str) -> None:
    with pytest.raises(BenchError, match="write ON/OFF in seconds, such as 2/8"):
        arrivals(1.0, text)
