"""Option ``pytest --rewrite-golden tests/swarm`` records the golden traces anew; look at the difference before
committing."""


def pytest_addoption(parser):
    parser.addoption("--rewrite-golden", action="store_true", help="record the golden traces of tests/swarm anew")
