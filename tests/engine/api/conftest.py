import pytest


@pytest.fixture(scope="session")
def served():
    """One server for tests that leave it as it was."""
    from tests.engine.api.running import engine, running

    with running(engine()) as found:
        yield found
        found.idle()
