"""What several test files share."""

from functools import cache

import pytest
from training import train


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """TP 1 by Megatron's own model, once for each set of flags, function called before, and model:
    `reference(flags, before, model)`."""

    @cache
    def get(flags, before=None, model="gpt"):
        return train(tmp_path_factory.mktemp("tp1"), 1, flags, before=before, model=model)

    return get
