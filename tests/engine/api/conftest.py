import pytest


@pytest.fixture(scope="module")
def served():
    """One server for the tests of a module, which leave it as it was. Its engine's thread ends with them."""
    from tests.engine.api.running import engine, running

    with running(engine()) as found:
        yield found
        found.idle()
