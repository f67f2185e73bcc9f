"""Rates under contention against measured ones, and lanes of copies and updates whose times can be told by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oomc.contention import Copy, Job, Rates, World
from oomc.machine import Machine, default
from oomc.runtime.gradients import BUFFER_ELEMENTS, ring_buffers

H200 = default("h200")
PLAIN: Machine = replace(
    H200, h2d=10.0, d2h=10.0, h2d_both=8.0, d2h_both=8.0, copy_latency=0.0, host_bandwidth=1e9, update_rate=4.0,
    streamed_rate=0.5, both_rate=4.25, bandwidth=2600.0, cores=0,
)  # fmt: skip


def rates(fetch: bool = False, out: bool = False, host: bool = False, device: bool = False) -> Rates:
    return Rates(H200, fetch, "copy" if out else None, host, device, 12.0, 2.0)


def test_one_direction_has_the_link_alone_and_both_slow_each_other() -> None:
    assert rates(fetch=True).h2d == 55e9
    assert rates(out=True).d2h == 55e9
    both = rates(fetch=True, out=True)
    assert both.h2d == both.d2h == 47e9


def test_updates_on_the_host_are_slowed_by_copies_as_measured() -> None:
    assert rates(host=True).host == 4.1e9
    busy = rates(fetch=True, out=True, host=True)
    assert 2.3e9 * 0.9 < busy.host < 2.7e9
    assert busy.h2d == pytest.approx(47e9, rel=0.01)


def test_host_and_device_update_at_their_rate_together() -> None:
    both = rates(host=True, device=True)
    assert both.host + both.device == pytest.approx(5.4e9, rel=0.01)
    assert rates(device=True).device == pytest.approx(3.9e9, rel=0.03)
    assert rates(device=True, fetch=True).device < 0.6 * rates(device=True).device


def test_cores_and_device_move_no_more_beside_a_fetch_than_without_one() -> None:
    """Measured on an H200: 146 to 153 GB/s with a fetch, 148 to 151 without, and 167 to 172 of the cores and copies."""
    both = rates(host=True, device=True, fetch=True)
    assert both.h2d + 24 * both.device + 28 * both.host == pytest.approx(H200.mixed_bandwidth)
    assert H200.mixed_bandwidth == pytest.approx(5.4e9 * 26)
    assert H200.mixed_bandwidth < H200.host_bandwidth
    alone = rates(host=True, fetch=True, out=True)
    assert alone.h2d + alone.d2h + 28 * alone.host == pytest.approx(H200.host_bandwidth)
    assert replace(H200, both_rate=9e9).mixed_bandwidth == H200.host_bandwidth


@pytest.mark.parametrize("name", ["h200", "h100", "a100", "4090", "5090"])
def test_both_reach_their_rate_alone_and_are_hardly_slower_than_the_host_beside_copies(name: str) -> None:
    """The link and not memory may be what bounds the two (A100)."""
    machine = default(name)
    both = Rates(machine, False, None, True, True, 12.0, 2.0)
    assert both.host + both.device == pytest.approx(machine.both_rate, rel=0.01)
    for fetch, out in ((True, None), (False, "copy"), (True, "copy")):
        both = Rates(machine, fetch, out, True, True, 12.0, 2.0)  # type: ignore[arg-type]
        host = Rates(machine, fetch, out, True, False, 12.0, 2.0)  # type: ignore[arg-type]
        assert both.host + both.device >= 0.9 * host.host


def test_copies_share_the_memory_of_a_device_that_is_the_host() -> None:
    cpu = default("cpu")
    both = Rates(replace(cpu, host_bandwidth=20e9), True, "copy", True, False, 12.0, 2.0)
    assert (both.h2d + both.d2h) * 2 <= 20e9 * 1.0001
    assert both.host > 0


def world(where: str = "host", machine: Machine = PLAIN) -> World:
    return World(machine, where, 12.0, 2.0)  # type: ignore[arg-type]


def test_a_lane_copies_in_order_and_not_before_its_time() -> None:
    w = world()
    first, second = w.put(Copy("h2d", "a", 0, 100, 1.0)), w.put(Copy("h2d", "b", 0, 50, 0.0))
    w.until([second])
    assert (first.start, first.end, second.start, second.end) == pytest.approx((1, 11, 11, 16))
    assert w.busy["h2d"] == pytest.approx(15)
    assert w.moved_bytes["h2d"] == 150


def test_both_directions_run_beside_each_other() -> None:
    w = world()
    there, back = w.put(Copy("h2d", "a", 0, 80, 0.0)), w.put(Copy("d2h", "b", 0, 160, 0.0))
    w.until([there, back])
    assert there.end == pytest.approx(10)
    assert back.end == pytest.approx(10 + 80 / 10)


def test_a_lane_waits_for_the_update_that_stands_before_a_copy() -> None:
    w = world()
    job = Job("u", 0, 40, 0, 0, False)
    w.begin(job)
    barrier = w.put(Copy("h2d", "await", 0, 0, 0.0, (job,)))
    fetch = w.put(Copy("h2d", "fetch", 0, 100, 0.0, behind=barrier))
    w.until([fetch])
    assert job.end == pytest.approx(10)
    assert barrier.cleared == pytest.approx(10)
    assert fetch.end == pytest.approx(20)


def test_updates_go_by_urgency_then_by_order() -> None:
    w = world()
    late, soon, urgent = (Job(n, 0, 4, 0, order, False) for n, order in (("late", 2), ("soon", 1), ("urgent", 3)))
    for job in (late, soon, urgent):
        w.begin(job)
    w.until_read(urgent)
    w.drain()
    assert [job.end for job in (urgent, soon, late)] == pytest.approx([1, 2, 3])


def test_an_update_has_read_its_gradient_when_the_rest_fits_the_ring() -> None:
    machine = replace(PLAIN, cores=1, update_rate=8e6, h2d=1e9, d2h=1e9, h2d_both=1e9, d2h_both=1e9)
    w = world(machine=machine)
    ring = ring_buffers(1) * BUFFER_ELEMENTS
    job = Job("u", 0, 3 * ring, 0, 0, False)
    w.begin(job)
    w.until_read(job)
    assert job.read == pytest.approx(2 * ring / 8e6, rel=1e-3)
    w.drain()
    assert job.end == pytest.approx(3 * ring / 8e6, rel=1e-3)


def test_what_lives_on_the_device_is_updated_there() -> None:
    w = world("both")
    job, other = Job("r", 0, 1000, 0, 0, True), Job("s", 0, 400, 0, 1, False)
    w.begin(job)
    w.begin(other)
    w.until([job])
    assert job.end == pytest.approx(10)
    assert (job.by_device, job.by_host) == pytest.approx((1000, 0))
    assert other.by_device == 0, "the device updates what it holds first"
    w.drain()
    assert other.by_device > 0


def test_with_updates_on_the_device_only_those_of_its_own_come_first() -> None:
    w = world("device")
    job, other = Job("r", 0, 1000, 0, 0, True), Job("s", 0, 5, 0, 1, False)
    w.begin(job)
    w.begin(other)
    w.drain()
    assert other.end == pytest.approx(10 + 5 / 0.5)
    assert other.by_host == 0


def test_an_update_begins_after_its_copies() -> None:
    w = world()
    copy = w.put(Copy("d2h", "g", 0, 100, 0.0, kind="sum"))
    job = Job("u", 0, 4, 0, 0, False, (copy,))
    w.begin(job)
    w.drain()
    assert (copy.end, job.end) == pytest.approx((10, 11))
