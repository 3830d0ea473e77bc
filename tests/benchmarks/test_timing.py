"""The measuring code: order, ratios within rounds, spreads."""

import time

from benchmarks import timing


def test_every_round_runs_every_case_once():
    ran: list[str] = []
    cases = [timing.Case(name, lambda name=name: ran.append(name)) for name in "abc"]
    samples = timing.measure(cases, seconds=0.0, min_rounds=4)
    assert [len(samples[name].wall) for name in "abc"] == [4, 4, 4]
    rounds = [ran[start : start + 3] for start in range(0, len(ran), 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len(rounds) == 6  # twice unmeasured
    assert len({tuple(names) for names in rounds}) > 1


def test_budget_and_limits():
    case = timing.Case("nap", lambda: time.sleep(0.002))
    assert len(timing.measure([case], seconds=60, max_rounds=3)["nap"].wall) == 3
    few = timing.measure([case], seconds=0.01, min_rounds=1)["nap"]
    assert 1 <= len(few.wall) <= 6
    assert min(few.wall) >= 0.002
    assert max(few.cpu) < 0.002


def test_ratio_is_taken_within_rounds():
    # The machine slows down tenfold midway: the ratio of medians would say 10, or 1.
    slow = timing.Samples(wall=[2.0, 20.0, 20.0], cpu=[1.0, 1.0, 1.0])
    fast = timing.Samples(wall=[1.0, 10.0, 10.0], cpu=[4.0, 4.0, 4.0])
    assert timing.ratio(slow, fast, "wall") == timing.Spread(2.0, 2.0, 2.0, 2.0)
    assert timing.ratio(slow, fast, "cpu").median == 0.25


def test_spread():
    assert timing.spread([5.0]) == timing.Spread(5.0, 5.0, 5.0, 5.0)
    assert timing.spread([4.0, 1.0, 3.0, 2.0, 5.0]) == timing.Spread(3.0, 2.0, 4.0, 1.0)


def test_results_are_waited_for():
    class Pending:
        waited = 0

        def block_until_ready(self):
            Pending.waited += 1
            return self

    timing.measure([timing.Case("x", lambda: {"y": [Pending()]})], seconds=0, min_rounds=3)
    assert Pending.waited == 5
