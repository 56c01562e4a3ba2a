"""Far more episodes than lanes."""

import os

from envs import Pool
from rl.engines.jax import JaxEngine
from rl.engines.protocol import Policy
from rl.rollout import roll_out
from tests.rl import chats
from tests.rl.test_rollout import OPTIONS, model, tasks


def resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_thousand_episodes_at_once_compile_nothing_new_and_hold_no_more_memory():
    engine = JaxEngine(model(), lanes=32, context=128)
    engine.load(Policy("base", 1))
    engine.warm_up(["base"])
    compiled, most, submit = engine.metrics["compiles"], 0, engine.submit

    def count(request):
        nonlocal most
        submit(request)
        most = max(most, engine.gauges["sessions"])

    engine.submit = count
    with Pool(workers=1) as pool:

        def run(first: int) -> None:
            found = roll_out(engine, pool, chats.chat(), tasks(range(first, first + 250), rollouts=4), "base", in_flight=1000, **OPTIONS)
            assert sum(t.error is None for t in found) >= 900 and {t.seed % 10 for t in found if t.error} <= {7}
            assert len({tuple(t.tokens) for t in found}) > 500

        run(0)
        held = resident()
        run(250)
    assert resident() - held < 32 << 20
    assert engine.metrics["compiles"] == compiled and most > 900
    assert engine.gauges["sessions"] == engine.gauges["blocks_used"] == 0
