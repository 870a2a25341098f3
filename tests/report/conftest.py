import pytest

from megastep.rollout.renderer import load_tokenizer
from tests.report.pages import BYTES, WORDS


@pytest.fixture(scope="package")
def tokenizers():
    return {path: load_tokenizer(path) for path in (WORDS, BYTES)}
