"""Any config or config.json is accepted, or rejected with one line per problem.

Never a traceback or a hang. Hypothesis draws the same cases in every run.
"""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megastep.config import Config, load, to_yaml
from megastep.config.paths import absolute
from megastep.errors import ArchitectureError, ConfigError
from megastep.models.architecture import parse_architecture, read_architecture
from tests.bad_input.harness import CONFIG, check_lines, time_limit
from tests.bad_input.test_config import TYPES

KEYS = list(TYPES)
CHASE_YAML = Path(CONFIG).read_bytes()
SHAPE_FILE = Path("configs/models/chase/config.json")
SHAPE = json.loads(SHAPE_FILE.read_text())
quick = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.integers(),
    st.floats(),
    st.floats(0, 2),
    st.sampled_from([2**31 - 1, 2**31, 2**63, 2**64, -(2**63), 1e308, -0.0, 5e-324]),
)
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "",
            "auto",
            "null",
            "~",
            "???",
            "${x}",
            "${env:A}",
            "..",
            "/",
            "a/b",
            "1e3",
            "0x10",
            "1:30",
            "yes",
            "2024-01-01",
            "!!int x",
            "&a [*a]",
            "*a",
            "{a: 1, a: 2}",
            "[",
            "\0",
            "\ud800",
            "hf:x",
            "x.jsonl",
        ]
    ),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CHOSEN = st.sampled_from(
    [
        *KEYS,
        "env.options.x",
        "env.options",
        "rollout.template.a.b",
        "base",
        "train",
        "policy.parallel",
    ]
)
OVERRIDES = st.tuples(CHOSEN | st.text(max_size=12), VALUES.map(repr) | TEXTS).map(
    "=".join
) | st.text(max_size=20)


def loaded(config, overrides: tuple[str, ...] | list[str] = ()) -> Config | None:
    """The config, or None if it was properly rejected."""
    with time_limit(10):
        try:
            return load(config, overrides)
        except ConfigError as error:
            check_lines([f"error: {problem}" for problem in error.problems])
            assert all(problem.isprintable() for problem in error.problems), error.problems
            return None


def check_reads_back(config: Config, folder: Path) -> None:
    path = folder / "kept.yaml"
    path.write_text(to_yaml(config))
    assert load(path) == absolute(config)


@quick
@given(st.lists(OVERRIDES, min_size=1, max_size=3))
def test_overrides(tmp_path, overrides):
    config = loaded(CONFIG, overrides)
    if config is not None:
        check_reads_back(config, tmp_path)


@quick
@given(st.dictionaries(CHOSEN, VALUES, min_size=1, max_size=4))
def test_values_in_a_file(tmp_path, values):
    path = tmp_path / "config.yaml"
    try:
        path.write_text(
            yaml.safe_dump({"base": str(Path(CONFIG).resolve()), **values}, allow_unicode=True)
        )
    except UnicodeEncodeError:
        return  # a lone surrogate: no file can hold it
    config = loaded(path)
    if config is not None:
        check_reads_back(config, tmp_path)


@quick
@given(st.binary(max_size=200))
def test_bytes_in_a_file(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    loaded(tmp_path / "config.yaml")


MUTATIONS = st.lists(
    st.tuples(
        st.integers(0, 5000),
        st.integers(0, 12),
        st.sampled_from(
            [
                b"",
                b"\0",
                b":",
                b"\n",
                b"  ",
                b"- ",
                b"&a ",
                b"*a",
                b"{",
                b"[",
                b"'",
                b'"',
                b"!!",
                b"<<: ",
                b"?",
                b"|",
                b"\xff",
                b"9" * 30,
                b".inf",
                b"\t",
                b"---\n",
                b"%",
                b"train:",
                b"model: ",
                b"${a}",
                b"null",
                b",",
                b"}",
                b"]",
                b"-",
                b"e",
            ]
        ),
    ),
    min_size=1,
    max_size=4,
)


def mutated(content: bytes, mutations: list[tuple[int, int, bytes]]) -> bytes:
    for place, removed, added in mutations:
        place %= len(content) + 1
        content = content[:place] + added + content[place + removed :]
    return content


@quick
@given(MUTATIONS)
def test_mutations_of_a_file(tmp_path, mutations):
    (tmp_path / "models").mkdir(exist_ok=True)
    chase = tmp_path / "models" / "chase"
    if not chase.exists():
        chase.symlink_to(SHAPE_FILE.parent.resolve())
    (tmp_path / "config.yaml").write_bytes(mutated(CHASE_YAML, mutations))
    loaded(tmp_path / "config.yaml")


# ---------------------------------------------------------------- config.json


def check_architecture(read) -> None:
    with time_limit(10):
        try:
            arch = read()
        except ArchitectureError as error:
            check_lines([f"error: {error}"])
        else:
            assert arch.layers >= 1
            assert arch.heads % arch.kv_heads == 0
            assert arch.padded_vocab >= arch.vocab


@quick
@given(
    st.dictionaries(
        st.sampled_from(
            [
                *SHAPE,
                "rope_scaling",
                "rope_parameters",
                "sliding_window",
                "mlp_bias",
                "use_sliding_window",
                "num_local_experts",
            ]
        ),
        VALUES,
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"]),
)
def test_values_of_a_shape(values, family):
    check_architecture(lambda: parse_architecture(SHAPE | {"model_type": family} | values))


@quick
@given(MUTATIONS)
def test_mutations_of_a_shape(tmp_path, mutations):
    (tmp_path / "config.json").write_bytes(mutated(SHAPE_FILE.read_bytes(), mutations))
    check_architecture(lambda: read_architecture(tmp_path))


@quick
@given(st.binary(max_size=200))
def test_bytes_of_a_shape(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    check_architecture(lambda: read_architecture(tmp_path))


def test_the_fuzz_tests_would_notice_a_traceback(tmp_path, monkeypatch):
    """`loaded` catches ConfigError only."""
    monkeypatch.setattr("megastep.config.checks.validate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loaded(CONFIG)
    monkeypatch.setattr("megastep.config.checks.validate", lambda *_: ["two\nlines"])
    with pytest.raises(AssertionError):
        loaded(CONFIG)
