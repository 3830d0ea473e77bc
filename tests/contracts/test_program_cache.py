"""Within one run of the tests no program is compiled twice."""

from pathlib import Path

import jax
import jax.monitoring


def test_equal_programs_are_compiled_once():
    events: list[str] = []

    def listen(event: str, **_: object) -> None:
        events.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        # Functions of their own, as two tests or two workers would have them.
        for _ in range(2):
            assert jax.jit(lambda x: x * 40.5 - 3.25)(2.0) == 77.75
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert events.count("/jax/compilation_cache/cache_hits") >= 1
    assert any(Path(jax.config.jax_compilation_cache_dir).iterdir())
