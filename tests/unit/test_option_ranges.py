"""Numbers at the ends of what a double holds: a sound simulation or one line that names the option, and no warning."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from simmoe.cli import run as simmoe
from simmoe.errors import UsageError
from simmoe.profiles.catalog import DEFAULT_PROFILE, profile_names
from simmoe.simulator.config import MAX_DELAY_S, MIN_PUBLISH_INTERVAL_S, FrontEndConfig, SimConfig
from simmoe.traces.build import build_workload
from simmoe.traces.spec import CVS, MAX_NORMAL, MAX_REQUESTS, PHASES_S, RATES, WorkloadSpec

PROFILE = DEFAULT_PROFILE if DEFAULT_PROFILE in profile_names() else profile_names()[0]

EXTREMES = ["nan", "inf", "-inf", "-1", "0", "5e-324", "1e-320", "1e-300", "1e-6", "1e9", "1e200", "1e308", "1.7e308"]
WHOLE = ["-1", "0", "1", "65536", "99999999", str(2**31), str(2**63), str(10**30)]

#: option -> what else makes its value count
REALS = {
    "--ingress-s": "",
    "--egress-s": "",
    "--publish-interval-s": "",
    "--rate": "",
    "--cv": "--arrivals gamma --rate 3",
    "--on-s": "--arrivals onoff --rate 3",
    "--off-s": "--arrivals onoff --rate 3",
    "--mu": "",
    "--sigma": "",
    "--slo-ttft": "",
    "--slo-tpot": "",
    "--max-time-s": "",
}
WHOLES = {
    "--ranks": "--max-time-s 0.1",
    "--num-front-ends": "--max-time-s 0.1",
    "--requests": "--rate 3 --max-time-s 0.1",
    "--k": "",
    "--seed": "",
    "--min-total-tokens": "",
    "--max-total-tokens": "",
    "--clip-total-tokens": "",
    "--max-num-seqs": "",
    "--max-num-batched-tokens": "",
    "--num-gpu-blocks": "",
    "--block-size": "",
    "--k-granularity": "",
}
#: Values that are sound and take long: what they ask for is built.
SLOW = {("--ranks", "65536"), ("--num-front-ends", "65536")}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "requests.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,20,5\n0.5,300,9\n2,40,3\n")
    return path


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((option, value) for option in REALS for value in EXTREMES),
        *((option, value) for option in WHOLES for value in WHOLE if (option, value) not in SLOW),
    ],
)
def test_any_number_is_simulated_or_refused(
    option: str, value: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Warnings are errors here, so a number that overflows on the way fails."""
    further = (REALS | WHOLES)[option].split()
    code = simmoe(["run", "--trace", str(trace), "--profile", PROFILE, option, value, *further])
    printed = capsys.readouterr()
    if code:
        assert code in (2, 3), "an option or the trace is to blame"
        last = printed.err.splitlines()[-1]
        assert option[2:].replace("-", "_") in last.replace("-", "_") or "num_ranks" in last
    else:
        assert "injected" in printed.out and "nan" not in printed.out


@pytest.mark.parametrize("mix", ["4:1e308,8:1e308", "4:1e-320", "4:inf", "4:1e300,8:1", "4:-1,8:2"])
def test_weights_beyond_reason_are_refused(mix: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simmoe(["run", "--trace", str(trace), "--profile", PROFILE, "--mix", mix]) == 2
    assert "mix gives budget 4 the weight" in capsys.readouterr().err


@pytest.mark.parametrize("rates", ["1e-300,1e300", "1e-320", "5,1e7", "1e-7"])
def test_a_sweep_refuses_rates_before_any_work(
    rates: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert simmoe(["sweep", "--trace", str(trace), "--profile", PROFILE, "--rates", rates, "--out", str(out)]) == 2
    assert "--rates" in capsys.readouterr().err.splitlines()[-1]
    assert not out.exists()


@pytest.mark.parametrize("end", [0, 1])
def test_the_ends_of_each_range_are_sound(end: int, trace: Path) -> None:
    for name, bounds, further in (
        ("rate", RATES, {}),
        ("cv", CVS, {"arrivals": "gamma", "rate": 3.0}),
        ("on_s", PHASES_S, {"arrivals": "onoff", "rate": 3.0}),
        ("off_s", (0.0, PHASES_S[1]), {"arrivals": "onoff", "rate": 3.0}),
        ("mu", (-MAX_NORMAL, MAX_NORMAL), {"rate": 3.0}),
        ("sigma", (0.0, MAX_NORMAL), {"rate": 3.0}),
    ):
        spec = WorkloadSpec(trace=str(trace), requests=50, **{name: bounds[end], **further})  # type: ignore[arg-type]
        workload = build_workload(spec)
        assert np.isfinite(workload.arrival_s).all()
        assert workload.arrival_s[-1] > 0, f"{name} {bounds[end]} puts everything at one instant"
        assert workload.k_qos.min() >= 1 and workload.k_qos.max() <= 32


def test_a_workload_longer_than_a_clock_can_tell_is_refused(trace: Path) -> None:
    with pytest.raises(UsageError, match=r"at rate 1e-06 the last of 9999 requests arrives after .* fewer requests"):
        build_workload(WorkloadSpec(trace=str(trace), rate=1e-6, requests=9999))
    with pytest.raises(UsageError, match=r"about .* phases .* lengthen"):
        build_workload(WorkloadSpec(trace=str(trace), rate=1e-6, requests=99, arrivals="onoff", on_s=1e-3, off_s=0))


def test_requests_take_the_memory_their_bound_names(trace: Path) -> None:
    n = 200_000
    spec = WorkloadSpec(trace=str(trace), rate=3.0, requests=n)
    build_workload(WorkloadSpec(trace=str(trace), rate=3.0, requests=10))  # what is read and imported once
    tracemalloc.start()
    build_workload(spec)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 150 * n, f"{peak / n:.0f} bytes a request"
    with pytest.raises(UsageError, match=r"requests is 10000001; it must be at most 10,000,000"):
        WorkloadSpec(requests=MAX_REQUESTS + 1)


def test_front_end_ranges_are_theirs() -> None:
    FrontEndConfig(publish_interval_s=MIN_PUBLISH_INTERVAL_S, ingress_s=MAX_DELAY_S, egress_s=MAX_DELAY_S)
    FrontEndConfig(publish_interval_s=0, wakeup_s=MAX_DELAY_S)
    with pytest.raises(UsageError, match=r"publish_interval_s is 1e-320; it must be at least 1e-06 s"):
        FrontEndConfig(publish_interval_s=1e-320)
    with pytest.raises(UsageError, match=r"num_ranks x num_front_ends is 1200000; it must be at most 1,000,000"):
        SimConfig(num_ranks=1200, front_end=FrontEndConfig(num_front_ends=1000))
    with pytest.raises(UsageError, match="max_time_s is nan"):
        SimConfig(max_time_s=float("nan"))
